"""The KV engine: a NodeRunner for nodes with a paged cache. Used by the worker's loop.

Rows of resident loops stay in flat arrays and run in every step; other jobs join as prefill pieces under the token
budget. Memory pressure is answered by recompute: the youngest request gives its pages back and its log is computed
again later, so that results equal an undisturbed run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from mstar_core.engine.attention import backend, make_pools
from mstar_core.engine.base import Done, Emission, Failed, Handle, LoopStep, MemoryUse, Pressure, StepResult
from mstar_core.engine.batching import Holder, Offer, share_budget, youngest
from mstar_core.engine.kv_intake import Intake
from mstar_core.engine.kv_loops import Loops
from mstar_core.engine.kv_sequence import Branch, Firing, Request
from mstar_core.engine.kv_step import DecodeRows, Faults, Part, Piece, StepRunner, decode_rows
from mstar_core.engine.page_table import PageCopy, PageTables
from mstar_core.engine.pages import OutOfPages, PagePool
from mstar_core.engine.prefix_cache import ContentChain, PrefixCache
from mstar_core.engine.slots import Slots
from mstar_core.errors import ConfigError, EngineError, MstarError, TooLarge

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job, Running, SamplingParams
    from mstar_core.engine.kv_view import KVModule
    from mstar_core.graph.nodes import NodeSpec


@dataclass(slots=True)
class KVRunning:
    """A step in flight. dropped: keys whose decode rows in it no longer count. fixed: branches that wait for it."""

    parts: list[Part]
    result: StepResult
    started: float
    dropped: set[int] = field(default_factory=set)
    fixed: list[Branch] = field(default_factory=list)


class KVCacheEngine:
    """Runs one KV node on one device. Owned by the worker; every call comes from its one thread."""

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        *,
        device: torch.device,
        dtype: torch.dtype,
        num_pages: int,
        page_size: int,
        max_slots: int,
        max_seq_len: int,
        vocab: int,
        token_budget: int,
        attention: str = "torch",
        lookahead: int = 0,
        prefix_cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
        faults: Faults | None = None,
    ) -> None:
        if spec.kv is None:
            raise ConfigError(f"node {spec.name} has no cache", hint="a KV_CACHE node declares KVSpec", key=spec.name)
        if max_slots < len(spec.kv.branches):
            raise ConfigError(
                f"node {spec.name} needs {len(spec.kv.branches)} slots per request, {max_slots} are configured",
                key="max_slots",
            )
        self.name = spec.name
        self._spec = spec
        self._branch_names = spec.kv.branches
        self._budget = token_budget
        self._lookahead = lookahead
        self._clock = clock
        self._pool = PagePool(num_pages, page_size)
        self._tables = PageTables(self._pool, max_slots, max_seq_len)
        self._cache = PrefixCache(self._pool) if prefix_cache else None
        self._slots = Slots(max_slots, max_seq_len, vocab if spec.sampling else 0, device)
        pools = make_pools(spec.kv, num_pages, page_size, dtype, device)
        self._runner = StepRunner(
            spec, module, backend(attention, pools, page_size), self._slots, self._tables,
            runs_ahead=lookahead > 0, faults=faults,
        )  # fmt: skip
        self._intake = Intake(spec, module, device, dtype)
        self._loops = Loops(self._slots, self._tables, self._intake, spec, vocab)
        self._requests: dict[Handle, Request] = {}
        self._pending: dict[tuple[int, str], Branch] = {}
        self._looping: dict[int, Branch] = {}
        self._active: dict[int, Branch] = {}
        self._decode: DecodeRows | None = None
        self._is_decode_current = True
        self._in_flight: list[KVRunning] = []
        self._ready = StepResult()
        self._opened = 0
        self._preempted = 0
        self._is_blocked = False
        self._decode_since = float("inf")

    # -- the worker's calls ------------------------------------------------------------------------------------------

    def open(self, handle: Handle, sampling: SamplingParams, max_tokens: int) -> None:
        """See NodeRunner. Raises TooLarge when the request could never fit, EngineError for a handle in use."""
        if handle in self._requests:
            raise EngineError(f"handle {handle} is already open at node {self.name}", node=self.name)
        limit = self._tables.max_tokens * len(self._branch_names)
        needed = self._pool.pages_for(max_tokens)
        if max_tokens > limit or needed > self._pool.total:
            raise TooLarge(
                f"the request can never fit the cache of node {self.name}",
                f"it may hold {max_tokens} tokens ({needed} pages); the pool has {self._pool.total} pages of "
                f"{self._pool.page_size}, a sequence at most {self._tables.max_tokens} tokens",
                "shorten the input, lower the output limit, or give the deployment more cache",
                value=max_tokens,
                allowed=min(limit, self._pool.total * self._pool.page_size),
            )
        self._opened += 1
        request = Request(handle, self._opened, sampling)
        for name in self._branch_names:
            request.branches[name] = Branch(request, name, ContentChain(self._pool.page_size))
        self._requests[handle] = request

    def submit(self, job: Job) -> None:
        """See NodeRunner. A job of a failed request is dropped: its first failure already ended it."""
        request = self._requests.get(job.handle)
        if request is None or request.is_failed:
            return
        branch = request.branches.get(job.branch)
        if branch is None:
            self._ready.failed.append(Failed(job=job, error=self._no_branch(job.branch)))
            return
        if not branch.has_work:
            branch.waiting_since = self._clock()
        branch.queue.append(job)
        self._pending[(request.order, branch.name)] = branch

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """See NodeRunner. A node without these branches has nothing to do. Raises EngineError for one that is busy."""
        request = self._requests.get(handle)
        if request is None or source not in request.branches or into not in request.branches:
            return
        old, new = request.branches[source], request.branches[into]
        if new.job is not None or old.is_decoding:
            raise EngineError(f"branch {into!r} cannot be forked from {source!r} while they run", node=self.name)
        if not request.slots or source == into:
            return
        self._tables.release(new.slot)
        self._slots.copy(old.slot, new.slot)
        new.log, new.logged, new.chain = list(old.log), old.logged, old.chain.copy()
        new.replay.clear()
        new.is_evicted = old.is_evicted or bool(old.replay) or old.job is not None
        if not new.is_evicted:
            self._tables.fork(old.slot, new.slot)
        new.is_evicted = new.is_evicted and new.logged > 0

    def close(self, handle: Handle) -> None:
        """See NodeRunner."""
        request = self._requests.pop(handle, None)
        if request is None:
            return
        for branch in request.branches.values():
            self._pending.pop((request.order, branch.name), None)
            self._stop_decoding(branch)
            if branch.slot >= 0:
                self._tables.release(branch.slot)
        self._slots.give_back(request.slots)
        self._is_blocked = False

    def pressure(self) -> Pressure:
        """See NodeRunner."""
        if len(self._in_flight) > self._lookahead:
            return Pressure(waiting=len(self._pending))
        waiting = ready = 0
        oldest = self._decode_since if self._active else float("inf")
        for branch in self._pending.values():
            if branch.in_flight or (self._is_blocked and not branch.is_reserved):
                waiting += 1
            else:
                ready += 1
                oldest = min(oldest, branch.waiting_since)
        ready += len(self._active) + len(self._ready.done) + len(self._ready.failed)
        return Pressure(ready=ready, waiting=waiting, oldest_s=oldest)

    def launch(self) -> KVRunning | None:
        """See NodeRunner."""
        if len(self._in_flight) > self._lookahead:
            return None
        started = self._clock()
        if self._active:
            self._grow_decode_rows()
        pieces = self._choose_pieces() if self._pending else []
        if not self._is_decode_current:
            self._remake_decode_rows()
        result, self._ready = self._ready, StepResult()
        running = KVRunning([], result, started)
        if self._decode is not None or pieces:
            self._run(running, pieces)
        elif not (result.done or result.failed or result.emissions):
            return None
        self._in_flight.append(running)
        return running

    def collect(self, running: Running) -> StepResult:
        """See NodeRunner. Steps must be collected in launch order."""
        assert isinstance(running, KVRunning) and self._in_flight and self._in_flight[0] is running
        self._in_flight.pop(0)
        result = running.result
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for part in running.parts:
            ids = part.host_ids.wait().numpy() if part.host_ids is not None else None
            if part.decode is not None:
                assert ids is not None
                self._collect_decode(running, part, ids, steps)
            for piece in part.pieces:
                self._collect_piece(result, part, piece, ids)
        for branch in running.fixed:
            branch.in_flight -= 1
        self._is_blocked = False
        if steps:
            keys, drawn = (
                steps[0] if len(steps) == 1 else (np.concatenate(column) for column in zip(*steps, strict=True))
            )
            result.loop = LoopStep(keys=keys, ids=drawn)
        if result.done or result.failed or result.emissions:
            result.done = [done for done in result.done if done.job.handle in self._requests]
            result.failed = [failed for failed in result.failed if failed.job.handle in self._requests]
            result.emissions = [item for item in result.emissions if item.job.handle in self._requests]
        result.duration_s = self._clock() - running.started
        return result

    def memory(self) -> MemoryUse:
        """See NodeRunner."""
        return MemoryUse(
            pages_total=self._pool.total,
            pages_used=self._pool.used,
            pages_cached=self._pool.cached,
            slots_total=self._slots.count,
            slots_used=self._slots.used,
            preempted=self._preempted,
        )

    # -- forming a step ----------------------------------------------------------------------------------------------

    def _choose_pieces(self) -> list[Piece]:
        """Start what can start, in order of age, and cut it to the token budget."""
        self._is_blocked = False
        chosen: list[Branch] = []
        for _, branch in sorted(self._pending.items()):
            if branch.in_flight or not self._has_slots(branch):
                continue
            if not self._start_next(branch):
                continue
            if branch.current is None and branch.is_reserved:
                self._join_decode(branch)
            elif branch.is_reserved or (not self._is_blocked and self._reserve(branch)):
                if branch.current is None:
                    self._join_decode(branch)
                else:
                    chosen.append(branch)
        offers = [Offer(tokens=f.left, must_be_whole=f.must_be_whole) for f in _currents(chosen)]
        budget = max(self._budget - len(self._active), self._pool.page_size)
        counts = share_budget(offers, budget)
        # A preemption during this choice may have taken pages back from a branch that was chosen before.
        return [self._piece(b, n) for b, n in zip(chosen, counts, strict=True) if n and b.is_reserved]

    def _piece(self, branch: Branch, count: int) -> Piece:
        firing = branch.current
        assert firing is not None
        piece = Piece(branch, firing, count, branch.job, is_last=count == firing.left)
        if not firing.is_replay and branch.job is not None:
            piece.wants = self._loops.wanted(branch.job)
            piece.samples = piece.is_last and branch.job.sample and self._spec.sampling is not None
        return piece

    def _has_slots(self, branch: Branch) -> bool:
        request = branch.request
        if request.slots:
            return True
        taken = None if self._is_blocked else self._slots.take(len(self._branch_names), request.sampling)
        if taken is None:
            self._is_blocked = True
            return False
        request.slots = taken
        for slot, each in zip(taken, request.branches.values(), strict=True):
            each.slot = slot
        return True

    def _start_next(self, branch: Branch) -> bool:
        """Start the next job of a branch that has none. False when nothing is left to do there."""
        while branch.job is None and branch.queue:
            job = branch.job = branch.queue.popleft()
            branch.is_reserved, branch.cached_tokens = False, 0
            try:
                ended = self._loops.start(branch, job)
            except Exception as error:  # noqa: BLE001 one job's inputs must not end the worker's turn
                self._fail(self._ready, branch, job, self._wrapped(error))
                return False
            if ended is not None:
                self._ready.done.append(ended)
                branch.request.held.update(ended.outputs)
                branch.job = None
            elif branch.is_decoding:
                self._looping[int(job.key)] = branch
        if branch.job is None:
            self._pending.pop((branch.request.order, branch.name), None)
            return False
        return True

    def _reserve(self, branch: Branch) -> bool:
        """Get the pages that the current work will fill, preempting others only for the oldest with work."""
        if branch.is_evicted and not branch.replay:
            self._loops.rebuild(branch)
        self._adopt_cached(branch)
        wanted = sum(firing.left for firing in branch.replay)
        if branch.firing is not None and branch.firing.attend.write:
            wanted += branch.firing.left
        wanted += branch.is_decoding
        if self._would_thrash(branch, wanted):
            self._is_blocked = True
            return False
        while True:
            try:
                self._copy(self._tables.ensure(branch.slot, wanted) if wanted else [])
            except OutOfPages as shortage:
                if not self._make_room(branch, shortage):
                    return False
            except TooLarge as error:
                assert branch.job is not None
                self._fail(self._ready, branch, branch.job, error)
                return False
            else:
                branch.is_reserved = True
                return True

    def _would_thrash(self, branch: Branch, wanted: int) -> bool:
        """Whether the rows that decode would soon take these pages back. The oldest with work is never held up."""
        if not self._active or branch.request.order == self._oldest_with_work():
            return False
        return self._pool.available < self._tables.missing(branch.slot, wanted) + len(self._active)

    def _make_room(self, branch: Branch, shortage: OutOfPages) -> bool:
        """Preempt one request for `branch`; False when it has to wait or has failed for good."""
        order = branch.request.order
        if order == self._oldest_with_work():
            victim = youngest(self._holders(), apart_from=order)
            if victim is not None:
                self._preempt(victim.order)
                return True
            if not self._in_flight and branch.job is not None:
                self._fail(self._ready, branch, branch.job, self._outgrown(shortage))
                return False
        self._is_blocked = True
        return False

    def _adopt_cached(self, branch: Branch) -> None:
        """Take over pages of the prefix cache at the start of an empty row."""
        row = branch.slot
        if self._cache is None or self._tables.count[row] or self._tables.length[row]:
            return
        tokens = sum(firing.tokens for firing in branch.replay)
        firing = branch.firing
        if firing is not None and branch.job is not None and firing.attend.write and not self._loops.wanted(branch.job):
            tokens += firing.tokens
        pages = self._cache.match(branch.chain.keys, tokens) if tokens else []
        if not pages:
            return
        self._tables.adopt(row, pages)
        skipped = len(pages) * self._pool.page_size
        while branch.replay and skipped >= branch.replay[0].tokens:
            skipped -= branch.replay.popleft().tokens
        if branch.replay:
            branch.replay[0].done = skipped
        elif skipped and firing is not None:
            firing.done = branch.cached_tokens = skipped
        if not branch.replay:
            branch.is_evicted = False

    def _join_decode(self, branch: Branch) -> None:
        self._pending.pop((branch.request.order, branch.name), None)
        assert branch.job is not None
        if not self._active:
            self._decode_since = self._clock()
        self._active[int(branch.job.key)] = branch
        self._is_decode_current = False

    def _grow_decode_rows(self) -> None:
        """Give a writable place to every looping row whose pages are full; pressure preempts the youngest."""
        if not self._is_decode_current:
            self._remake_decode_rows()
        decode = self._decode
        if decode is None:
            return
        full = self._tables.length[decode.slots] >= self._tables.capacity[decode.slots]
        if not full.any():
            return
        for index in np.nonzero(full)[0].tolist():
            self._grow(decode.branches[index])

    def _grow(self, branch: Branch) -> None:
        while branch.job is not None and int(branch.job.key) in self._active:
            try:
                self._copy(self._tables.ensure(branch.slot, 1))
            except OutOfPages as shortage:
                victim = youngest(self._holders())
                if victim is None:
                    self._fail(self._ready, branch, branch.job, self._outgrown(shortage))
                elif victim.order == branch.request.order and self._is_alone(branch.request):
                    self._fail(self._ready, branch, branch.job, self._outgrown(shortage))
                else:
                    self._preempt(victim.order)
            else:
                return

    def _remake_decode_rows(self) -> None:
        branches = sorted(self._active.values(), key=lambda branch: branch.request.order)
        self._decode = decode_rows(branches, self._slots) if branches else None
        self._is_decode_current = True

    # -- memory pressure ---------------------------------------------------------------------------------------------

    def _holders(self) -> Iterator[Holder]:
        for request in self._requests.values():
            if request.slots:
                pages = int(self._tables.count[request.slots].sum())
                fixed = any(branch.in_flight for branch in request.branches.values())
                yield Holder(order=request.order, pages=pages, is_fixed=fixed)

    def _is_alone(self, request: Request) -> bool:
        return all(holder.order == request.order or not holder.pages for holder in self._holders())

    def _oldest_with_work(self) -> int:
        busy = (r.order for r in self._requests.values() if any(b.has_work for b in r.branches.values()))
        return min(busy)

    def _preempt(self, order: int) -> None:
        """Take all pages of a request; its branches compute their logs again when they are next admitted."""
        request = next(request for request in self._requests.values() if request.order == order)
        self._preempted += 1
        for branch in request.branches.values():
            if branch.slot < 0:
                continue
            self._loops.sync_log(branch)
            self._tables.release(branch.slot)
            branch.replay.clear()
            branch.is_evicted = branch.logged > 0
            branch.is_reserved = False
            branch.cached_tokens = 0
            if branch.firing is not None:
                branch.firing.restart()
            if branch.is_decoding and branch.job is not None:
                if self._active.pop(int(branch.job.key), None) is not None:
                    self._is_decode_current = False
                self._pending[(order, branch.name)] = branch
                branch.waiting_since = self._clock()
            if self._in_flight:
                # Its last id may still be on the way; the log is complete once that step is collected.
                branch.in_flight += 1
                self._in_flight[-1].fixed.append(branch)

    def _copy(self, copies: list[PageCopy]) -> None:
        if copies:
            self._runner.copy_pages(copies)

    # -- after a forward ---------------------------------------------------------------------------------------------

    def _run(self, running: KVRunning, pieces: list[Piece]) -> None:
        """Run the step and, for fused loops, all their iterations."""
        decode, again = self._decode, pieces
        while decode is not None or again:
            parts = self._runner.run(decode, again)
            running.parts += parts
            for part in parts:
                self._account(running, part)
            going = [piece.branch for part in parts for piece in part.pieces if self._settle(running, part, piece)]
            # Every row is settled before pages are asked for: a preemption must not meet a half-settled one.
            again = [self._piece(b, b.firing.tokens) for b in going if b.firing is not None and self._reserve(b)]
            again = [piece for piece in again if piece.branch.is_reserved]
            decode = None

    def _account(self, running: KVRunning, part: Part) -> None:
        result = running.result
        count = len(part.decode.branches) if part.decode else 0
        result.rows += count + len(part.pieces)
        result.tokens += count + sum(piece.count for piece in part.pieces)
        for branch, error in part.failed:
            if branch.job is not None:
                self._fail(result, branch, branch.job, error)
        if part.decode is not None:
            self._decode_since = self._clock()
            if not part.left.all():
                for index in np.nonzero(part.left == 0)[0].tolist():
                    self._active.pop(int(part.decode.keys[index]), None)
                self._is_decode_current = False

    def _settle(self, running: KVRunning, part: Part, piece: Piece) -> bool:
        """Move a branch on after its piece. True when a fused loop goes on within this step."""
        branch, firing = piece.branch, piece.firing
        branch.waiting_since = self._clock()
        if not piece.is_last or branch.job is not piece.job:
            return False
        if firing.is_replay:
            branch.replay.popleft()
            branch.is_evicted = branch.is_evicted and bool(branch.replay)
            return False
        self._slots.next_position[branch.slot] = self._loops.position_after(branch, firing)
        if firing.attend.write:
            self._loops.log(branch, firing)
            if self._cache is not None:
                full = int(self._tables.length[branch.slot]) // self._pool.page_size
                self._cache.insert(branch.chain.keys[:full], self._tables.pages(branch.slot)[:full])
        if branch.loop is None:
            branch.firing = None
            branch.in_flight += 1
            running.fixed.append(branch)
            return False
        return self._iterate(running, part, piece)

    def _iterate(self, running: KVRunning, part: Part, piece: Piece) -> bool:
        """Carry a general loop's values over, or end it."""
        branch, job = piece.branch, piece.job
        assert job is not None and job.loop is not None
        drawn = part.ids[piece.sampled_at : piece.sampled_at + 1] if piece.samples and part.ids is not None else None
        try:
            emission, ended = self._loops.advance(branch, job, piece.firing, drawn)
        except Exception as error:  # noqa: BLE001 a module that leaves out a carried port fails its own request only
            self._fail(running.result, branch, job, self._wrapped(error))
            return False
        if emission is not None:
            running.result.emissions.append(emission)
        if ended is not None:
            running.result.done.append(ended)
            branch.request.held.update(ended.outputs)
            branch.job = branch.firing = branch.loop = None
            branch.in_flight += 1
            running.fixed.append(branch)
            return False
        branch.is_reserved = False
        return job.loop.fused

    # -- collecting --------------------------------------------------------------------------------------------------

    def _collect_decode(
        self, running: KVRunning, part: Part, ids: np.ndarray, steps: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        assert part.decode is not None
        rows, keys, left, place = part.decode.slots, part.decode.keys, part.left, part.place
        ids = ids[: len(rows)]
        kept = None
        if running.dropped:
            kept = ~np.isin(keys, list(running.dropped))
            rows, keys, left, place, ids = rows[kept], keys[kept], left[kept], place[kept], ids[kept]
        slots = self._slots
        slots.history[rows, place] = ids
        slots.last[rows] = ids
        stopped = (slots.stop_ids[rows] == ids[:, None]).any(axis=1)
        if part.outputs:
            self._report(running, part, kept, left)
        if stopped.any() or not left.all():
            bad = self._finish_rows(running.result, (keys, ids, left, stopped))
            if bad:
                good = ids >= 0
                keys, ids = keys[good], ids[good]
        if len(keys):
            steps.append((keys, ids))

    def _finish_rows(self, result: StepResult, rows: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> bool:
        """End the loops that stopped, ran out, or drew no valid id. True when there was one of the last kind."""
        keys, ids, left, stopped = rows
        has_bad = False
        for index in np.nonzero(stopped | (left == 0) | (ids < 0))[0].tolist():
            branch = self._looping[int(keys[index])]
            job = branch.job
            assert job is not None and branch.loop is not None
            iterations = branch.loop.limit - int(left[index])
            self._take_back(branch, int(keys[index]))
            if ids[index] < 0:
                has_bad = True
                self._fail(result, branch, job, self._no_id())
                continue
            reason = "stop" if stopped[index] else "length"
            outputs = self._loops.last_id(job, int(ids[index]))
            result.done.append(Done(job=job, outputs=outputs, reason=reason, iterations=iterations))
            self._slots.set_last(branch.slot, int(ids[index]))
            branch.request.held.update(outputs)
            self._loops.sync_log(branch)
            self._stop_decoding(branch)
            branch.job = branch.loop = None
            self._look_again(branch)
        return has_bad

    def _take_back(self, branch: Branch, key: int) -> None:
        """Undo what later steps in flight did for a loop that had already ended."""
        for later in self._in_flight:
            for part in later.parts:
                if part.decode is not None and key in part.decode.keys and key not in later.dropped:
                    later.dropped.add(key)
                    self._tables.truncate(branch.slot, 1)
                    self._slots.next_position[branch.slot] -= 1
                    self._slots.drawn[branch.slot] -= 1

    def _report(self, running: KVRunning, part: Part, kept: np.ndarray | None, left: np.ndarray) -> None:
        assert part.decode is not None
        at = 0
        for index, branch in enumerate(part.decode.branches):
            if kept is not None and not kept[index]:
                continue
            job, loop = branch.job, branch.loop
            if job is not None and loop is not None and job.loop is not None and job.loop.emit:
                values = {port: part.outputs[port][index : index + 1] for port in job.loop.emit if port in part.outputs}
                iteration = loop.limit - int(left[at]) - 1
                running.result.emissions.append(Emission(job=job, iteration=iteration, outputs=values))
            at += 1

    def _collect_piece(self, result: StepResult, part: Part, piece: Piece, ids: np.ndarray | None) -> None:
        branch, job = piece.branch, piece.job
        if (
            job is None
            or self._requests.get(job.handle) is not branch.request
            or not piece.samples
            and not piece.is_last
        ):
            return
        outputs = {port: _joined(chunks) for port, chunks in piece.firing.parts.items()}
        if piece.samples:
            assert ids is not None and part.ids is not None and self._spec.sampling is not None
            drawn = int(ids[piece.sampled_at])
            if drawn < 0:
                self._fail(result, branch, job, self._no_id())
                return
            self._slots.last[branch.slot] = drawn
            outputs[self._spec.sampling.port] = part.ids[piece.sampled_at : piece.sampled_at + 1]
        if piece.firing.is_replay or job.loop is not None or branch.job is not job:
            return
        result.done.append(Done(job=job, outputs=outputs, cached_tokens=branch.cached_tokens))
        branch.request.held.update(outputs)
        branch.job = None
        self._look_again(branch)

    def _look_again(self, branch: Branch) -> None:
        key = (branch.request.order, branch.name)
        if branch.queue:
            self._pending[key] = branch
            branch.waiting_since = self._clock()
        else:
            self._pending.pop(key, None)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _fail(self, result: StepResult, branch: Branch, job: Job, error: MstarError) -> None:
        """Fail a request: report the job, take its other work away, keep its memory until it is closed."""
        result.failed.append(Failed(job=job, error=error))
        request = branch.request
        request.is_failed = True
        for each in request.branches.values():
            self._pending.pop((request.order, each.name), None)
            self._stop_decoding(each)
            each.queue.clear()
            each.replay.clear()
            each.job = each.firing = each.loop = None
            if each.slot >= 0:
                self._tables.release(each.slot)
        self._is_blocked = False

    def _stop_decoding(self, branch: Branch) -> None:
        if not branch.is_decoding or branch.job is None:
            return
        key = int(branch.job.key)
        branch.is_decoding = False
        self._looping.pop(key, None)
        if self._active.pop(key, None) is not None:
            self._is_decode_current = False
        for running in self._in_flight:
            running.dropped.add(key)

    def _wrapped(self, error: Exception) -> MstarError:
        if isinstance(error, MstarError):
            return error
        return EngineError(f"node {self.name} cannot take this job", f"{type(error).__name__}: {error}", node=self.name)

    def _no_branch(self, name: str) -> EngineError:
        return EngineError(
            f"node {self.name} has no branch {name!r}", f"it has {', '.join(self._branch_names)}", node=self.name
        )

    def _no_id(self) -> EngineError:
        return EngineError(f"node {self.name} gave no finite logits for this request", node=self.name)

    def _outgrown(self, shortage: OutOfPages) -> TooLarge:
        return TooLarge(
            f"the request outgrew the cache of node {self.name}",
            shortage.detail,
            "lower the output limit or give the deployment more cache",
            node=self.name,
        )


def _currents(branches: list[Branch]) -> Iterator[Firing]:
    for branch in branches:
        if branch.current is not None:
            yield branch.current


def _joined(chunks: list[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
