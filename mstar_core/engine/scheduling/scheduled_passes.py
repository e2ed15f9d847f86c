"""Passes of a KV node's steps: planned, moved on once they are launched, and finished with their ids.

Part of the scheduler. Python runs per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.base import Done
from mstar_core.engine.sampling.masks import allowed_bits
from mstar_core.engine.scheduling.requests import no_id
from mstar_core.engine.scheduling.step import ScheduledPass
from mstar_core.engine.steps.device import AHEAD, AHEAD_TOKENS
from mstar_core.engine.steps.plan import LoopPlan, PassPlan
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.constraints.matcher import Grammars
    from mstar_core.engine.base import Job, JobKey, StepResult
    from mstar_core.engine.port_check import PortCheck
    from mstar_core.engine.scheduling.known_ids import KnownIds
    from mstar_core.engine.scheduling.loops import Loops
    from mstar_core.engine.scheduling.pages import Pages
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.engine.scheduling.sequence import Branch, ForwardPass
    from mstar_core.engine.scheduling.step import KVStep, Launch
    from mstar_core.engine.steps.device import Device, PassOutput
    from mstar_core.graph.declare.nodes import NodeSpec

FUSED_TOKENS: Final = 65536
"""Tokens of one step after which fused loops continue in the next one, so that a long rollout delays no other node."""


class PassScheduler:
    """Moves the passes of branches through their steps. It keeps no state."""

    def __init__(
        self,
        spec: NodeSpec,
        requests: Requests,
        loops: Loops,
        pages: Pages,
        known: KnownIds,
        device: Device,
        check: PortCheck,
        grammars: Grammars | None = None,
    ) -> None:
        self._port = spec.sampling.port if spec.sampling else None
        self._requests = requests
        self._memory = requests.memory
        self._loops = loops
        self._pages = pages
        self._known = known
        self._device = device
        self._check = check
        self._grammars = grammars
        self._attached = frozenset(each.port for each in spec.kv.attached) if spec.kv is not None else frozenset()

    # -- before a launch ---------------------------------------------------------------------------------------------

    def scheduled(self, branch: Branch, count: int) -> ScheduledPass:
        """Return the next `count` tokens of a branch's current pass."""
        forward, job = branch.current, branch.job
        assert forward is not None
        is_last = count == forward.left
        samples = is_last and self._port is not None and not forward.is_replay and job is not None and job.sample
        samples = samples and branch.name != branch.request.memory
        samples = samples and job is not None and not self._known.replaces_draw(branch, job)
        return ScheduledPass(branch, forward, job, count, is_last, samples)

    def plan(self, passes: list[ScheduledPass]) -> tuple[PassPlan, ...]:
        """Return the plans of these passes. The host's counts then are those after the step."""
        self._look_ahead(passes)
        plans = tuple([self._plan(one, mask) for one, mask in zip(passes, self._masks(passes), strict=True)])
        for one in passes:
            one.forward.done += one.count
            if one.forward.attend.write:
                self._memory.tables.length[one.branch.slot] += one.count
            if one.samples:
                self._memory.slots.drawn[one.branch.slot] += 1
        return plans

    def _plan(self, one: ScheduledPass, mask: np.ndarray | None) -> PassPlan:
        forward, branch, count = one.forward, one.branch, one.count
        slots, slot = self._memory.slots, branch.slot
        ports, positions, position, is_whole = forward.ports, forward.given, forward.position, count == forward.tokens
        if not is_whole:
            ports = {
                name: value if (axis := forward.axes[name]) is None else value.narrow(axis, forward.done, count)
                for name, value in ports.items()
            }
            if positions is not None:
                positions = positions.narrow(-1, forward.done, count)
            elif forward.attend.positions == "running":
                position += forward.done
        keeps = bool(self._attached) and _keeps(one)
        wants = frozenset() if forward.is_replay else branch.wants
        return PassPlan(
            slot=slot,
            cached=int(self._memory.tables.length[slot]),
            count=count,
            ports=ports,
            axes=forward.axes,
            attend=forward.attend,
            position=position,
            given=positions,
            is_whole=is_whole,
            is_ids=forward.is_ids,
            is_replay=forward.is_replay,
            per_item=forward.per_item,
            iterations=forward.iterations,
            wants=wants | self._attached if keeps else wants,
            keeps=keeps,
            sampling=slots.sampling[slot] if one.samples else None,
            drawn=int(slots.drawn[slot]),
            forced=_forced(one) if one.samples else -1,
            mask=mask,
            loop=_loop_plan(one),
            adapter=branch.request.adapter,
            memory=self._memory_of(branch),
        )

    def _memory_of(self, branch: Branch) -> tuple[int, int] | None:
        """Return slot and tokens of the memory that a branch reads."""
        memory = branch.request.memory_of(branch)
        return None if memory is None else (memory.slot, int(self._memory.tables.length[memory.slot]))

    def _masks(self, passes: Sequence[ScheduledPass]) -> Sequence[np.ndarray | None]:
        """Return the ids that each pass may draw, see PassPlan. A known id is taken whatever the mask."""
        draws = [one.samples and _forced(one) < 0 for one in passes]
        vocab = self._memory.slots.vocab
        fixed = [
            allowed_bits(one.job.suppress, vocab) if draw and one.job is not None and one.job.suppress else None
            for one, draw in zip(passes, draws, strict=True)
        ]
        matchers = [one.branch.matcher if draw else None for one, draw in zip(passes, draws, strict=True)]
        chosen = [matcher for matcher in matchers if matcher is not None]
        if not chosen:
            return fixed
        assert self._grammars is not None
        masks = iter(self._grammars.masks(chosen))
        return [
            always if matcher is None else next(masks) if always is None else next(masks) & always
            for matcher, always in zip(matchers, fixed, strict=True)
        ]

    def _look_ahead(self, passes: Sequence[ScheduledPass]) -> None:
        """Let one replay compute several loop iterations where nothing could join in between, if pages are free.

        A loop that reports each iteration runs ahead from its second one on, unless another branch waits or cannot run
        ahead: a request that has just arrived joins the next step.
        """
        tokens = sum(one.count for one in passes)
        sizes = [size for size in AHEAD if size * tokens <= AHEAD_TOKENS]
        if not sizes or not self._device.limits.captures_passes:
            return
        most = [_most_ahead(one) for one in passes]
        is_crowded = bool(self._requests.active) or len(self._requests.pending) > len(passes) or min(most) == 1
        for one, limit in zip(passes, most, strict=True):
            if not (is_crowded and one.branch.emits):
                fits = (size for size in sizes if size <= limit)
                slot, count = one.branch.slot, one.count
                one.ahead = next((size for size in fits if self._pages.reserve_ahead(slot, count * size)), 1)

    # -- after a launch ----------------------------------------------------------------------------------------------

    def settle(self, step: KVStep, launch: Launch) -> list[Branch]:
        """Take the output of a launch. Returns the branches whose fused loops go on within the step."""
        assert launch.output is not None
        passes = zip(launch.passes, launch.output.passes, strict=True)
        return [one.branch for one, part in passes if part is not None and self._settle(step, one, part)]

    def _settle(self, step: KVStep, one: ScheduledPass, part: PassOutput) -> bool:
        """Move a branch on after a part of its pass. True when a fused loop goes on within this step."""
        branch, forward = one.branch, one.forward
        if not forward.is_replay and one.job is not None:
            try:
                self._check.require(branch.required, part.given, part.ports)
            except EngineError as error:
                self._requests.fail(branch, one.job, error, step.result)
                return False
        self._count(step, one, part.iterations)
        for port, value in part.ports.items():
            if port in branch.wants and not forward.is_replay:
                forward.chunk_outputs.setdefault(port, []).append(value)
        branch.waiting_since = self._requests.clock()
        if not one.is_last or branch.job is not one.job:
            return False
        if forward.is_replay:
            branch.replay.popleft()
            branch.is_evicted = branch.is_evicted and bool(branch.replay)
            return False
        if branch.is_decoding:
            self._take_known(step, branch, forward)
            return False
        self._finish_pass(branch)
        if branch.loop is None:
            branch.forward = None
            self._hold(step, branch)
            return False
        drawn = part.drawn.ids[part.index : part.index + 1] if part.drawn is not None else None
        goes_on = self._iterate(step, branch, part.iterations, drawn)
        if one.samples and branch.matcher is not None and branch.job is one.job:
            self._hold(step, branch)  # the mask of the next iteration depends on this id
            return False
        for ports in part.later:
            # Computed already: its pass is only counted.
            if branch.job is not one.job or branch.forward is None:
                break
            forward = branch.forward
            self._count(step, one, 1)
            forward.done, forward.chunk_outputs = forward.tokens, {port: [value] for port, value in ports.items()}
            self._memory.tables.length[branch.slot] += forward.tokens
            self._finish_pass(branch)
            goes_on = self._iterate(step, branch, 1, None)
        return goes_on

    def _take_known(self, step: KVStep, branch: Branch, forward: ForwardPass) -> None:
        """Move a resident loop past the known iterations of a pass."""
        try:
            self._known.take_pass(step.result, branch, forward)
        except Exception as error:  # noqa: BLE001 a module that omits a carried port fails its own request only
            assert branch.job is not None
            self._requests.fail(branch, branch.job, error, step.result)
        if not branch.is_decoding:
            self._hold(step, branch)

    def _count(self, step: KVStep, one: ScheduledPass, iterations: int) -> None:
        """Count a computed part of a pass; tokens of a repeated pass count once per iteration."""
        if one.job is not None:  # a replay is part of the interrupted job
            step.result.ran.append(one.job.key)
        step.result.tokens += one.count * iterations // one.forward.iterations

    def _finish_pass(self, branch: Branch) -> None:
        forward = branch.forward
        assert forward is not None
        self._loops.finish_pass(branch, forward)
        if forward.attend.write:
            self._pages.offer_prefix(branch)

    def _iterate(self, step: KVStep, branch: Branch, iterations: int, drawn: Tensor | None) -> bool:
        """Carry a general loop's values to its next iteration, or end it."""
        job, forward = branch.job, branch.forward
        assert job is not None and job.loop is not None and forward is not None
        branch.loop_state.iteration += iterations - 1
        try:
            drawn = self._known.next_id(branch) if drawn is None else drawn
            emission, ended = self._loops.advance(branch, job, forward, drawn)
        except Exception as error:  # noqa: BLE001 a module that omits a carried port fails its own request only
            self._requests.fail(branch, job, error, step.result)
            return False
        if emission is not None:
            step.result.emissions.append(emission)
        if ended is not None:
            step.result.done.append(ended)
            self._requests.remember(branch, ended.outputs)
            branch.job = branch.forward = branch.loop = None
            self._hold(step, branch)
            return False
        branch.is_reserved = False
        return job.loop.fused and not job.loop.emit and step.result.tokens < FUSED_TOKENS

    def _hold(self, step: KVStep, branch: Branch) -> None:
        """Let a branch wait until a step is collected."""
        branch.in_flight += 1
        step.held.append(branch)

    # -- once a step has come to the host ----------------------------------------------------------------------------

    def commit(self, result: StepResult, launch: Launch) -> None:
        """Take the ids that passes of a launch drew, and end the jobs whose last pass it computed."""
        assert launch.output is not None
        for one, output in zip(launch.passes, launch.output.passes, strict=True):
            if output is not None:
                self._commit(result, one, output)

    def _take_scores(self, result: StepResult, key: JobKey, branch: Branch, output: PassOutput) -> None:
        """Take the log-probabilities of the id of a pass if its request reports them."""
        count = branch.request.sampling.logprobs
        if count is not None and output.drawn is not None and output.drawn.scores is not None:
            result.scores[key] = output.drawn.scores.wait().numpy()[output.index, : 1 + 2 * count]

    def _commit(self, result: StepResult, one: ScheduledPass, output: PassOutput) -> None:
        branch, job = one.branch, one.job
        if job is None or self._requests.requests.get(job.handle) is not branch.request:
            return
        drawn = None
        if one.samples:
            assert output.drawn is not None
            drawn = int(output.drawn.host.wait()[output.index])
            if drawn < 0:
                self._requests.fail(branch, job, no_id(self._requests.node), result)
                return
            if branch.slot >= 0:  # a candidate may have been freed
                self._memory.slots.last[branch.slot] = drawn
            if job.loop is not None and self._port in job.loop.carry:
                result.draws.append((job.key, drawn))
            self._take_scores(result, job.key, branch, output)
            if branch.matcher is not None and not self._matches(result, branch, job, drawn):
                return
        if not one.is_last or one.forward.is_replay or job.loop is not None or branch.job is not job:
            return
        if job.known is not None and not one.samples:
            drawn = job.known
            if not self._matches(result, branch, job, drawn):
                return
            self._known.take(branch.slot, [drawn])
        outputs = one.forward.outputs
        if drawn is not None and self._port is not None:
            # On the host, where it is known: reading it from the GPU again would wait for later launches.
            outputs[self._port] = torch.tensor([drawn], dtype=torch.int64)
        result.done.append(Done(job=job, outputs=outputs, cached_tokens=branch.cached_tokens))
        self._requests.remember(branch, outputs)
        branch.job = None
        self._requests.requeue(branch)

    def _matches(self, result: StepResult, branch: Branch, job: Job, drawn: int) -> bool:
        """Let the matcher of a branch take an id, if it has one. Returns False if that fails the request."""
        try:
            if branch.matcher is not None:
                branch.matcher.take([drawn])
        except EngineError as error:
            self._requests.fail(branch, job, error, result)
            return False
        return True


def _keeps(one: ScheduledPass) -> bool:
    """Return whether the rows of attached ports are kept of a pass."""
    forward, in_loop = one.forward, one.job is not None and one.job.loop is not None
    return (
        forward.attend.write and not forward.is_ids and forward.iterations == 1 and (forward.is_replay or not in_loop)
    )


def _forced(one: ScheduledPass) -> int:
    """Return the known id that a pass takes instead of the drawn one, -1 without one."""
    job, loop = one.job, one.branch.loop
    if job is None or job.loop is None or loop is None:
        return -1 if job is None or job.known is None else job.known
    return loop.spec.known[loop.iteration] if loop.iteration < len(loop.spec.known) else -1


def _most_ahead(one: ScheduledPass) -> int:
    """Return the iterations, from this pass's on, that nothing can interrupt."""
    loop, state, forward = one.job.loop if one.job is not None else None, one.branch.loop, one.forward
    if loop is None or state is None or not loop.fused or not loop.carry or loop.stop_port is not None:
        return 1
    if (
        forward.is_replay
        or not forward.attend.write
        or one.branch.matcher is not None
        or (loop.emit and not state.iteration)
        or loop.known
    ):
        return 1
    return min([state.limit, *map(len, state.lists.values())]) - state.iteration


def _loop_plan(one: ScheduledPass) -> LoopPlan | None:
    loop, state = one.job.loop if one.job is not None else None, one.branch.loop
    if loop is None or state is None or one.branch.is_decoding:
        return None
    return LoopPlan(
        is_fused=loop.fused,
        emits=bool(loop.emit),
        ends_early=loop.stop_port is not None,
        carry=loop.carry,
        iteration=state.iteration,
        limit=state.limit,
        lists=state.lists,
        ahead=one.ahead,
    )
