"""Candidates of a request: caches forked from one of its branches, each with its share of a job.

A job of several candidates becomes one job for each, which is scheduled like any other; their results are put together
here. Part of the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mstar_core.engine.base import Done, StepResult
from mstar_core.engine.cache.prefix_cache import ContentChain
from mstar_core.engine.jobs import CandidateInputs
from mstar_core.engine.scheduling.sequence import Branch, CandidateGroup, CandidateJob, KVRequest, stack_ports
from mstar_core.errors import EngineError, TooLarge
from mstar_core.graph.declare.nodes import STEP

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job
    from mstar_core.engine.scheduling.requests import Requests
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.graph.declare.sampling import SamplingParams

SEED_STEP: Final = 0x9E3779B97F4A7C15
"""Distance between the seeds of adjacent candidates: odd, so 2**64 of them are distinct."""


class Candidates:
    """Forks candidates, assigns their slots and pages, merges their results. It keeps no state.

    Candidates use only the slots that the node has beyond those of whole requests: `KVSpec.rows` for each branch.
    """

    def __init__(self, spec: NodeSpec, requests: Requests, place: Callable[[str, Tensor], Tensor]) -> None:
        """place: puts a port's value on the node's device."""
        assert spec.kv is not None
        self._spec = spec
        self._place = place
        self._kv = spec.kv
        self._requests = requests
        self._memory = requests.memory
        self._inputs = CandidateInputs(spec)

    def check_count(self, count: int) -> None:
        """Raise TooLarge when so many candidates can never exist at once, EngineError when the node has none."""
        if count > 1 and not self._kv.rows:
            raise EngineError(
                f"node {self._spec.name} runs no candidates",
                f"{count} candidates in a job, 1 is supported",
                "a model that runs candidates declares how many: KVSpec(rows=...)",
                node=self._spec.name,
            )
        if count > max(1, self._kv.rows):
            raise TooLarge(
                f"node {self._spec.name} holds {self._kv.rows} candidates at once, {count} were requested",
                "each keeps a cache of its own between the steps of its walk",
                "ask for fewer candidates",
                node=self._spec.name,
                value=count,
                allowed=self._kv.rows,
            )

    # -- start of a job ----------------------------------------------------------------------------------------------

    def claim_slots(self, parent: Branch, job: Job) -> bool:
        """Take slots for all candidates of a job that must exist at once, for all branches. False if they are not free.

        Raises TooLarge when there can never be so many.
        """
        self.check_count(min(job.rows, self._kv.rows or job.rows))
        if parent.candidates is not None and self._continues(parent.candidates, job) or takes_turns(job):
            return True
        self.check_count(job.rows)
        request = parent.request
        missing = job.rows * len(self._kv.branches) - request.claimed
        taken = [] if missing <= 0 else None if self._requests.is_blocked else self._take(request, missing)
        if taken is None:
            self._give_back(parent)
            return False
        request.slots += taken
        request.spare += taken
        request.claimed += len(taken)
        return True

    def start(self, parent: Branch, job: Job) -> list[Branch]:
        """Hand a job to the candidates of its branch, which are forked unless the present ones continue.

        Returns the candidates. Raises EngineError for an input that is neither one value nor one for each.
        """
        if parent.candidates is None or not self._continues(parent.candidates, job):
            self.free(parent)
            parent.candidates = self._fork(parent, job)
        group, inputs = parent.candidates, dict(job.inputs)
        if job.loop is not None:
            last = parent.request.last_values
            inputs |= {i: last[port] for port, i in job.loop.carry.items() if i not in inputs and port in last}
        # Once for all candidates, which get views.
        inputs |= {name: self._place(name, inputs[name]) for name in self._spec.row_ports if name in inputs}
        shares = self._inputs.split(inputs, job.rows)
        group.begin(job)
        for index, (branch, share) in enumerate(zip(group.branches, shares, strict=True)):
            part = CandidateJob(
                key=job.key,
                handle=job.handle,
                inputs=share,
                outputs=job.outputs,
                edges=job.edges,
                attend=job.attend,
                branch=job.branch,
                sample=job.sample,
                loop=job.loop,
                urgency=job.urgency,
                whole=job,
                group=group,
                index=index,
            )
            branch.queue.append(part)
            self._requests.add(branch)
        return list(group.branches)

    def _continues(self, group: CandidateGroup, job: Job) -> bool:
        """Return whether a job runs on the candidates that exist."""
        if len(group.branches) != job.rows:
            return False
        if not group.is_for_loop:
            return True
        step = job.inputs.get(STEP)
        return job.attend.keep == "loop" and job.loop is None and step is not None and int(step) > 0

    def _fork(self, parent: Branch, job: Job) -> CandidateGroup:
        group = CandidateGroup(parent=parent, takes_turns=takes_turns(job), is_for_loop=job.attend.keep == "loop")
        for index in range(job.rows):
            chain = ContentChain(self._memory.pool.page_size)
            chain.is_open = False  # the content of candidates is not offered to the prefix cache
            name, shared = f"{parent.name}#{index:06d}", parent.logged
            group.branches.append(Branch(parent.request, name, chain, parent=parent, shared=shared, logged=shared))
        return group

    # -- slots -------------------------------------------------------------------------------------------------------

    def enter(self, candidate: Branch) -> bool:
        """Give a candidate its slot, with its parent's state. False when none is free."""
        parent = candidate.parent
        assert parent is not None and parent.slot >= 0 and parent.candidates is not None
        request = candidate.request
        if not request.spare:
            taken = self._take(request, 1)
            if taken is None:
                return False
            request.slots += taken
            request.spare += taken
        candidate.slot = request.spare.pop()
        parent.is_starved = False
        parent.candidates.entered += 1
        if self._spec.sampling is not None:
            self._memory.slots.sampling[candidate.slot] = _sampling(
                request.sampling, int(candidate.name.rpartition("#")[2])
            )
        self._memory.copy_slot(parent.slot, candidate.slot)
        candidate.matcher = parent.matcher.copy() if parent.matcher is not None else None
        return True

    def can_run(self, parent: Branch) -> bool:
        """Return whether some candidate of a branch has a slot, or would get one."""
        if (parent.candidates is not None and parent.candidates.entered) or parent.request.spare:
            return True
        return not self._requests.is_blocked and self._left >= 1

    def starve(self, parent: Branch) -> None:
        """Note that candidates of a branch wait for slots."""
        parent.is_starved = parent.candidates is not None and not parent.candidates.entered

    @property
    def leaves_room(self) -> bool:
        """Whether one more whole request would take no slot that candidates may have."""
        branches = len(self._kv.branches)
        return self._of_requests + branches <= self._memory.slots.count - self._kv.rows * branches

    @property
    def _of_requests(self) -> int:
        """Slots of whole requests."""
        return len(self._kv.branches) * sum(bool(request.slots) for request in self._requests.requests.values())

    @property
    def _left(self) -> int:
        """Slots that candidates may still take."""
        return self._kv.rows * len(self._kv.branches) - (self._memory.slots.used - self._of_requests)

    def _take(self, request: KVRequest, count: int) -> list[int] | None:
        return self._memory.slots.take(count, request.sampling) if count <= self._left else None

    def _give_back(self, parent: Branch) -> None:
        """Return slots of earlier candidates while waiting for more, so that no two requests wait for each other."""
        request = parent.request
        self.free(parent)
        if not request.spare:
            return
        spare = set(request.spare)
        self._memory.slots.give_back(request.spare)
        request.slots = [slot for slot in request.slots if slot not in spare]
        request.claimed -= len(spare)
        request.spare = []
        self._requests.has_changed = True

    # -- pages -------------------------------------------------------------------------------------------------------

    def attach(self, candidate: Branch) -> bool:
        """Let a candidate without pages share its parent's. False while those must be recomputed."""
        parent, tables = candidate.parent, self._memory.tables
        assert parent is not None
        if int(tables.length[candidate.slot]) >= candidate.shared:
            return True
        if parent.is_evicted or parent.replay:
            self._requests.pending[parent.key] = parent
            return False
        tables.fork(parent.slot, candidate.slot)
        return True

    def check_pages(self, candidate: Branch) -> None:
        """Raise TooLarge when the caches of all candidates of a started job can never exist at once."""
        job, forward = candidate.job, candidate.forward
        if not isinstance(job, CandidateJob) or job.group.takes_turns or forward is None or not forward.attend.write:
            return
        pool, count = self._memory.pool, len(job.group.branches)
        shared = candidate.shared // pool.page_size
        apart = pool.pages_for(candidate.logged + forward.tokens + tokens_ahead(candidate)) - shared
        if shared + apart * count > pool.total:
            raise TooLarge(
                f"{count} candidates can never fit the cache of node {self._spec.name} together",
                f"{shared} shared pages and {apart} for each candidate are {shared + apart * count}; the pool has "
                f"{pool.total} of {pool.page_size} tokens",
                "ask for fewer candidates or fewer steps, or give the deployment more cache",
                node=self._spec.name,
                value=shared + apart * count,
                allowed=pool.total,
            )

    def victim(self, branch: Branch) -> Branch | None:
        """Return a candidate of the same request to evict for a branch: an idle one, else the last one after it.

        The first candidate with work can evict all others, so one of them always makes progress.
        """
        group = branch.candidates if branch.parent is None else branch.parent.candidates
        if group is None:
            return None
        able = [
            other for other in group.branches if other is not branch and not other.in_flight and self._has_pages(other)
        ]
        idle = [other for other in able if not other.has_work]
        later = [other for other in able if branch.parent is None or other.name > branch.name]
        return next(iter(idle), None) or next(reversed(later), None)

    def another_runs(self, candidate: Branch) -> bool:
        """Return whether another candidate of the same job has its pages, and will free them."""
        group = None if candidate.parent is None else candidate.parent.candidates
        return group is not None and any(
            other.is_reserved and other.has_work for other in group.branches if other is not candidate
        )

    def _has_pages(self, branch: Branch) -> bool:
        return branch.slot >= 0 and int(self._memory.tables.count[branch.slot]) > 0

    def free(self, parent: Branch) -> None:
        """Free the candidates of a branch."""
        group, parent.candidates = parent.candidates, None
        for candidate in group.branches if group is not None else ():
            self._free(candidate)

    def _free(self, candidate: Branch) -> None:
        request = candidate.request
        self._requests.remove(candidate)
        candidate.clear()
        if candidate.slot < 0:
            return
        self._requests.has_changed = True
        self._memory.tables.release(candidate.slot)
        if len(request.slots) - len(request.branches) > request.claimed:
            request.slots.remove(candidate.slot)
            self._memory.slots.give_back([candidate.slot])
        else:
            request.spare.append(candidate.slot)
        candidate.slot = -1
        if candidate.parent is not None and candidate.parent.candidates is not None:
            candidate.parent.candidates.entered -= 1

    # -- results -----------------------------------------------------------------------------------------------------

    def merge(self, result: StepResult) -> None:
        """Replace the results of candidates by those of their whole jobs, as far as these are complete."""
        jobs = [item.job for item in result.done] + [item.job for item in result.emissions]
        if not any(isinstance(job, CandidateJob) for job in jobs):
            return
        emissions, done = result.emissions, result.done
        result.emissions, result.done = [], []
        for item in emissions:
            if not isinstance(item.job, CandidateJob):
                result.emissions.append(item)
            elif item.job.group.job is item.job.whole:
                item.job.group.add_iteration(item.job.index, item.outputs)
                self._emit(result, item.job.group)
        ended: dict[int, tuple[CandidateGroup, list[int]]] = {}
        for end in done:
            if not isinstance(end.job, CandidateJob):
                result.done.append(end)
            elif end.job.group.job is end.job.whole:
                self._end(result, end, end.job)
                ended.setdefault(id(end.job.group), (end.job.group, []))[1].append(end.job.index)
        for group, indices in ended.values():
            self._store(result, group, sorted(indices))

    def _end(self, result: StepResult, done: Done, job: CandidateJob) -> None:
        group = job.group
        group.done[job.index] = done
        self._requests.remove(group.branches[job.index])
        self._emit(result, group)
        if group.takes_turns:
            self._free(group.branches[job.index])

    def _emit(self, result: StepResult, group: CandidateGroup) -> None:
        try:
            if group.job is not None and group.job.loop is not None and group.job.loop.emit:
                result.emissions.extend(group.emissions())
        except Exception as error:  # noqa: BLE001 unequal shapes fail their own request only
            self._fail(result, group, error)

    def _store(self, result: StepResult, group: CandidateGroup, indices: list[int]) -> None:
        """Keep the outputs of candidates that ended; the last of them end their job."""
        if group.job is None:
            return
        try:
            group.store(indices)
            if group.is_complete:
                self._finish(result, group)
        except Exception as error:  # noqa: BLE001 unequal shapes, or too little memory, fail their own request only
            self._fail(result, group, error)

    def _finish(self, result: StepResult, group: CandidateGroup) -> None:
        job, parent = group.job, group.parent
        assert job is not None
        shares = [group.done[index] for index in range(len(group.branches))]
        outputs, last = group.outputs(), stack_ports(group.last_values)
        reasons = {share.reason for share in shares}
        result.done.append(
            Done(
                job=job,
                outputs=outputs,
                reason=reasons.pop() if len(reasons) == 1 else "length",
                iterations=max(share.iterations for share in shares),
            )
        )
        self._requests.remember(parent, {**last, **outputs})
        group.job = parent.job = None
        group.stacked, group.last_values = {}, []
        if group.takes_turns:
            self.free(parent)
        self._requests.requeue(parent)

    def _fail(self, result: StepResult, group: CandidateGroup, error: Exception) -> None:
        if group.job is not None:
            self._requests.fail(group.parent, group.job, error, result)


def takes_turns(job: Job) -> bool:
    """Return whether nothing of a candidate is needed once its share of a job has ended."""
    return not job.attend.write or (job.loop is not None and job.attend.keep == "loop")


def tokens_ahead(candidate: Branch) -> int:
    """Return the tokens of its loop after the present pass; 0 without a loop, or with a stop rule."""
    job, loop, forward = candidate.job, candidate.loop, candidate.forward
    if job is None or job.loop is None or loop is None or forward is None or job.loop.stop_port is not None:
        return 0
    return forward.item_tokens * (loop.limit - loop.iteration - forward.iterations)


def _sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return a candidate's sampling: the first draws as the request does, the others from seeds of their own."""
    return replace(sampling, seed=(sampling.seed + index * SEED_STEP) % (1 << 63)) if index else sampling
