"""Who enters the next step of a KV node, with which pages, and who gives way. Called by the KV engine's launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.engine.batching import Offer, share_budget, youngest
from mstar_core.engine.cache.page_pool import OutOfPages
from mstar_core.engine.cuda_graphs.pass_keys import AHEAD, AHEAD_TOKENS
from mstar_core.engine.kv.batch import ScheduledChunk, decode_batch
from mstar_core.engine.kv.candidates import tokens_ahead
from mstar_core.engine.kv.model_runner import ModelRunner
from mstar_core.engine.kv.sequence import Branch, ForwardPass
from mstar_core.errors import TooLarge

if TYPE_CHECKING:
    from mstar_core.engine.base import Job
    from mstar_core.engine.cache.page_table import PageCopy
    from mstar_core.engine.kv.candidates import Candidates
    from mstar_core.engine.kv.loops import Loops
    from mstar_core.engine.kv.state import KVState
    from mstar_core.graph.spec.nodes import NodeSpec


ROWS: Final = 32
"""Candidates of captured passes that a step takes: enough to fill a device while the host prepares others.

Candidates of which each iteration is told are not counted.
"""


class Scheduler:
    """Starts jobs, reserves pages and preempts. Holds no state of its own beyond the engine's."""

    def __init__(
        self, spec: NodeSpec, state: KVState, loops: Loops, rows: Candidates, runner: ModelRunner, token_budget: int
    ) -> None:
        assert spec.kv is not None
        self._spec = spec
        self._branch_names = spec.kv.branches
        self._state = state
        self._loops = loops
        self._rows = rows
        self._runner = runner
        self._budget = token_budget

    def schedule_chunks(self) -> list[ScheduledChunk]:
        """Start what can start, in order of age, and cut it to the token budget."""
        chunks = self._look()
        while not chunks and self._state.has_changed:  # who came late in the look gave back what an older one lacked
            chunks = self._look()
        return chunks

    def _look(self) -> list[ScheduledChunk]:
        self._state.look()
        chosen: list[Branch] = []
        ahead = [branch for _, branch in sorted(self._state.pending.items(), reverse=True)]
        passes = self._runner.passes
        most_rows, rows = min(ROWS, passes.most_rows) if passes is not None else 0, 0
        while ahead and (not most_rows or rows < most_rows):
            branch = ahead.pop()
            if branch.in_flight or not self._has_slots(branch):
                continue
            started = self._start_next(branch)
            ahead.extend(reversed(started))
            if branch.job is None:
                continue
            if branch.waits_for_rows:
                self._restore(branch, chosen)
            elif branch.current is None and branch.is_reserved:
                self._join_decode(branch)
            elif branch.is_reserved or (not self._state.lacks_pages and self.reserve(branch)):
                if branch.current is None:
                    self._join_decode(branch)
                else:
                    chosen.append(branch)
                    # Candidates whose iterations are told together stay together: the last one decides when.
                    rows += 0 if branch.is_told or branch.current.is_ids else branch.current.iterations
        budget, prompts = self._budget, self._runner.prefill
        if prompts is not None and prompts.most_tokens:
            # No more than one replay takes: rows that decode wait for one of them at most, and its buffers take turns.
            budget, chosen = min(budget, prompts.most_tokens), chosen[: prompts.most_rows]
        if most_rows and all(forward.per_row for forward in _currents(chosen)):
            budget = max(budget, sum(forward.left for forward in _currents(chosen)))  # their number is bound enough
        offers = [Offer(tokens=f.left, must_be_whole=f.must_be_whole) for f in _currents(chosen)]
        budget = max(budget - len(self._state.active), self._state.pool.page_size)
        counts = share_budget(offers, budget)
        # A preemption during this choice may have taken pages back from a branch that was chosen before.
        return [self.chunk(b, n) for b, n in zip(chosen, counts, strict=True) if n and b.is_reserved]

    def chunk(self, branch: Branch, count: int) -> ScheduledChunk:
        forward = branch.current
        assert forward is not None
        chunk = ScheduledChunk(
            branch, forward, count, branch.job, is_last=count == forward.left, iterations=forward.iterations
        )
        if not forward.is_replay and branch.job is not None:
            chunk.wants = self._loops.wanted(branch.job)
            chunk.samples = chunk.is_last and branch.job.sample and self._spec.sampling is not None
        return chunk

    def look_ahead(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Let one replay run several iterations of loops, where nobody could join in between, and get pages for them.

        A loop that tells each iteration runs ahead from its second one on, while no other branch waits and all others
        run ahead too: who has just come is beside it in the next step.
        """
        tokens = sum(chunk.count for chunk in chunks)
        sizes = [size for size in AHEAD if size * tokens <= AHEAD_TOKENS]
        if self._runner.passes is None or not sizes:
            return
        most = [self._most_ahead(chunk) for chunk in chunks]
        is_crowded = bool(self._state.active) or len(self._state.pending) > len(chunks) or min(most, default=1) == 1
        for chunk, own in zip(chunks, most, strict=True):
            if not (is_crowded and chunk.branch.is_told):
                chunk.ahead = next((size for size in sizes if size <= own and self._makes_room(chunk, size)), 1)

    def _most_ahead(self, chunk: ScheduledChunk) -> int:
        """Iterations of its loop that nothing stands between, from that of a chunk on."""
        loop, state, forward = chunk.job.loop if chunk.job is not None else None, chunk.branch.loop, chunk.forward
        if loop is None or state is None or not loop.fused or not loop.carry or loop.stop_port is not None:
            return 1
        if state.ready or forward.is_replay or not forward.attend.write or (loop.emit and not state.iteration):
            return 1
        return min([state.limit, *map(len, state.lists.values())]) - state.iteration

    def _makes_room(self, chunk: ScheduledChunk, iterations: int) -> bool:
        """Get pages for so many iterations, where they are there: nobody gives way for it."""
        tables, tokens, slot = self._state.tables, chunk.count * iterations, chunk.branch.slot
        if int(tables.length[slot]) + tokens > tables.max_tokens:
            return False
        if tables.missing(slot, tokens) > self._state.pool.available:
            return False
        self._copy(tables.ensure(slot, tokens))
        return True

    def _has_slots(self, branch: Branch) -> bool:
        """Whether a branch has its slot; takes one unless somebody before it waits for room."""
        request = branch.request
        if branch.trunk is not None:
            passes = bool(request.spare) or not self._state.is_blocked  # what was claimed for it, nobody waits for
            if branch.slot >= 0 or (passes and self._rows.enter(branch)):
                return True
            self._state.lacks_slots = True
            self._rows.keep_out(branch.trunk)
            return False
        if request.slots:
            return True
        passes = not self._state.is_blocked or (not self._state.lacks_pages and self._rows.takes_none)
        taken = self._state.slots.take(len(self._branch_names), request.sampling) if passes else None
        if taken is None:
            self._state.lacks_slots = True
            return False
        request.slots = taken
        for slot, each in zip(taken, request.branches.values(), strict=True):
            each.slot = slot
        return True

    def _start_next(self, branch: Branch) -> list[Branch]:
        """Start the next job of a branch that has none; the branch has none after it when nothing is left to do there.

        Returns the rows that a job of several has opened.
        """
        key = (branch.request.order, branch.name)
        while branch.job is None and branch.queue:
            job = branch.job = branch.queue.popleft()
            branch.is_reserved, branch.cached_tokens = False, 0
            try:
                if job.rows > 1:
                    return self._start_rows(branch, job)
                self._rows.drop(branch)
                ended = self._loops.start(branch, job)
                self._rows.check_pages(branch)
            except Exception as error:  # noqa: BLE001 one job's inputs must not end the worker's turn
                self._state.fail(self._state.ready, branch, job, self._state.wrapped(error))
                return []
            if ended is not None:
                self._state.ready.done.append(ended)
                self._state.hold(branch, ended.outputs)
                branch.job = None
            elif branch.is_decoding:
                self._state.looping[int(job.key)] = branch
        if branch.job is None:
            self._state.pending.pop(key, None)
        return []

    def _start_rows(self, branch: Branch, job: Job) -> list[Branch]:
        if not self._rows.has_room(branch, job):
            branch.queue.appendleft(job)
            branch.job = None
            self._state.lacks_slots = branch.is_kept_out = True
            return []
        branch.is_kept_out = False
        opened = self._rows.start(branch, job)
        if not branch.is_evicted:
            self._state.pending.pop((branch.request.order, branch.name), None)
        return opened

    def _restore(self, branch: Branch, chosen: list[Branch]) -> None:
        """Compute a preempted branch again before its rows, which share what it holds; not before these can run."""
        if branch.is_evicted or branch.replay:
            if not self._rows.may_run(branch):
                self._state.lacks_slots = True
                self._rows.keep_out(branch)
            elif not self._state.lacks_pages and self.reserve(branch) and branch.current is not None:
                chosen.append(branch)
                return
        if not (branch.is_evicted or branch.replay):
            self._state.pending.pop((branch.request.order, branch.name), None)

    def reserve(self, branch: Branch) -> bool:
        """Get the pages that the current work will fill, preempting others only for the oldest with work."""
        if branch.trunk is not None and not self._rows.attach(branch):
            return False
        if branch.is_evicted and not branch.replay:
            self._loops.rebuild(branch)
            branch.is_evicted = bool(branch.replay)
        self._adopt_cached(branch)
        wanted = sum(forward.left for forward in branch.replay)
        if branch.forward is not None and branch.forward.attend.write:
            wanted += branch.forward.left
            if branch.trunk is not None:
                # All that its loop will need: a row that has begun ends, and then others take its place.
                wanted = min(wanted + tokens_ahead(branch), self._room(branch))
        wanted += branch.is_decoding
        if self._would_thrash(branch, wanted):
            self._state.lacks_pages = True
            return False
        while True:
            try:
                self._copy(self._state.tables.ensure(branch.slot, wanted) if wanted else [])
            except OutOfPages as shortage:
                if not self._make_room(branch, shortage):
                    return False
            except TooLarge as error:
                assert branch.job is not None
                self._state.fail(self._state.ready, branch, branch.job, error)
                return False
            else:
                branch.is_reserved = True
                return True

    def _room(self, row: Branch) -> int:
        """Most tokens that a row can still take; never less than what it computes now, which may be too much."""
        left = sum(forward.left for forward in row.replay) + (row.forward.left if row.forward is not None else 0)
        return max(left, self._state.tables.max_tokens - int(self._state.tables.length[row.slot]))

    def _would_thrash(self, branch: Branch, wanted: int) -> bool:
        """Whether the rows that decode would soon take these pages back. The oldest with work is never held up."""
        if not self._state.active:
            return False
        if self._state.pool.available >= self._state.tables.missing(branch.slot, wanted) + len(self._state.active):
            return False
        return branch.request.order != self._state.oldest_with_work()

    def _make_room(self, branch: Branch, shortage: OutOfPages) -> bool:
        """Preempt one request for `branch`; False when it has to wait or has failed for good."""
        order = branch.request.order
        if order == self._state.oldest_with_work():
            victim = youngest(self._state.holders(), apart_from=order)
            if victim is not None:
                self._preempt(victim.order)
                return True
            row = self._rows.gives_way(branch)
            if row is not None:
                self._evict(row)
                return True
            if self._rows.someone_goes_on(branch):
                self._state.lacks_pages = True
                return False
            if not self._state.in_flight and branch.job is not None:
                self._state.fail(self._state.ready, branch, branch.job, self._state.outgrown(shortage))
                return False
        self._state.lacks_pages = True
        return False

    def _adopt_cached(self, branch: Branch) -> None:
        """Take over pages of the prefix cache at the start of an empty row."""
        row = branch.slot
        if self._state.cache is None or self._state.tables.count[row] or self._state.tables.length[row]:
            return
        tokens = sum(forward.tokens for forward in branch.replay)
        forward = branch.forward
        if (
            forward is not None
            and branch.job is not None
            and forward.attend.write
            and not self._loops.wanted(branch.job)
        ):
            tokens += forward.tokens
        pages = self._state.cache.match(branch.chain.keys, tokens) if tokens else []
        if not pages:
            return
        self._state.tables.adopt(row, pages)
        skipped = len(pages) * self._state.pool.page_size
        while branch.replay and skipped >= branch.replay[0].tokens:
            skipped -= branch.replay.popleft().tokens
        if branch.replay:
            branch.replay[0].done = skipped
        elif skipped and forward is not None:
            forward.done = branch.cached_tokens = skipped
        if not branch.replay:
            branch.is_evicted = False

    def _join_decode(self, branch: Branch) -> None:
        self._state.pending.pop((branch.request.order, branch.name), None)
        assert branch.job is not None
        if not self._state.active:
            self._state.decode_since = self._state.clock()
        self._state.active[int(branch.job.key)] = branch
        self._state.is_decode_current = False

    def grow_decode_rows(self) -> None:
        """Give a writable place to every looping row whose pages are full; pressure preempts the youngest."""
        if not self._state.is_decode_current:
            self.remake_decode_rows()
        decode = self._state.decode
        if decode is None:
            return
        full = self._state.tables.length[decode.slots] >= self._state.tables.capacity[decode.slots]
        if not np.count_nonzero(full):
            return
        for index in np.nonzero(full)[0].tolist():
            self._grow(decode.branches[index])

    def _grow(self, branch: Branch) -> None:
        while branch.job is not None and int(branch.job.key) in self._state.active:
            try:
                self._copy(self._state.tables.ensure(branch.slot, 1))
            except OutOfPages as shortage:
                victim = youngest(self._state.holders())
                if victim is None:
                    self._state.fail(self._state.ready, branch, branch.job, self._state.outgrown(shortage))
                elif victim.order == branch.request.order and self._state.is_alone(branch.request):
                    self._state.fail(self._state.ready, branch, branch.job, self._state.outgrown(shortage))
                else:
                    self._preempt(victim.order)
            else:
                return

    def remake_decode_rows(self) -> None:
        branches = sorted(self._state.active.values(), key=lambda branch: branch.request.order)
        self._state.decode = decode_batch(branches, self._state.slots) if branches else None
        self._state.is_decode_current = True

    def _preempt(self, order: int) -> None:
        """Take all pages of a request; its branches compute their logs again when they are next admitted."""
        handle, request = next(found for found in self._state.requests.items() if found[1].order == order)
        self._state.preempted += 1
        self._state.preempted_pages += int(self._state.tables.count[request.slots].sum())
        self._state.last_preempted = handle
        for branch in request.sequences():
            if branch.slot >= 0:
                self._evict(branch)

    def _evict(self, branch: Branch) -> None:
        """Take the pages of one cache."""
        key = (branch.request.order, branch.name)
        self._loops.sync_log(branch)
        self._state.tables.release(branch.slot)
        branch.replay.clear()
        branch.is_evicted = branch.logged > 0
        branch.is_reserved = False
        branch.cached_tokens = 0
        if branch.forward is not None:
            branch.forward.restart()
        if branch.loop is not None:
            branch.loop.ready.clear()  # its keys are gone, and the log does not have them
        if branch.is_decoding and branch.job is not None:
            if self._state.active.pop(int(branch.job.key), None) is not None:
                self._state.is_decode_current = False
            self._state.pending[key] = branch
            branch.waiting_since = self._state.clock()
        if branch.waits_for_rows:
            self._state.pending[key] = branch
        if self._state.in_flight:
            # Its last id may still be on the way; the log is complete once that step is collected.
            branch.in_flight += 1
            self._state.in_flight[-1].fixed.append(branch)

    def _copy(self, copies: list[PageCopy]) -> None:
        if copies:
            self._runner.copy_pages(copies)


def _currents(branches: list[Branch]) -> Iterator[ForwardPass]:
    for branch in branches:
        if branch.current is not None:
            yield branch.current
