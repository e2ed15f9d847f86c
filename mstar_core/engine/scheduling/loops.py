"""Jobs of a branch: starting passes and loops, carrying values between iterations, logging the cache.

A loop that feeds its sampled id back is resident: it runs in the decode batch. It may also carry state of fixed shape,
take items of a stream and inputs that stay, if these are the `LoopPorts` of its node. Every other loop is a sequence of
passes whose outputs become inputs of the next. Part of the scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.base import Done
from mstar_core.engine.jobs import required_ports, taken_ports
from mstar_core.engine.loop import no_start, starting_values
from mstar_core.engine.scheduling.sequence import Branch, CandidateJob, ForwardPass, Logged, LoopState, RollbackPoint
from mstar_core.engine.steps.updates import NO_ID
from mstar_core.errors import EngineError, TooLarge
from mstar_core.graph.declare.nodes import MAIN, STEP, Attend

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Emission, Job, LoopSpec
    from mstar_core.engine.cache.memory import KVMemory
    from mstar_core.engine.scheduling.inputs import InputProcessor
    from mstar_core.engine.steps.device import Device
    from mstar_core.graph.compile.resident import LoopPorts
    from mstar_core.graph.declare.nodes import NodeSpec


MOST_ITERATIONS: Final = 16
"""Most loop iterations in one pass: the items of a small batch."""


class _Numbers(dict[int, "Tensor"]):
    """Integers as 0-d host tensors, made once each."""

    def __missing__(self, number: int) -> Tensor:
        return self.setdefault(number, torch.tensor(number, dtype=torch.int64))


class Loops:
    """Starts and advances the jobs of one node. Its state is that of the branches and slots."""

    def __init__(self, spec: NodeSpec, memory: KVMemory, inputs: InputProcessor, device: Device, vocab: int) -> None:
        self._memory = memory
        self._slots = memory.slots
        self._tables = memory.tables
        self._device = device
        self._inputs = inputs
        self._spec = spec
        self._vocab = vocab
        self._port = spec.sampling.port if spec.sampling else None
        self._sees_input = spec.sampling is not None and spec.sampling.history == "all"
        # A node whose drawn ids are not tokens of its sequence may read ids of another vocabulary, as talkers do.
        self._reads_own_ids = not spec.sequence or self._port in spec.sequence
        self._steps = _Numbers()
        self._most_iterations = min(MOST_ITERATIONS, max(spec.hints.capture_sizes, default=MOST_ITERATIONS))

    def start(self, branch: Branch, job: Job) -> Done | None:
        """Prepare a job. Returns its end if nothing has to run. Raises MstarError when it cannot run."""
        branch.wants = frozenset(taken_ports(job)) - {self._port}
        branch.required = frozenset(required_ports(job))
        if job.sampling or branch.samples_apart:
            self._slots.sampling[branch.slot] = branch.request.sampling.changed(job.sampling)
            branch.samples_apart = bool(job.sampling)
        self._set_rollback(branch, job)
        if job.loop is None:
            step = job.inputs.get(STEP)
            branch.forward = self._next_pass(branch, job, job.inputs, 0 if step is None else int(step))
            return None
        if self._is_resident(branch, job, job.loop):
            return self._start_resident(branch, job, job.loop)
        if job.loop.feed is not None:
            raise self._not_fed(job.loop)
        return self._start_general(branch, job, job.loop)

    def advance(
        self, branch: Branch, job: Job, forward: ForwardPass, drawn: Tensor | None
    ) -> tuple[Emission | None, Done | None]:
        """Finish one iteration of a general loop. Returns what it emits, and its end unless it has a next pass."""
        loop, outputs = branch.loop_state, forward.outputs
        if drawn is not None and self._port is not None:
            outputs[self._port] = drawn
        emission, ended = loop.advance(outputs, self._spec.name)
        if ended is not None:
            self._keep(branch, loop.values)
            if job.attend.keep == "loop":
                self.roll_back(branch)
            return emission, ended
        if not job.attend.write:
            job.inputs = self._inputs.kept(job.inputs)
        branch.forward = self._iteration(branch, job, loop)
        return emission, None

    def last_outputs(self, branch: Branch, job: Job, value: int) -> dict[str, Tensor]:
        """Return the outputs of a resident loop that ended: its last id, int64 [1] on the host, and wanted state."""
        assert self._port is not None
        outputs = {self._port: torch.tensor([value], dtype=torch.int64)}
        loop = self._memory.loop
        states = {out for _, out in loop.ports.states} if loop is not None else set[str]()
        for port in states.intersection(job.outputs):
            self._device.apply(self._memory.take_updates())
            state = self._device.loop_value(branch.slot, port)
            if state is not None:
                outputs[port] = state
        return outputs

    def finish_pass(self, branch: Branch, forward: ForwardPass) -> None:
        """Move a branch past a computed pass, and log how the cache was made. A pass that only reads moves nothing."""
        attend = forward.attend
        if not attend.write:
            return
        self._slots.next_position[branch.slot] = forward.next_position
        is_plain = forward.is_ids and attend.mask == "causal" and attend.positions == "running"
        kept = None if is_plain else self._inputs.owned(forward)
        branch.record(Logged(tokens=forward.tokens, position=forward.position, forward=kept))

    def sync_log(self, branch: Branch) -> None:
        """Log the ids that a resident loop has appended since the last call."""
        if not branch.is_decoding or branch.replay or branch.forward is not None or branch.is_evicted:
            return
        extra = int(self._tables.length[branch.slot]) - branch.logged
        if extra > 0:
            branch.record(Logged(tokens=extra, position=self._slots.position(branch.slot) - extra))

    def rebuild(self, branch: Branch) -> None:
        """Queue the passes that recompute a preempted branch."""
        base = branch.shared
        for entry in branch.log:
            branch.replay.append(self._inputs.replayed(entry, base, self._slots.history[branch.slot]))
            base += entry.tokens

    def roll_back(self, branch: Branch) -> None:
        """Return a branch to its rollback point, if it has one."""
        point = branch.rollback
        if point is None:
            return
        if not branch.is_evicted:
            self._tables.truncate(branch.slot, int(self._tables.length[branch.slot]) - point.logged)
        branch.log, branch.logged, branch.rollback = list(point.log), point.logged, None
        branch.is_evicted = branch.is_evicted and point.logged > 0
        self._slots.next_position[branch.slot] = point.position

    def _set_rollback(self, branch: Branch, job: Job) -> None:
        """Note where the tokens of a loop begin that live as long as it, and drop those of a loop that is over.

        A loop that this engine iterates drops its tokens when it ends. The end of a loop of single jobs shows in the
        next job: one that keeps its tokens, or the first iteration of another loop.
        """
        if branch.parent is not None and branch.parent.candidates is not None and branch.parent.candidates.is_for_loop:
            return  # the whole candidate goes with its loop
        step = job.inputs.get(STEP)
        if branch.rollback is not None and (job.attend.keep == "request" or (step is not None and int(step) == 0)):
            self.roll_back(branch)
        if branch.rollback is None and job.attend.keep == "loop" and job.attend.write:
            position = self._slots.position(branch.slot)
            branch.rollback = RollbackPoint(log=tuple(branch.log), logged=branch.logged, position=position)

    def _keep(self, branch: Branch, values: dict[str, Tensor]) -> None:
        if branch.parent is None:
            branch.request.last_values.update(values)
        elif isinstance(branch.job, CandidateJob):
            branch.job.group.last_values[branch.job.index].update(values)

    # -- passes ------------------------------------------------------------------------------------------------------

    def _next_pass(
        self, branch: Branch, job: Job, inputs: dict[str, Tensor], step: int = 0, iterations: int = 1
    ) -> ForwardPass:
        slot, logged, limit = branch.slot, branch.logged, self._tables.max_tokens
        position = self._slots.position(slot)
        forward = self._inputs.forward_pass(inputs, job.attend, position, logged, step=step, iterations=iterations)
        if forward.attend.write and forward.base + forward.tokens > limit:
            raise TooLarge(
                f"the sequence outgrows node {self._spec.name}",
                f"{forward.base} tokens are cached and {forward.tokens} more exceed {limit}",
                "shorten the input or raise max_seq_len",
                value=forward.base + forward.tokens,
                allowed=limit,
            )
        ids = self._take_ids(slot, forward) if forward.is_ids else None
        if forward.attend.write:
            self._slots.history[slot, forward.base : forward.base + forward.tokens] = NO_ID if ids is None else ids
            if job.attend.keep != "loop":  # tokens that will be dropped are not part of the page keys
                self._extend_chain(branch, job, ids, forward.tokens)
        return forward

    def _iteration(self, branch: Branch, job: Job, loop: LoopState) -> ForwardPass:
        inputs = {**job.inputs, **loop.lists, **loop.carried}
        inputs.pop(STEP, None)
        is_only_ids = all(map(self._inputs.is_id_port, inputs))  # as in the decode batch, which counts no steps
        if STEP in job.inputs or (self._inputs.takes_step and not is_only_ids):
            inputs[STEP] = self._steps[loop.iteration]
        many = min(loop.ahead, loop.limit - loop.iteration)
        return self._next_pass(branch, job, inputs, loop.iteration, many)

    def _extend_chain(self, branch: Branch, job: Job, ids: np.ndarray | None, tokens: int) -> None:
        """Extend the page keys of a branch. ids: int32 [tokens], None where the tokens are not ids."""
        seed = job.content if ids is None else job.tokens_hash_seed
        if seed is None or not branch.chain.is_open or branch.chain.tokens != branch.logged:
            branch.chain.is_open = False
            return
        if ids is None:
            branch.chain.extend(np.full(tokens, NO_ID, dtype=np.int32), _kind(job) + seed, continues=False)
        else:
            branch.chain.extend(ids, _kind(job) + seed)

    def extend_by_loop(self, branch: Branch, tokens: int) -> None:
        """Extend the page keys of a branch by ids of its resident loop, up to the first `tokens` of its cache.

        Called once, when the loop ends, so that a step makes no page keys. The last id that was drawn is not in the
        cache. A loop with values beside its ids has closed the chain.
        """
        chain, job = branch.chain, branch.job
        if job is not None and job.tokens_hash_seed is not None and chain.is_open:
            ids = self._slots.history[branch.slot, chain.tokens : tokens]
            chain.extend(ids, _kind(job) + job.tokens_hash_seed)

    def _take_ids(self, slot: int, forward: ForwardPass) -> np.ndarray:
        """Return the ids of a pass for the history, int32. An id outside the vocabulary would crash a kernel."""
        # A copy only if another node left the ids on a device: ids of prompts stay on the host.
        host = forward.ports[self._inputs.id_port] = forward.ports[self._inputs.id_port].cpu()
        ids = host.numpy()
        if self._vocab and self._reads_own_ids and (ids.min() < 0 or ids.max() >= self._vocab):
            raise self._unknown_id(int(ids[(ids < 0) | (ids >= self._vocab)][0]))
        self._see(slot, ids)
        converted: np.ndarray = ids.astype(np.int32)
        return converted

    def _see(self, slot: int, ids: np.ndarray) -> None:
        if self._sees_input and self._slots.sampling[slot].repetition_penalty != 1:
            self._slots.see(slot, ids)

    def _unknown_id(self, value: int) -> EngineError:
        return EngineError(
            f"an input id is outside the vocabulary of node {self._spec.name}",
            f"id {value}, vocabulary {self._vocab}",
            node=self._spec.name,
        )

    # -- loops -------------------------------------------------------------------------------------------------------

    def _is_resident(self, branch: Branch, job: Job, loop: LoopSpec) -> bool:
        if self._memory.loop is not None:
            return self._fits_ports(branch, job, loop, self._memory.loop.ports)
        if branch.parent is not None or self._port is None or set(loop.carry) != {self._port}:
            return False
        if loop.stop_port not in (None, self._port) or job.attend.keep == "loop":
            return False
        into = loop.carry[self._port]
        plain = job.attend.mask == "causal" and job.attend.positions == "running" and job.attend.write
        return plain and self._inputs.is_id_port(into) and set(job.inputs) <= {into} and loop.feed is None

    def _fits_ports(self, branch: Branch, job: Job, loop: LoopSpec, ports: LoopPorts) -> bool:
        """Return whether a loop is the node's resident one, whose decode batch has one form."""
        if branch.parent is not None or job.attend not in (Attend(), Attend(tokens=1)) or self._port is None:
            return False
        if loop.feed != ports.feed or loop.stop_port not in (None, self._port):
            return False
        carry = {out: into for into, out in ports.states} | {self._port: ports.id_port}
        may_have = {*carry.values(), *ports.constants}
        return loop.carry == carry and set(ports.constants) <= job.inputs.keys() <= may_have

    def _not_fed(self, loop: LoopSpec) -> EngineError:
        return EngineError(
            f"a loop of node {self._spec.name} cannot take its stream",
            f"input {loop.feed!r}: its other inputs differ from those of the node's resident loop",
            "give every input of the loop a value, and run it for one candidate",
            node=self._spec.name,
        )

    def _start_resident(self, branch: Branch, job: Job, loop: LoopSpec) -> Done | None:
        assert self._port is not None
        slots, slot = self._slots, branch.slot
        start = job.inputs.get(loop.carry[self._port])
        if start is not None:
            if start.numel() != 1:
                raise EngineError(
                    f"a loop of node {self._spec.name} starts from one id",
                    f"{start.numel()} were given",
                    node=self._spec.name,
                )
            value = int(start.reshape(()).item())
            if not 0 <= value < self._vocab:
                raise self._unknown_id(value)
        else:
            value = int(slots.last[slot])
            if value == NO_ID and branch.name != MAIN and MAIN in branch.request.branches:
                value = int(slots.last[branch.request.branches[MAIN].slot])
        if value == NO_ID:
            raise no_start(self._spec.name, self._port)
        limit = min(loop.max_iters, self._tables.max_tokens - branch.logged)
        if value in loop.stop_ids or limit <= 0:
            reason = "stop" if value in loop.stop_ids else "length"
            if self._memory.feeds is not None:
                self._memory.feeds.end(int(job.key))
            return Done(job=job, outputs={self._port: torch.tensor([value], dtype=torch.int64)}, reason=reason)
        if self._memory.loop is not None:
            self._begin_values(branch, job, self._memory.loop.ports)
        slots.set_last(slot, value)
        slots.history[slot, branch.logged] = value
        if start is not None:
            self._see(slot, np.array([value], dtype=np.int64))
        slots.begin_loop(slot, int(job.key), limit, loop.stop_ids)
        if self._memory.loop is not None or job.tokens_hash_seed is None or branch.chain.tokens != branch.logged:
            branch.chain.is_open = False  # ids alone do not determine the cache
        branch.loop = LoopState(job=job, spec=loop, limit=limit, base=branch.logged)
        branch.is_decoding = True
        return None

    def _begin_values(self, branch: Branch, job: Job, ports: LoopPorts) -> None:
        """Set the slot's values to those that the loop starts from. Raises EngineError if one is missing."""
        values = dict(job.inputs)
        for into, out in ports.states:
            if into not in values:
                last = branch.request.last_values.get(out)
                if last is None:
                    raise no_start(self._spec.name, out)
                values[into] = last
        self._memory.begin_loop_values(branch.slot, values)
        if self._memory.feeds is not None:
            self._memory.feeds.begin(int(job.key), branch.slot)
        branch.saves_pages = True

    def _start_general(self, branch: Branch, job: Job, loop: LoopSpec) -> Done | None:
        # A pass that writes finds carried values on the device; one that only reads uploads the first alone.
        place = self._inputs.on_device if job.attend.write else self._inputs.at_hand
        carried = starting_values(loop, job.inputs, branch.request.last_values, place, self._spec.name)
        most = self._most_per_pass(branch, job, loop)
        state = LoopState(job=job, spec=loop, limit=loop.max_iters, carried=carried, ahead=most)
        ended = state.end_at_start()
        if ended is None:
            state.lists = self._inputs.lists(job.inputs)
            branch.loop, branch.forward = state, self._iteration(branch, job, state)
        return ended

    def _most_per_pass(self, branch: Branch, job: Job, loop: LoopSpec) -> int:
        """Return the iterations that one pass may hold: several if they are independent and nothing is reported."""
        is_free = loop.fused and not loop.carry and loop.stop_port is None and not branch.wants
        return self._most_iterations if is_free and self._inputs.holds_iterations(job.inputs, job.attend) else 1


def _kind(job: Job) -> bytes:
    """Return what determines the cache of a job's tokens beside their content."""
    return f"{job.attend.mask},{job.attend.positions};".encode()
