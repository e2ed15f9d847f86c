"""Scheduler of a KV node: which branches run in the next step, with which pages, and what is preempted.

Called by the KV engine's launch. Older requests go first; memory pressure preempts the youngest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from mstar_core.engine.cache.page_pool import OutOfPages
from mstar_core.engine.cuda_graphs.passes import AHEAD, AHEAD_TOKENS
from mstar_core.engine.kv.batch import ScheduledChunk
from mstar_core.engine.kv.candidates import tokens_ahead
from mstar_core.engine.kv.device_share import TEXT, DeviceShare
from mstar_core.engine.kv.moves import Moves
from mstar_core.engine.kv.sequence import Branch, ForwardPass, KVRequest
from mstar_core.errors import TooLarge

if TYPE_CHECKING:
    from mstar_core.engine.base import Job
    from mstar_core.engine.cache.page_table import PageCopy
    from mstar_core.engine.cache.prefix_cache import PrefixCache
    from mstar_core.engine.cache.saved_pages import SavedPages
    from mstar_core.engine.kv.candidates import Candidates
    from mstar_core.engine.kv.loops import Loops
    from mstar_core.engine.kv.model_runner import ModelRunner
    from mstar_core.engine.kv.queue import RequestQueue
    from mstar_core.graph.declare.nodes import NodeSpec

MOST_ITEMS: Final = 32
"""Batch items of captured passes in one step: enough to fill a device while the host prepares the next ones.

Loops that report each iteration are not counted.
"""

MOST_BESIDE_TEXT: Final = 4352
"""Tokens of an image step while text waits: one pass of an image of 1024 x 1024, or several of smaller ones."""

MOST_PREFILL_BUDGETS: Final = 2
"""Token budgets of prompt passes that share a forward pass. More take as long per token and delay first tokens."""


class Scheduler:
    """Starts jobs, reserves pages and preempts. The state that it schedules is the queue's."""

    def __init__(
        self,
        spec: NodeSpec,
        queue: RequestQueue,
        loops: Loops,
        candidates: Candidates,
        runner: ModelRunner,
        token_budget: int,
        share: DeviceShare,
    ) -> None:
        assert spec.kv is not None
        self._spec = spec
        self._branch_names = spec.kv.branches
        self._queue = queue
        self._memory = queue.memory
        self._loops = loops
        self._candidates = candidates
        self._runner = runner
        self._moves = Moves(spec.name, queue, runner)
        self._budget = token_budget
        self._device_share = share

    # -- forming a step ----------------------------------------------------------------------------------------------

    def schedule_chunks(self) -> list[ScheduledChunk]:
        """Start jobs in order of age and cut their passes to the token budget."""
        chunks = self._schedule_once()
        while not chunks and self._queue.has_changed:  # a younger branch has freed what an older one waits for
            chunks = self._schedule_once()
        return chunks

    def _schedule_once(self) -> list[ScheduledChunk]:
        self._queue.begin_pass()
        chosen: list[Branch] = []
        waiting = [branch for _, branch in sorted(self._queue.pending.items(), reverse=True)]
        passes = self._runner.passes
        most_items, items = min(MOST_ITEMS, passes.most_rows) if passes is not None else 0, 0
        while waiting and (not most_items or items < most_items):
            branch = waiting.pop()
            if branch.in_flight or not self._has_slot(branch):
                continue
            waiting.extend(reversed(self._start_next(branch)))
            job = branch.job
            if job is None:
                continue
            if job.move is not None and self._moves.is_ready(branch):
                self._moves.finish(branch, job)
            elif branch.runs_candidates:
                self._restore_parent(branch, chosen)
            elif branch.current is None and branch.is_reserved:
                self._queue.join_decode(branch)
            elif branch.is_reserved or (not self._queue.waits_for_pages and self.reserve(branch)):
                if branch.current is not None:
                    chosen.append(branch)
                    # Candidates that report each iteration stay together: the slowest decides when they report.
                    items += 0 if branch.emits or branch.current.is_ids else branch.current.iterations
                elif job.move is not None:
                    self._moves.finish(branch, job)
                else:
                    self._queue.join_decode(branch)
        chosen = self._take_turns(chosen)
        chosen, counts = self._share(chosen, is_limited=bool(most_items))
        # A preemption during this pass may have taken the pages of a branch that was chosen before it.
        return [self.chunk(b, n) for b, n in zip(chosen, counts, strict=True) if n and b.is_reserved]

    def _take_turns(self, chosen: list[Branch]) -> list[Branch]:
        """Return the branches of the kind whose turn it is: image passes or text. See DeviceShare."""
        images = [branch for branch in chosen if self._is_image(branch)] if self._spec.sampling is not None else []
        share, has_text = self._device_share, bool(self._queue.active) or len(images) < len(chosen)
        if not images and not share.is_engaged:
            share.turn = TEXT
            return chosen
        share.choose(has_images=bool(images), has_text=has_text)
        if share.turn == TEXT:
            return [branch for branch in chosen if not self._is_image(branch)]
        if share.turn is None:
            return []
        return _within(images, MOST_BESIDE_TEXT) if has_text else images

    def _is_image(self, branch: Branch) -> bool:
        """Return whether the pass of a branch only reads its cache, as denoising steps do."""
        return branch.current is not None and not branch.current.is_replay and not branch.current.attend.write

    def _share(self, chosen: list[Branch], *, is_limited: bool) -> tuple[list[Branch], list[int]]:
        """Return the branches of the step and the tokens of each. is_limited: their number was limited already."""
        budget, prompts = self._budget, self._runner.prefill
        if prompts is not None and prompts.most_tokens:
            # At most one replay: decode branches wait for no more, and its buffers are reused by the next.
            budget, chosen = min(budget, prompts.most_tokens), chosen[: prompts.most_rows]
        forwards = list(_current(chosen))
        if all(forward.per_row for forward in forwards):
            most = sum(forward.left for forward in forwards) if is_limited else self._spec.hints.pass_tokens
            if not is_limited and any(forward.attend.write for forward in forwards):
                most = min(most, MOST_PREFILL_BUDGETS * self._budget)
            budget = max(budget, most)
        budget = max(budget - len(self._queue.active), self._memory.pool.page_size)
        return chosen, share_budget([(forward.left, forward.must_be_whole) for forward in forwards], budget)

    def chunk(self, branch: Branch, count: int) -> ScheduledChunk:
        """Return the next `count` tokens of a branch's current pass."""
        forward = branch.current
        assert forward is not None
        is_last = count == forward.left
        chunk = ScheduledChunk(branch, forward, count, branch.job, is_last=is_last, iterations=forward.iterations)
        if not forward.is_replay and branch.job is not None:
            chunk.wants = self._loops.wanted(branch.job)
            chunk.samples = is_last and branch.job.sample and self._spec.sampling is not None
        return chunk

    def plan_ahead(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Let one replay compute several loop iterations where nothing could join in between, if pages are free.

        A loop that reports each iteration runs ahead from its second one on, unless another branch waits or cannot run
        ahead: a request that has just arrived joins the next step.
        """
        tokens = sum(chunk.count for chunk in chunks)
        sizes = [size for size in AHEAD if size * tokens <= AHEAD_TOKENS]
        if self._runner.passes is None or not sizes:
            return
        most = [self._most_ahead(chunk) for chunk in chunks]
        is_crowded = bool(self._queue.active) or len(self._queue.pending) > len(chunks) or min(most, default=1) == 1
        for chunk, own in zip(chunks, most, strict=True):
            if not (is_crowded and chunk.branch.emits):
                chunk.ahead = next((size for size in sizes if size <= own and self._ensure_ahead(chunk, size)), 1)

    def _most_ahead(self, chunk: ScheduledChunk) -> int:
        """Return the iterations, from this chunk's on, that nothing can interrupt."""
        loop, state, forward = chunk.job.loop if chunk.job is not None else None, chunk.branch.loop, chunk.forward
        if loop is None or state is None or not loop.fused or not loop.carry or loop.stop_port is not None:
            return 1
        if state.ready or forward.is_replay or not forward.attend.write or (loop.emit and not state.iteration):
            return 1
        return min([state.limit, *map(len, state.lists.values())]) - state.iteration

    def _ensure_ahead(self, chunk: ScheduledChunk, iterations: int) -> bool:
        """Get pages for several iterations without preempting. Returns whether they are there."""
        tables, tokens, slot = self._memory.tables, chunk.count * iterations, chunk.branch.slot
        if int(tables.length[slot]) + tokens > tables.max_tokens:
            return False
        if tables.missing(slot, tokens) > self._memory.pool.available:
            return False
        self._copy(tables.ensure(slot, tokens))
        return True

    # -- starting jobs -----------------------------------------------------------------------------------------------

    def _has_slot(self, branch: Branch) -> bool:
        """Return whether a branch has its slot; takes one unless an older branch waits for memory."""
        request = branch.request
        if branch.parent is not None:
            may_take = bool(request.spare) or not self._queue.is_blocked  # only this request can use its spare slots
            if branch.slot >= 0 or (may_take and self._candidates.enter(branch)):
                return True
            self._queue.waits_for_slots = True
            self._candidates.starve(branch.parent)
            return False
        if request.slots:
            return True
        may_take = not self._queue.is_blocked or (not self._queue.waits_for_pages and self._candidates.leaves_room)
        taken = self._memory.slots.take(len(self._branch_names), request.sampling) if may_take else None
        if taken is None:
            self._queue.waits_for_slots = True
            return False
        request.slots = taken
        for slot, each in zip(taken, request.branches.values(), strict=True):
            each.slot = slot
        return True

    def _start_next(self, branch: Branch) -> list[Branch]:
        """Start jobs of a branch until one has something to compute. Returns the candidates of a job of several."""
        while branch.job is None and branch.queue:
            job = branch.job = branch.queue.popleft()
            branch.is_reserved, branch.cached_tokens = False, 0
            try:
                if job.rows > 1:
                    return self._start_candidates(branch, job)
                if job.move is not None:
                    self._moves.start(branch, job)
                self._candidates.free(branch)
                ended = self._loops.start(branch, job) if job.move is None else None
                self._candidates.check_pages(branch)
            except Exception as error:  # noqa: BLE001 a job's inputs fail its own request only
                self._queue.fail(self._queue.ready, branch, job, error)
                return []
            if ended is not None:
                self._queue.ready.done.append(ended)
                self._queue.remember(branch, ended.outputs)
                branch.job = None
            elif branch.is_decoding:
                self._queue.looping[int(job.key)] = branch
        if branch.job is None:
            self._queue.remove(branch)
        return []

    def _start_candidates(self, branch: Branch, job: Job) -> list[Branch]:
        if not self._candidates.claim_slots(branch, job):
            branch.queue.appendleft(job)
            branch.job = None
            self._queue.waits_for_slots = branch.is_starved = True
            return []
        branch.is_starved = False
        candidates = self._candidates.start(branch, job)
        if not branch.is_evicted:
            self._queue.remove(branch)
        return candidates

    def _restore_parent(self, branch: Branch, chosen: list[Branch]) -> None:
        """Recompute a preempted branch before its candidates, which share its pages, once one of them can run."""
        if branch.is_evicted or branch.replay:
            if not self._candidates.can_run(branch):
                self._queue.waits_for_slots = True
                self._candidates.starve(branch)
            elif not self._queue.waits_for_pages and self.reserve(branch) and branch.current is not None:
                chosen.append(branch)
                return
        if not (branch.is_evicted or branch.replay):
            self._queue.remove(branch)

    # -- pages -------------------------------------------------------------------------------------------------------

    def reserve(self, branch: Branch) -> bool:
        """Get the pages of a branch's current pass. Only the oldest request with work preempts others for them."""
        if branch.parent is not None and not self._candidates.attach(branch):
            return False
        if branch.is_evicted and not branch.replay and branch.saved is None:
            self._loops.rebuild(branch)
            branch.is_evicted = bool(branch.replay)
        self._adopt_prefix(branch)
        wanted = sum(forward.left for forward in branch.replay) + branch.is_decoding
        wanted += branch.logged if branch.saved is not None else 0
        if branch.forward is not None and branch.forward.attend.write:
            wanted += branch.forward.left
            if branch.parent is not None:
                # A candidate gets the pages of its whole loop, so that it ends and others take its place.
                wanted = min(wanted + tokens_ahead(branch), self._room(branch))
        if self._would_thrash(branch, wanted):
            self._queue.waits_for_pages = True
            return False
        while True:
            try:
                self._copy(self._memory.tables.ensure(branch.slot, wanted) if wanted else [])
            except OutOfPages as shortage:
                if not self._make_room(branch, shortage):
                    return False
            except TooLarge as error:
                assert branch.job is not None
                self._queue.fail(self._queue.ready, branch, branch.job, error)
                return False
            else:
                self._restore(branch)
                branch.is_reserved = True
                return True

    def _room(self, branch: Branch) -> int:
        """Return the tokens that a branch can still take, but at least those of its pass, which may be too many."""
        left = sum(forward.left for forward in branch.replay) + (branch.forward.left if branch.forward else 0)
        return max(left, self._memory.tables.max_tokens - int(self._memory.tables.length[branch.slot]))

    def _would_thrash(self, branch: Branch, wanted: int) -> bool:
        """Return whether the decode batch would soon take these pages back. Never for the oldest request with work."""
        active, memory = len(self._queue.active), self._memory
        if not active or memory.pool.available >= memory.tables.missing(branch.slot, wanted) + active:
            return False
        return branch.request.order != self._queue.oldest_with_work()

    def _make_room(self, branch: Branch, shortage: OutOfPages) -> bool:
        """Preempt for a branch. False when it has to wait, or has failed because nothing can make room for it."""
        if branch.request.order == self._queue.oldest_with_work():
            victim = self._youngest(apart_from=branch.request)
            if victim is not None:
                self._preempt(victim)
                return True
            candidate = self._candidates.victim(branch)
            if candidate is not None:
                self._evict(candidate)
                return True
            if not self._candidates.another_runs(branch) and not self._queue.in_flight and branch.job is not None:
                self._queue.fail(self._queue.ready, branch, branch.job, self._outgrown(shortage))
                return False
        self._queue.waits_for_pages = True
        return False

    def _adopt_prefix(self, branch: Branch) -> None:
        """Take over pages of the prefix cache: at the start of an empty cache, and where a further pass starts."""
        memory, slot = self._memory, branch.slot
        if memory.prefixes is None or branch.saved:
            return
        if memory.tables.count[slot] or memory.tables.length[slot]:
            self._adopt_further(branch, memory.prefixes)
            return
        tokens = sum(forward.tokens for forward in branch.replay)
        forward = branch.forward
        if forward is not None and branch.job is not None and forward.attend.write:
            tokens += forward.tokens if not self._loops.wanted(branch.job) else 0
        pages = memory.prefixes.match(branch.chain.keys, tokens) if tokens else []
        if not pages:
            return
        memory.tables.adopt(slot, pages)
        skipped = len(pages) * memory.pool.page_size
        while branch.replay and skipped >= branch.replay[0].tokens:
            skipped -= branch.replay.popleft().tokens
        if branch.replay:
            branch.replay[0].done = skipped
            return
        if skipped and forward is not None:
            forward.done = branch.cached_tokens = skipped
        branch.is_evicted = False

    def _adopt_further(self, branch: Branch, prefixes: PrefixCache) -> None:
        """Take over pages where a pass begins behind cached tokens: the text after an image, or the image itself."""
        tables, forward, job = self._memory.tables, branch.forward, branch.job
        if forward is None or job is None or forward.done or branch.replay or not branch.chain.is_open:
            return
        if not forward.attend.write or forward.must_be_whole or branch.in_flight or self._loops.wanted(job):
            return
        before = int(tables.length[branch.slot])
        full = before // self._memory.pool.page_size
        pages = prefixes.match(branch.chain.keys, before + forward.tokens)[full:]
        if not pages or before != forward.base:
            return
        tables.adopt(branch.slot, pages)
        forward.done = branch.cached_tokens = int(tables.length[branch.slot]) - before

    def grow_decode_batch(self) -> None:
        """Give each decoding branch a page for its next token. Pressure preempts the youngest request."""
        queue, tables = self._queue, self._memory.tables
        decode = queue.decode if queue.is_decode_current else queue.current_decode()
        if decode is None:
            return
        full = tables.length[decode.slots] >= tables.capacity[decode.slots]
        if not np.count_nonzero(full):
            return
        for index in np.nonzero(full)[0].tolist():
            self._grow(decode.branches[index])

    def _grow(self, branch: Branch) -> None:
        while branch.job is not None and int(branch.job.key) in self._queue.active:
            try:
                self._copy(self._memory.tables.ensure(branch.slot, 1))
            except OutOfPages as shortage:
                victim = self._youngest()
                others = (request for request, _ in self._queue.page_holders() if request is not branch.request)
                if victim is None or (victim is branch.request and not any(others)):
                    self._queue.fail(self._queue.ready, branch, branch.job, self._outgrown(shortage))
                else:
                    self._preempt(victim)
            else:
                return

    # -- preemption --------------------------------------------------------------------------------------------------

    def _youngest(self, apart_from: KVRequest | None = None) -> KVRequest | None:
        """Return the youngest request that holds pages and has nothing in flight."""
        able = [
            request
            for request, _ in self._queue.page_holders()
            if request is not apart_from and not any(branch.in_flight for branch in request.sequences())
        ]
        return max(able, key=lambda request: request.order, default=None)

    def _preempt(self, request: KVRequest) -> None:
        """Take all pages of a request, which recomputes them when it is admitted again."""
        self._memory.note_preemption(request.handle, request.slots)
        for branch in request.sequences():
            if branch.slot >= 0:
                self._evict(branch)

    def _evict(self, branch: Branch) -> None:
        """Take the pages of one branch."""
        self._loops.sync_log(branch)
        self._save(branch)
        self._memory.tables.release(branch.slot)
        branch.replay.clear()
        branch.is_evicted = branch.logged > 0
        branch.is_reserved = False
        branch.cached_tokens = 0
        if branch.forward is not None:
            branch.forward.restart()
        if branch.loop is not None:
            branch.loop.ready.clear()  # the log does not have these iterations
        if branch.is_decoding and branch.job is not None:
            self._queue.leave_decode(int(branch.job.key))
            self._queue.await_pages(branch)
        if branch.runs_candidates:
            self._queue.pending[branch.key] = branch
        if self._queue.in_flight:
            # Its last id may not have arrived; the log is complete once that step is collected.
            branch.in_flight += 1
            self._queue.in_flight[-1].held.append(branch)

    def _save(self, branch: Branch) -> None:
        """Copy the pages of a branch to the host if its log cannot recompute them."""
        if branch.saves_pages and branch.logged and branch.saved is None:
            branch.saved = self.saved_pages(branch)

    def saved_pages(self, branch: Branch) -> SavedPages:
        """Start copying the logged tokens of a branch to the host."""
        tables = self._memory.tables
        return self._runner.save_pages(tables.pages(branch.slot)[: tables.pool.pages_for(branch.logged)])

    def _restore(self, branch: Branch) -> None:
        """Write the saved pages of a branch into its new ones."""
        if branch.saved is None:
            return
        tables = self._memory.tables
        self._runner.restore_pages(branch.saved, tables.pages(branch.slot)[: tables.pool.pages_for(branch.logged)])
        tables.length[branch.slot] = branch.logged
        branch.saved, branch.is_evicted = None, False

    def _outgrown(self, shortage: OutOfPages) -> TooLarge:
        return TooLarge(
            f"the request outgrew the cache of node {self._spec.name}",
            shortage.detail,
            "lower the output limit or give the deployment more cache",
            node=self._spec.name,
        )

    def _copy(self, copies: list[PageCopy]) -> None:
        if copies:
            self._runner.copy_pages(copies)


def share_budget(passes: Sequence[tuple[int, bool]], budget: int) -> list[int]:
    """Divide a token budget among passes, oldest first. passes: (tokens, whether they must be computed whole).

    A whole pass larger than the budget may exceed it when it is the first, so that it runs at all.
    """
    counts = []
    left = budget
    for index, (tokens, is_whole) in enumerate(passes):
        if is_whole:
            count = tokens if tokens <= left or index == 0 else 0
        else:
            count = min(tokens, max(left, 0))
        left -= count
        counts.append(count)
    return counts


def _within(branches: list[Branch], most: int) -> list[Branch]:
    """Return the first branches whose passes have at most so many tokens together, but at least one."""
    total = 0
    for index, forward in enumerate(_current(branches)):
        total += forward.left
        if index and total > most:
            return branches[:index]
    return branches


def _current(branches: Iterable[Branch]) -> Iterator[ForwardPass]:
    for branch in branches:
        if branch.current is not None:
            yield branch.current
