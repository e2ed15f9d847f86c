"""Scheduler of a KV node: the one owner of its host state.

It owns requests, branches, candidates, pages, slots, the prefix cache, and why each waits. `plan` decides the next step
and advances its own counts past it; the runner executes the plan, knows no request, and changes no host state.
`settle` carries loops on when a plan is launched, and `commit` takes the ids of a step that has come to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.base import NO_ADAPTER, Contention, Failed, Pressure, StepResult
from mstar_core.engine.cache.prefix_cache import ContentChain
from mstar_core.engine.port_check import HEAD_OUTPUTS, PortCheck
from mstar_core.engine.scheduling.admission import Admission, reads_media
from mstar_core.engine.scheduling.candidates import Candidates
from mstar_core.engine.scheduling.decode_batch import DecodeScheduler
from mstar_core.engine.scheduling.device_share import IMAGE, TEXT, DeviceShare, TimedStep
from mstar_core.engine.scheduling.inputs import InputProcessor
from mstar_core.engine.scheduling.known_ids import KnownIds
from mstar_core.engine.scheduling.loops import Loops
from mstar_core.engine.scheduling.moves import Moves
from mstar_core.engine.scheduling.pages import Pages
from mstar_core.engine.scheduling.requests import Requests
from mstar_core.engine.scheduling.scheduled_passes import PassScheduler
from mstar_core.engine.scheduling.sequence import Branch, KVRequest
from mstar_core.engine.scheduling.step import KVStep, Launch
from mstar_core.engine.slack import Slack, StepCost
from mstar_core.engine.steps.plan import StepPlan
from mstar_core.errors import EngineError, TooLarge
from mstar_core.graph.declare.sampling import check_biased

if TYPE_CHECKING:
    from mstar_core.constraints.matcher import Grammar, Grammars
    from mstar_core.engine.base import Handle, Job, JobKey
    from mstar_core.engine.cache.memory import KVMemory
    from mstar_core.engine.scheduling.step import Decoding, ScheduledPass
    from mstar_core.engine.steps.device import Device, StepOutput
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.graph.declare.sampling import SamplingParams

MEASURED_EVERY: Final = 16
"""Of so many steps without passes, the time of one is measured."""

AT_ONCE_S: Final = (0.0025, 0.006)
"""Most device time of decode steps in one launch, and the same if nothing takes their ids as they come.

Requests that arrive wait for it, and clients and streams get ids that late.
"""

_NONE: Final = np.zeros(0, dtype=np.int64)


class Scheduler:
    """Decides the steps of one node. Used from the worker's thread, through the node's engine."""

    def __init__(
        self,
        spec: NodeSpec,
        memory: KVMemory,
        inputs: InputProcessor,
        device: Device,
        share: DeviceShare,
        *,
        vocab: int,
        token_budget: int,
        lookahead: int,
        steps_at_once: int = 1,
        clock: Callable[[], float],
        known_ports: Sequence[str] = (),
        head_ports: Sequence[str] = (),
        grammars: Grammars | None = None,
    ) -> None:
        """vocab: ids that the node reads, 0 for any. token_budget: of a step.

        lookahead: steps that may be planned before an earlier one is committed. steps_at_once: most captured decode
        steps of one launch, while these are short. known_ports, head_ports: see
        NodeModule. grammars: see KVSettings.
        """
        assert spec.kv is not None
        self._branch_names = spec.kv.branches
        self._memory_name = spec.kv.memory
        self._lookahead = lookahead
        self._steps_at_once = steps_at_once
        self._device = device
        self._opened = 0
        self._committed = 0.0
        self._share = share
        self._cost = StepCost()
        self._slack = Slack()
        self._planned = 0
        self._after_media = self._has_decoded = False
        self._memory = memory
        self._grammars = grammars
        self._requests = requests = Requests(spec.name, memory, clock)
        loops = self._loops = Loops(spec, memory, inputs, device, vocab)
        candidates = self._candidates = Candidates(spec, requests, inputs.on_device)
        pages = self._pages = Pages(spec, requests, loops, candidates, device)
        moves = Moves(requests, device)
        check = PortCheck(spec, (*HEAD_OUTPUTS, *head_ports))
        self._decode = DecodeScheduler(spec, requests, loops, pages, check, grammars)
        known = KnownIds(spec, requests, inputs, self._decode, known_ports)
        self._admission = Admission(spec, requests, loops, candidates, pages, moves, known, device, token_budget, share)
        self._passes = PassScheduler(spec, requests, loops, pages, known, device, check, grammars)

    # -- requests and jobs -------------------------------------------------------------------------------------------

    def open(
        self,
        handle: Handle,
        sampling: SamplingParams,
        max_tokens: int,
        candidates: int = 1,
        adapter: int = NO_ADAPTER,
    ) -> None:
        """See NodeRunner. Raises TooLarge when the request could never fit, EngineError for a handle in use.

        A grammar is compiled meanwhile on a thread; the request's jobs wait for it.
        """
        requests, pool, tables = self._requests, self._memory.pool, self._memory.tables
        if handle in requests.requests:
            raise EngineError(f"handle {handle} is already open at node {requests.node}", node=requests.node)
        if sampling.logit_bias:
            check_biased(sampling.logit_bias, self._memory.slots.vocab)
        self._candidates.check_count(candidates)
        limit = tables.max_tokens * len(self._branch_names) * candidates
        pages = pool.pages_for(-(-max_tokens // candidates)) * candidates
        if max_tokens > limit or pages > pool.total:
            raise TooLarge(
                f"the request can never fit the cache of node {requests.node}"
                + (f": {candidates} candidates need {pages} pages of {pool.total}" if candidates > 1 else ""),
                f"it may hold {max_tokens} tokens ({pages} pages); the pool has {pool.total} pages of "
                f"{pool.page_size}, a sequence at most {tables.max_tokens} tokens",
                ("shorten the input" if candidates == 1 else "ask for less") + ", or give the deployment more cache",
                value=max_tokens,
                allowed=min(limit, pool.total * pool.page_size),
            )
        self._opened += 1
        grammar = None if sampling.constraint is None else self._grammar(sampling.constraint)
        request = KVRequest(handle, self._opened, sampling, adapter=adapter, grammar=grammar, memory=self._memory_name)
        requests.requests[handle] = request
        for name in self._branch_names:
            # A memory has no job of its own when it is needed again, so it is saved and not computed again.
            saves = name == self._memory_name
            request.branches[name] = Branch(request, name, ContentChain(pool.page_size), saves_pages=saves)

    def _grammar(self, constraint: str) -> Grammar:
        """Begin to compile a grammar. Raises EngineError at a node without a vocabulary of text."""
        if self._grammars is None:
            node = self._requests.node
            raise EngineError(
                f"node {node} cannot hold its ids to a grammar",
                "its model gives no vocabulary of text (ConstrainableProcessor)",
                node=node,
            )
        return self._grammars.compile(constraint)

    @property
    def has_requests(self) -> bool:
        """Whether a request is open."""
        return bool(self._requests.requests)

    @property
    def is_compiling(self) -> bool:
        """Whether a request waits for its grammar."""
        return self._grammars is not None and any(each.is_compiling for each in self._requests.requests.values())

    def submit(self, job: Job) -> None:
        """See NodeRunner. A job of a failed request is dropped: its first failure has already ended it."""
        requests, feeds = self._requests, self._memory.feeds
        request = requests.requests.get(job.handle)
        if request is None or request.is_failed:
            return
        branch = request.branches.get(job.branch)
        if branch is None:
            names = ", ".join(request.branches)
            error = EngineError(
                f"node {requests.node} has no branch {job.branch!r}", f"it has {names}", node=requests.node
            )
            requests.ready.failed.append(Failed(job=job, error=error))
            return
        if not branch.has_work:
            branch.waiting_since = requests.clock()
        if job.loop is not None and job.loop.feed is not None and feeds is not None:
            feeds.open(int(job.key), int(job.handle), empty_after_end=job.loop.after_end == "empty")
        branch.queue.append(job)
        requests.pending[branch.key] = branch
        requests.has_changed = True  # it may be older than those that wait

    def feed(self, key: JobKey, ids: Sequence[int], ended: bool) -> None:
        """See NodeRunner."""
        requests, feeds, number = self._requests, self._memory.feeds, int(key)
        if feeds is None:
            return
        feeds.add(number, ids, ended=ended)
        branch = requests.starving.get(number)
        if branch is None:
            return
        if not feeds.is_dry(branch.slot):
            requests.wake(branch)
        elif ended:
            self._decode.end_with_streams(requests.ready)

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """See NodeRunner. Does nothing at a node without these branches. Raises EngineError for a busy one."""
        request = self._requests.requests.get(handle)
        if request is None or into not in request.branches or (source and source not in request.branches):
            return
        if not source:
            self._reset(request.branches[into])
            return
        old, new = request.branches[source], request.branches[into]
        if new.job is not None or old.is_decoding:
            node = self._requests.node
            raise EngineError(f"branch {into!r} cannot be forked from {source!r} while they run", node=node)
        if request.slots and source != into:
            self._candidates.free(new)
            self._pages.fork(old, new)
            self._requests.has_changed = True

    def _reset(self, branch: Branch) -> None:
        """Empty a branch. Raises EngineError for a busy one."""
        if branch.job is not None or branch.in_flight:
            node = self._requests.node
            raise EngineError(f"branch {branch.name!r} cannot be reset while it runs", node=node)
        self._candidates.free(branch)
        self._pages.reset(branch)
        self._requests.has_changed = True

    def holds(self, handle: Handle, branch: str) -> bool:
        """See NodeRunner."""
        request = self._requests.requests.get(handle)
        cache = None if request is None else request.branches.get(branch)
        return cache is not None and (cache.has_work or cache.logged > 0)

    def end_loops(self, handle: Handle) -> None:
        """See NodeRunner."""
        request = self._requests.requests.get(handle)
        if request is None or request.is_failed:
            return
        for branch in request.branches.values():
            group = branch.candidates
            if group is not None and group.is_for_loop and group.job is None:
                self._candidates.free(branch)
        for branch in request.sequences():
            if not branch.has_work:
                self._loops.roll_back(branch)
        self._requests.has_changed = True

    def close(self, handle: Handle) -> None:
        """See NodeRunner."""
        request = self._requests.requests.pop(handle, None)
        if request is None:
            return
        for branch in request.branches.values():
            self._pages.offer_answer(branch)
        self._pages.lease(request)
        self._requests.stop(request)
        self._memory.slots.give_back(request.slots)
        if self._memory.feeds is not None:
            self._memory.feeds.forget(int(handle))

    def lease(self, handle: Handle, session: str, seconds: float) -> None:
        """See NodeRunner."""
        request = self._requests.requests.get(handle)
        if request is not None:
            request.session, request.lease_s = session, seconds

    def end_lease(self, session: str) -> None:
        """See NodeRunner."""
        for request in self._requests.requests.values():
            if request.session == session:
                request.session = ""
        if self._memory.prefixes is not None:
            self._memory.prefixes.leases.release(session)

    def yield_to(self, slack: Slack) -> None:
        """See NodeRunner."""
        self._slack = slack
        slack.costs.append(self._cost)
        self._admission.yield_to(slack, self._cost)

    # -- what the worker asks ----------------------------------------------------------------------------------------

    def pressure(self) -> Pressure:
        """See NodeRunner."""
        requests = self._requests
        if len(requests.in_flight) > self._lookahead:
            return Pressure(waiting=len(requests.pending))
        waiting = ready = 0
        oldest = requests.decode_since if requests.active else float("inf")
        for branch in requests.pending.values():
            if requests.is_waiting(branch):
                waiting += 1
            else:
                ready += 1
                oldest = min(oldest, branch.waiting_since)
        ready += len(requests.active) - len(requests.undecided)
        ready += len(requests.ready.done) + len(requests.ready.failed)
        return Pressure(ready=ready, waiting=waiting, oldest_s=oldest)

    def contention(self) -> Contention:
        """See NodeRunner."""
        return self._requests.contention()

    def pages_and_waits(self) -> dict[Handle, tuple[int, str]]:
        """See NodeRunner."""
        return self._requests.pages_and_waits()

    @property
    def in_flight(self) -> int:
        """Steps that are planned and not committed."""
        return len(self._requests.in_flight)

    def handles(self, slots: Sequence[int]) -> list[Handle]:
        """Return the requests that hold these slots."""
        owners = {slot: handle for handle, request in self._requests.requests.items() for slot in request.slots}
        return [owners[slot] for slot in slots if slot in owners]

    # -- steps -------------------------------------------------------------------------------------------------------

    def plan(self) -> KVStep | None:
        """Return the next step, whose plan may be None if it only has results. None when nothing can run."""
        requests = self._requests
        if len(requests.in_flight) > self._lookahead:
            return None
        started = requests.clock()
        if requests.active:
            self._decode.reserve()
        self._share.turn = TEXT
        chosen = self._admission.choose(after_media=self._after_media) if requests.pending else []
        passes = [self._passes.scheduled(branch, count) for branch, count in chosen]
        if requests.starving:
            self._decode.end_with_streams(requests.ready)
        decoding = requests.current_decode() if self._share.turn == TEXT and self._may_decode(chosen) else None
        result = requests.ready
        if decoding is None and not passes and not (result.done or result.failed or result.emissions or result.loop):
            return None
        requests.ready = StepResult()
        step = KVStep(result, started)
        if decoding is not None or passes:
            step.timed = self._timed(decoding, passes)
            steps = self._steps(decoding, step) if decoding is not None else 0
            step.launches.append(self._launch(decoding, passes, steps))
            self._planned += 1
            if passes or self._planned % MEASURED_EVERY == 0:
                yielding = sum([one.count for one in passes if one.job is not None and one.job.yields])
                step.work = self._cost.begin(self._share.mark(), sum([one.count for one in passes]), yielding, steps)
        requests.in_flight.append(step)
        return step

    def _may_decode(self, chosen: Sequence[tuple[Branch, int]]) -> bool:
        """Return whether the decode batch is part of a step: not beside media, and once until the next such step."""
        waits = any(map(reads_media, self._requests.pending.values()))
        self._after_media = waits and any([reads_media(branch) for branch, _ in chosen])
        may = not self._after_media and not (waits and chosen and self._has_decoded)
        self._has_decoded = not self._after_media and (self._has_decoded or bool(self._requests.active))
        return may

    def settle(self, step: KVStep, output: StepOutput) -> StepPlan | None:
        """Take what the newest plan of a step gave. Returns its next plan, while its fused loops go on."""
        launch, result = step.launches[-1], step.result
        launch.output = output
        for slot, error in output.failed.items():
            branch = launch.branch_of(slot)
            if branch.job is not None:
                self._requests.fail(branch, branch.job, error, result)
        tokens = sum([part.drawn.ids.numel() for part in output.decode])
        if tokens:
            self._requests.decode_since = self._requests.clock()
        result.tokens += tokens
        if launch is step.launches[0]:  # the iterations of a fused loop have the same batch items
            count = sum([part.count for part in output.decode if not part.first])
            result.rows = count + len(output.passes) - output.passes.count(None)
        passes = self._next_iterations(self._passes.settle(step, launch)) if launch.passes else []
        if passes:
            step.launches.append(self._launch(None, passes))
            return step.plan
        if step.timed is not None:
            self._share.launched(step.timed)
        if step.work is not None:
            step.work.end = self._share.mark()
        return None

    def _next_iterations(self, going: list[Branch]) -> list[ScheduledPass]:
        """Return the next passes of fused loops that go on within their step."""
        # All branches are settled before pages are reserved: a preemption must not meet a half-settled one.
        reserved = [branch for branch in going if branch.forward is not None and self._pages.reserve(branch)]
        return [
            self._passes.scheduled(branch, branch.forward.tokens)
            for branch in reserved
            if branch.forward is not None and branch.is_reserved
        ]

    def commit(self, step: KVStep) -> StepResult:
        """Return the results of the oldest step in flight, once its ids and copies have come to the host."""
        requests = self._requests
        assert requests.in_flight and requests.in_flight[0] is step, "steps are committed in order"
        requests.in_flight.pop(0)
        timed = step.timed
        if timed is not None:
            self._share.collected(timed)
        decides = bool(step.undecided)
        result = self._results(step)
        result.decides = decides
        now = requests.clock()
        result.duration_s = now - max(step.started, self._committed)
        self._committed = now
        self._cost.settle()
        if timed is not None and timed.is_over:
            result.duration_s = timed.seconds or 0.0
        return result

    def _steps(self, decoding: Decoding, step: KVStep) -> int:
        """Return how many tokens of each sequence the next launch computes: several while captured steps are short.

        The time of the host between two launches then counts once for all of them. Beside images steps are timed one by
        one, and first sounds count the iterations that are launched by steps, so both have single ones.
        """
        if self._steps_at_once < 2 or step.timed is not None or self._slack.is_first_due():
            return 1
        step_s = self._device.decode_step_s(decoding.batch)
        if not step_s:
            return 1
        most_s = AT_ONCE_S[0 if decoding.is_read else 1]
        return self._decode.steps_at_once(decoding, min(self._steps_at_once, int(most_s / step_s)))

    def _launch(self, decoding: Decoding | None, passes: list[ScheduledPass], steps: int = 1) -> Launch:
        """Return the plan of these sequences. The host's counts then are those after the step."""
        plans = self._passes.plan(passes) if passes else ()
        decode, place, left = self._decode.plan(decoding, steps) if decoding is not None else (None, _NONE, _NONE)
        updates = self._memory.take_updates()
        plan = StepPlan(tables=self._memory.tables.ids, updates=updates, decode=decode, passes=plans)
        return Launch(plan, decoding, place, left, passes)

    def _results(self, step: KVStep) -> StepResult:
        """Return the results of a step, whose ids and copies have come to the host."""
        result, requests = step.result, self._requests
        for launch in step.launches:
            if launch.decoding is not None:
                self._decode.commit(step, launch)
            if launch.passes:
                self._passes.commit(result, launch)
        if requests.starving:
            self._decode.end_with_streams(result)
        for branch in step.held:
            branch.in_flight -= 1
            if not branch.has_work:  # a general loop has ended, and no job follows yet
                requests.remove(branch)
        requests.has_changed = True
        if result.done or result.failed or result.emissions:
            with torch.inference_mode():
                self._candidates.merge(result)
            result.drop_closed(requests.requests)
        return result

    def _timed(self, decoding: Decoding | None, passes: list[ScheduledPass]) -> TimedStep | None:
        """Start timing a step on the device if images are made at this node."""
        share = self._share
        if share.turn != IMAGE and not share.is_engaged:
            return None
        kind = share.turn or TEXT
        size = (len(decoding.keys) if decoding else 0, *((one.branch.name, one.count) for one in passes))
        return share.begin(kind, size, is_prefill=kind == TEXT and bool(passes))
