"""Candidates of a KV node: candidates of one request, each with a cache that goes on from its branch's.

Called by the KV engine and its admission. A job of several rows becomes a job for each row, which runs like any other;
what they give is put together again here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from mstar_core.engine.base import Done, Job, StepResult
from mstar_core.engine.cache.prefix_cache import ContentChain
from mstar_core.engine.kv.sequence import Branch, CandidateGroup, CandidateJob, KVRequest, stacked
from mstar_core.engine.rows import Dealer
from mstar_core.errors import EngineError, TooLarge
from mstar_core.graph.spec.nodes import STEP

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import SamplingParams
    from mstar_core.engine.kv.state import KVState
    from mstar_core.graph.spec.nodes import NodeSpec

SEED_STEP: Final = 0x9E3779B97F4A7C15
"""Between the seeds of neighbouring rows: odd, so that no two of 2**64 rows share one."""


class Candidates:
    """Opens rows, gives them their work and frees them. Holds no state of its own beyond the engine's."""

    def __init__(self, spec: NodeSpec, state: KVState, place: Callable[[str, Tensor], Tensor]) -> None:
        """place: brings a port's value to the device of the node."""
        assert spec.kv is not None
        self._spec = spec
        self._place = place
        self._kv = spec.kv
        self._state = state
        self._dealer = Dealer(spec)

    def check(self, rows: int) -> None:
        """Raise TooLarge when so many rows can never exist at once, EngineError when the node has none."""
        if rows > 1 and not self._kv.rows:
            raise EngineError(
                f"node {self._spec.name} runs one row per request", f"{rows} rows in a step of 1",
                "a model that runs candidates declares how many: KVSpec(rows=...)", node=self._spec.name,
            )  # fmt: skip
        if rows > max(1, self._kv.rows):
            raise TooLarge(
                f"node {self._spec.name} holds {self._kv.rows} rows at once, {rows} are asked for",
                "each keeps a cache of its own between the steps of its walk",
                "ask for fewer candidates",
                node=self._spec.name,
                value=rows,
                allowed=self._kv.rows,
            )

    # -- a job of several rows begins --------------------------------------------------------------------------------

    def has_room(self, trunk: Branch, job: Job) -> bool:
        """Whether the job's rows can exist at once, where they must. They get all their slots, of all branches.

        Raises TooLarge when they never can.
        """
        self.check(min(job.rows, self._kv.rows or job.rows))
        if trunk.rows is not None and self._goes_on(trunk.rows, job) or takes_turns(job):
            return True
        self.check(job.rows)
        request, wanted = trunk.request, job.rows * len(self._kv.branches)
        missing = wanted - request.claimed
        taken = [] if missing <= 0 else None if self._state.is_blocked else self._take(request, missing)
        if taken is None:
            self._let_go(trunk)
            return False
        request.slots += taken
        request.spare += taken
        request.claimed += len(taken)
        return True

    def start(self, trunk: Branch, job: Job) -> list[Branch]:
        """Hand a job to the rows of its branch, opening them where those of before do not go on.

        Raises EngineError when an input is neither one value nor one for each row.
        """
        if trunk.rows is None or not self._goes_on(trunk.rows, job):
            self.drop(trunk)
            self._open(trunk, job)
        group = trunk.rows
        assert group is not None
        inputs = dict(job.inputs)
        if job.loop is not None:
            held = trunk.request.held
            inputs |= {i: held[port] for port, i in job.loop.carry.items() if i not in inputs and port in held}
        # Once for all rows: they get views of what is there.
        inputs |= {name: self._place(name, inputs[name]) for name in self._spec.row_ports if name in inputs}
        shares = self._dealer.deal(inputs, job.rows)
        group.begin(job)
        now = self._state.clock()
        for row, (branch, share) in enumerate(zip(group.branches, shares, strict=True)):
            mine = CandidateJob(
                key=job.key, handle=job.handle, inputs=share, outputs=job.outputs, attend=job.attend,
                branch=job.branch, sample=job.sample, loop=job.loop, urgency=job.urgency, whole=job, group=group,
                row=row,
            )  # fmt: skip
            branch.queue.append(mine)
            branch.waiting_since = now
            self._state.pending[branch.request.order, branch.name] = branch
        return list(group.branches)

    def _goes_on(self, group: CandidateGroup, job: Job) -> bool:
        """Whether rows that are there are those that a job means."""
        if len(group.branches) != job.rows:
            return False
        if not group.is_for_loop:
            return True
        step = job.inputs.get(STEP)
        return job.attend.keep == "loop" and job.loop is None and step is not None and int(step) > 0

    def _open(self, trunk: Branch, job: Job) -> None:
        group = CandidateGroup(trunk=trunk, takes_turns=takes_turns(job), is_for_loop=job.attend.keep == "loop")
        for row in range(job.rows):
            chain = ContentChain(self._state.pool.page_size)
            chain.is_open = False  # a row's content is not looked for by others
            name = f"{trunk.name}#{row:06d}"
            branch = Branch(trunk.request, name, chain, trunk=trunk, base=trunk.logged, logged=trunk.logged)
            group.branches.append(branch)
        trunk.rows = group

    # -- caches of rows ----------------------------------------------------------------------------------------------

    def enter(self, row: Branch) -> bool:
        """Give a row its slot, as of the branch that it goes on from. False when none is free."""
        trunk, slots = row.trunk, self._state.slots
        assert trunk is not None and trunk.slot >= 0
        request = row.request
        if not request.spare:
            taken = self._take(request, 1)
            if taken is None:
                return False
            request.slots += taken
            request.spare += taken
        row.slot = request.spare.pop()
        trunk.is_kept_out = False
        assert trunk.rows is not None
        trunk.rows.entered += 1
        if self._spec.sampling is not None:
            slots.sampling[row.slot] = _sampling_of(request.sampling, int(row.name.rpartition("#")[2]))
        slots.copy(trunk.slot, row.slot)
        return True

    def may_run(self, trunk: Branch) -> bool:
        """Whether some row of a branch has a slot, or would get one."""
        if (trunk.rows is not None and trunk.rows.entered) or trunk.request.spare:
            return True
        return not self._state.is_blocked and self._left >= 1

    def keep_out(self, trunk: Branch) -> None:
        """Note that rows of a branch wait for slots."""
        trunk.is_kept_out = trunk.rows is not None and not trunk.rows.entered

    def _let_go(self, trunk: Branch) -> None:
        """Give back the slots of rows that a branch no longer needs: nobody waits with what others wait for."""
        request = trunk.request
        self.drop(trunk)
        if not request.spare:
            return
        spare = set(request.spare)
        self._state.slots.give_back(request.spare)
        request.slots = [slot for slot in request.slots if slot not in spare]
        request.claimed -= len(spare)
        request.spare = []
        self._state.has_changed = True

    @property
    def takes_none(self) -> bool:
        """Whether one more whole request takes no slot that rows may have."""
        branches = len(self._kv.branches)
        return self._of_requests + branches <= self._state.slots.count - self._kv.rows * branches

    @property
    def _of_requests(self) -> int:
        """Slots of whole requests."""
        return len(self._kv.branches) * sum(bool(each.slots) for each in self._state.requests.values())

    @property
    def _left(self) -> int:
        """Slots that rows may still take, which leave to whole requests what is theirs."""
        return self._kv.rows * len(self._kv.branches) - (self._state.slots.used - self._of_requests)

    def _take(self, request: KVRequest, count: int) -> list[int] | None:
        return self._state.slots.take(count, request.sampling) if count <= self._left else None

    def attach(self, row: Branch) -> bool:
        """Let a row without pages share those of its branch. False while these have to be computed again."""
        trunk, tables = row.trunk, self._state.tables
        assert trunk is not None
        if int(tables.length[row.slot]) >= row.base:
            return True
        if trunk.is_evicted or trunk.replay:
            self._state.pending[trunk.request.order, trunk.name] = trunk
            return False
        tables.fork(trunk.slot, row.slot)
        return True

    def check_pages(self, row: Branch) -> None:
        """Raise TooLarge when the caches of all rows of a job that has just begun can never exist at once."""
        job, forward = row.job, row.forward
        if not isinstance(job, CandidateJob) or job.group.takes_turns or forward is None or not forward.attend.write:
            return
        pool, count = self._state.pool, len(job.group.branches)
        shared = row.base // pool.page_size
        own = pool.pages_for(row.logged + forward.tokens + tokens_ahead(row)) - shared
        if shared + own * count > pool.total:
            raise TooLarge(
                f"{count} rows can never fit the cache of node {self._spec.name} together",
                f"{shared} shared pages and {own} for each row are {shared + own * count}; the pool has {pool.total} "
                f"of {pool.page_size} tokens",
                "ask for fewer candidates or fewer steps, or give the deployment more cache",
                node=self._spec.name,
                value=shared + own * count,
                allowed=pool.total,
            )

    def gives_way(self, row: Branch) -> Branch | None:
        """A row of the same request that can give its pages to this one: one that rests, else the last after it.

        The first row with work can take all others' so that one of them always goes on.
        """
        group = row.rows if row.trunk is None else row.trunk.rows
        if group is None:
            return None
        able = [r for r in group.branches if r is not row and not r.in_flight and self._owns_pages(r)]
        resting = [each for each in able if not each.has_work]
        later = [each for each in able if row.trunk is None or each.name > row.name]
        return next(iter(resting), None) or next(reversed(later), None)

    def someone_goes_on(self, row: Branch) -> bool:
        """Whether another row of the same job has its pages, and frees them when it ends."""
        group = None if row.trunk is None else row.trunk.rows
        return group is not None and any(r.is_reserved and r.has_work for r in group.branches if r is not row)

    def _owns_pages(self, row: Branch) -> bool:
        return row.slot >= 0 and int(self._state.tables.count[row.slot]) > 0

    def drop(self, trunk: Branch) -> None:
        """Free the rows of a branch."""
        group, trunk.rows = trunk.rows, None
        for row in group.branches if group is not None else ():
            self._free(row)

    def _free(self, row: Branch) -> None:
        state, request = self._state, row.request
        state.pending.pop((request.order, row.name), None)
        row.queue.clear()
        row.replay.clear()
        row.job = row.forward = row.loop = None
        if row.slot < 0:
            return
        state.has_changed = True
        state.tables.release(row.slot)
        if len(request.slots) - len(request.branches) > request.claimed:
            request.slots.remove(row.slot)
            state.slots.give_back([row.slot])
        else:
            request.spare.append(row.slot)
        row.slot = -1
        if row.trunk is not None and row.trunk.rows is not None:
            row.trunk.rows.entered -= 1

    # -- what rows give ----------------------------------------------------------------------------------------------

    def gather(self, result: StepResult) -> None:
        """Put what rows gave in a step in terms of their jobs."""
        jobs = [item.job for item in result.done] + [item.job for item in result.emissions]
        if not any(isinstance(job, CandidateJob) for job in jobs):
            return
        emissions, done = result.emissions, result.done
        result.emissions, result.done = [], []
        for told in emissions:
            if not isinstance(told.job, CandidateJob):
                result.emissions.append(told)
            elif told.job.group.job is told.job.whole:
                told.job.group.tell(told.job.row, told.outputs)
                self._pass_on(result, told.job.group)
        ends: dict[int, tuple[CandidateGroup, list[int]]] = {}
        for ended in done:
            if not isinstance(ended.job, CandidateJob):
                result.done.append(ended)
            elif ended.job.group.job is ended.job.whole:
                self._ended(result, ended, ended.job)
                ends.setdefault(id(ended.job.group), (ended.job.group, []))[1].append(ended.job.row)
        for group, rows in ends.values():
            self._lay(result, group, sorted(rows))

    def _ended(self, result: StepResult, ended: Done, job: CandidateJob) -> None:
        group = job.group
        group.done[job.row] = ended
        self._state.pending.pop((group.trunk.request.order, group.branches[job.row].name), None)
        self._pass_on(result, group)
        if group.takes_turns:
            self._free(group.branches[job.row])

    def _lay(self, result: StepResult, group: CandidateGroup, rows: list[int]) -> None:
        """Keep what rows that ended gave; the last of them end their job."""
        if group.job is None:
            return
        try:
            group.lay(rows)
        except Exception as error:  # noqa: BLE001 no memory for all rows fails their own request only
            self._fail(result, group, error)
            return
        if group.is_complete:
            self._finish(result, group)

    def _pass_on(self, result: StepResult, group: CandidateGroup) -> None:
        try:
            if group.job is not None and group.job.loop is not None and group.job.loop.emit:
                result.emissions.extend(group.emissions())
        except Exception as error:  # noqa: BLE001 rows of unlike shapes fail their own request only
            self._fail(result, group, error)

    def _finish(self, result: StepResult, group: CandidateGroup) -> None:
        job, trunk = group.job, group.trunk
        assert job is not None
        shares = [group.done[row] for row in range(len(group.branches))]
        try:
            outputs, held = group.outputs(), stacked(group.held)
        except Exception as error:  # noqa: BLE001 rows of unlike shapes fail their own request only
            self._fail(result, group, error)
            return
        reasons = {share.reason for share in shares}
        result.done.append(
            Done(
                job=job, outputs=outputs, reason=reasons.pop() if len(reasons) == 1 else "length",
                iterations=max(share.iterations for share in shares),
            )
        )  # fmt: skip
        self._state.hold(trunk, {**held, **outputs})
        group.job = trunk.job = None
        group.made, group.held = {}, []
        if group.takes_turns:
            self.drop(trunk)
        self._state.look_again(trunk)

    def _fail(self, result: StepResult, group: CandidateGroup, error: Exception) -> None:
        if group.job is not None:
            self._state.fail(result, group.trunk, group.job, self._state.wrapped(error))


def takes_turns(job: Job) -> bool:
    """Whether nothing of a row is needed once its share of a job has ended."""
    return not job.attend.write or (job.loop is not None and job.attend.keep == "loop")


def tokens_ahead(row: Branch) -> int:
    """Tokens of its loop after the present pass, where that is known: 0 without a loop or with a stop rule."""
    job, loop, forward = row.job, row.loop, row.forward
    if job is None or job.loop is None or loop is None or forward is None or job.loop.stop_port is not None:
        return 0
    return forward.row_tokens * (loop.limit - loop.iteration - forward.iterations)


def _sampling_of(sampling: SamplingParams, row: int) -> SamplingParams:
    """How a row draws: the first as the request does, others from seeds of their own."""
    return replace(sampling, seed=(sampling.seed + row * SEED_STEP) % (1 << 63)) if row else sampling
