"""Engine for nodes with a paged KV cache: a NodeRunner. Used by the worker's loop.

Sequences in resident loops stay in flat arrays and run in every step; other jobs join as prefill chunks within the
token budget. Under memory pressure the youngest request is preempted: its pages are freed and recomputed later from its
log, so results equal those of an undisturbed run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention import backend, make_pools
from mstar_core.engine.base import Done, Emission, Failed, Handle, LoopStep, MemoryUse, Pressure, StepResult
from mstar_core.engine.cache.page_pool import PagePool
from mstar_core.engine.cache.page_table import PageTables
from mstar_core.engine.cache.prefix_cache import ContentChain, PrefixCache
from mstar_core.engine.cache.slots import Slots
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache, GraphCounts
from mstar_core.engine.cuda_graphs.node import NodeGraphs
from mstar_core.engine.kv.batch import BatchOutput, ScheduledChunk
from mstar_core.engine.kv.candidates import Candidates
from mstar_core.engine.kv.inputs import InputProcessor
from mstar_core.engine.kv.loops import Loops
from mstar_core.engine.kv.model_runner import Faults, ModelRunner
from mstar_core.engine.kv.scheduler import Scheduler
from mstar_core.engine.kv.sequence import Branch, KVRequest
from mstar_core.engine.kv.state import KVState, KVStep, PendingCopy
from mstar_core.engine.transfers import HostCopy
from mstar_core.errors import ConfigError, EngineError, TooLarge

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Job, Running, SamplingParams
    from mstar_core.graph.spec.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

FUSED_TOKENS: Final = 65536
"""Tokens of one step beyond which fused loops go on in the next one, so that nobody waits for all of a long rollout."""


class KVCacheEngine:
    """Runs one KV node on one device. Owned by the worker; every call comes from its one thread.

    A module may name `host_outputs`: loop outputs that the engine copies to the host. `streamed_outputs` are copied
    only for iterations that the loop emits, not at its end. A step is done when its copies are.
    """

    def __init__(
        self, spec: NodeSpec, module: KVModule, *, device: torch.device, dtype: torch.dtype, num_pages: int,
        page_size: int, max_slots: int, max_seq_len: int, vocab: int, token_budget: int, attention: str = "torch",
        lookahead: int = 0, prefix_cache: bool = True, graphs: CaptureSizes | Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic, faults: Faults | None = None,
        report: Callable[[str, str], None] | None = None, captures: GraphCache | None = None,
        to_host: Callable[[Tensor], PendingCopy] = HostCopy,
    ) -> None:  # fmt: skip
        """report: told the phase (`kernels` or `capture`) and the step, for each step captured here.

        captures: the cache of captured steps; None: a new one. to_host: begins to copy a value to the host.
        """
        if spec.kv is None:
            raise ConfigError(f"node {spec.name} has no cache", hint="a KV_CACHE node declares KVSpec", key=spec.name)
        if max_slots < spec.kv.slots(requests=1):
            raise ConfigError(
                f"node {spec.name} needs {spec.kv.slots(requests=1)} slots for one request, {max_slots} are configured",
                f"{len(spec.kv.branches)} for each of one cache and {spec.kv.rows} rows",
                key="max_slots",
            )
        self.name = spec.name
        self._spec = spec
        self._branch_names = spec.kv.branches
        self._lookahead = lookahead
        self._to_host = to_host
        self._ended, self._told = (frozenset[str](getattr(module, n, ())) for n in ("host_outputs", "streamed_outputs"))
        self._opened = 0
        pool = PagePool(num_pages, page_size)
        tables = PageTables(pool, max_slots, max_seq_len)
        slots = Slots(max_slots, max_seq_len, vocab if spec.sampling else 0, device)
        cache = PrefixCache(pool) if prefix_cache else None
        attends = backend(attention, make_pools(spec.kv, num_pages, page_size, dtype, device), page_size)
        self._state = KVState(spec.name, pool, tables, cache, slots, clock)
        self._runner = ModelRunner(spec, module, attends, slots, tables, runs_ahead=lookahead > 0, faults=faults)
        sizes = graphs if isinstance(graphs, CaptureSizes) else CaptureSizes(decode=tuple(graphs))
        self._graphs: NodeGraphs | None = None
        if (sizes.decode or sizes.prefill) and (spec.capture_sizes or (spec.sampling is not None and vocab)):
            graph_cache = captures or GraphCache(device)
            graph_cache.name, graph_cache.report = spec.name, report
            made = self._graphs = NodeGraphs(
                spec, module, attends, slots, tables, id_port=self._runner.id_port, vocab=vocab,
                token_budget=token_budget, cache=graph_cache,
            )  # fmt: skip
            made.capture(sizes)
            self._runner.decode, self._runner.prefill, self._runner.passes = made.decode, made.prefill, made.passes
        intake = InputProcessor(spec, module, device, dtype)
        self._loops = Loops(slots, tables, intake, spec, vocab)
        self._rows = Candidates(spec, self._state, intake.on_device)
        self._scheduler = Scheduler(spec, self._state, self._loops, self._rows, self._runner, token_budget)

    # -- the worker's calls ------------------------------------------------------------------------------------------

    def open(self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1) -> None:
        """See NodeRunner. Raises TooLarge when the request could never fit, EngineError for a handle in use."""
        if handle in self._state.requests:
            raise EngineError(f"handle {handle} is already open at node {self.name}", node=self.name)
        self._rows.check(rows)
        limit = self._state.tables.max_tokens * len(self._branch_names) * rows
        needed = self._state.pool.pages_for(-(-max_tokens // rows)) * rows
        if max_tokens > limit or needed > self._state.pool.total:
            raise TooLarge(
                f"the request can never fit the cache of node {self.name}"
                + (f": {rows} candidates need {needed} pages of {self._state.pool.total}" if rows > 1 else ""),
                f"it may hold {max_tokens} tokens ({needed} pages); the pool has {self._state.pool.total} pages of "
                f"{self._state.pool.page_size}, a sequence at most {self._state.tables.max_tokens} tokens",
                ("shorten the input" if rows == 1 else "ask for less") + ", or give the deployment more cache",
                value=max_tokens,
                allowed=min(limit, self._state.pool.total * self._state.pool.page_size),
            )
        self._opened += 1
        request = KVRequest(handle, self._opened, sampling)
        for name in self._branch_names:
            request.branches[name] = Branch(request, name, ContentChain(self._state.pool.page_size))
        self._state.requests[handle] = request

    def submit(self, job: Job) -> None:
        """See NodeRunner. A job of a failed request is dropped: its first failure already ended it."""
        request = self._state.requests.get(job.handle)
        if request is None or request.is_failed:
            return
        branch = request.branches.get(job.branch)
        if branch is None:
            self._state.ready.failed.append(Failed(job=job, error=self._no_branch(job.branch)))
            return
        if not branch.has_work:
            branch.waiting_since = self._state.clock()
        branch.queue.append(job)
        self._state.pending[(request.order, branch.name)] = branch
        self._state.has_changed = True  # it may be older than those who wait, or hold what they wait for

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """See NodeRunner. A node without these branches has nothing to do. Raises EngineError for one that is busy."""
        request = self._state.requests.get(handle)
        if request is None or source not in request.branches or into not in request.branches:
            return
        old, new = request.branches[source], request.branches[into]
        if new.job is not None or old.is_decoding:
            raise EngineError(f"branch {into!r} cannot be forked from {source!r} while they run", node=self.name)
        if not request.slots or source == into:
            return
        self._state.tables.release(new.slot)
        self._state.slots.copy(old.slot, new.slot)
        new.log, new.logged, new.chain = list(old.log), old.logged, old.chain.copy()
        new.replay.clear()
        self._rows.drop(new)
        new.is_evicted = old.is_evicted or bool(old.replay) or old.job is not None
        if not new.is_evicted:
            self._state.tables.fork(old.slot, new.slot)
        new.is_evicted = new.is_evicted and new.logged > 0
        self._state.has_changed = True

    def close(self, handle: Handle) -> None:
        """See NodeRunner."""
        request = self._state.requests.pop(handle, None)
        if request is None:
            return
        for branch in request.sequences():
            self._state.pending.pop((request.order, branch.name), None)
            self._state.stop_decoding(branch)
            if branch.rows is not None:
                branch.rows.job = None
            if branch.slot >= 0:
                self._state.tables.release(branch.slot)
        self._state.slots.give_back(request.slots)
        self._state.has_changed = True

    def end_loops(self, handle: Handle) -> None:
        """See EndsLoops."""
        request = self._state.requests.get(handle)
        if request is None or request.is_failed:
            return
        for branch in request.branches.values():
            if branch.rows is not None and branch.rows.is_for_loop and branch.rows.job is None:
                self._rows.drop(branch)
        for branch in request.sequences():
            if not branch.has_work:
                self._loops.drop(branch)
        self._state.has_changed = True

    def pressure(self) -> Pressure:
        """See NodeRunner."""
        if len(self._state.in_flight) > self._lookahead:
            return Pressure(waiting=len(self._state.pending))
        waiting = ready = 0
        oldest = self._state.decode_since if self._state.active else float("inf")
        for branch in self._state.pending.values():
            if self._state.waits(branch):
                waiting += 1
            else:
                ready += 1
                oldest = min(oldest, branch.waiting_since)
        ready += len(self._state.active) + len(self._state.ready.done) + len(self._state.ready.failed)
        return Pressure(ready=ready, waiting=waiting, oldest_s=oldest)

    def launch(self) -> KVStep | None:
        """See NodeRunner."""
        if len(self._state.in_flight) > self._lookahead:
            return None
        started = self._state.clock()
        if self._state.active:
            self._scheduler.grow_decode_rows()
        chunks = self._scheduler.schedule_chunks() if self._state.pending else []
        if not self._state.is_decode_current:
            self._scheduler.remake_decode_rows()
        result, self._state.ready = self._state.ready, StepResult()
        running = KVStep([], result, started)
        if self._state.decode is not None or chunks:
            self._run(running, chunks)
            running.bring(self._ended, self._told, self._to_host)
        elif not (result.done or result.failed or result.emissions):
            return None
        self._state.in_flight.append(running)
        return running

    def is_done(self, running: Running) -> bool:
        """See NodeRunner."""
        assert isinstance(running, KVStep)
        return running.is_done

    def collect(self, running: Running) -> StepResult:
        """See NodeRunner. Steps must be collected in launch order."""
        assert isinstance(running, KVStep) and self._state.in_flight and self._state.in_flight[0] is running
        self._state.in_flight.pop(0)
        for arriving in running.arriving:
            arriving.wait()
        result = running.result
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for out in running.batches:
            ids = out.host_ids.wait().numpy() if out.host_ids is not None else None
            if out.decode is not None:
                assert ids is not None
                self._collect_decode(running, out, ids, steps)
            for chunk in out.chunks:
                self._collect_chunk(result, out, chunk, ids)
        for branch in running.fixed:
            branch.in_flight -= 1
            if not branch.has_work:  # a general loop ended: nothing is ready here until a job comes
                self._state.pending.pop((branch.request.order, branch.name), None)
        self._state.has_changed = True
        if steps:
            keys, drawn = (
                steps[0] if len(steps) == 1 else (np.concatenate(column) for column in zip(*steps, strict=True))
            )
            result.loop = LoopStep(keys=keys, ids=drawn)
        if result.done or result.failed or result.emissions:
            with torch.inference_mode():
                self._rows.gather(result)
            result.done = [done for done in result.done if done.job.handle in self._state.requests]
            result.failed = [failed for failed in result.failed if failed.job.handle in self._state.requests]
            result.emissions = [item for item in result.emissions if item.job.handle in self._state.requests]
        result.duration_s = self._state.clock() - running.started
        return result

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Hits and misses of captured steps; None where nothing is captured."""
        return self._graphs.cache.counts if self._graphs is not None else None

    def idle(self) -> bool:
        """See WorksWhenIdle: captures the next bucket that is still missing."""
        assert not self._state.in_flight, "a busy engine does not capture"
        return self._graphs is not None and self._graphs.idle()

    def compile_later(self) -> None:
        """See CompilesLater."""
        if self._graphs is not None:
            self._graphs.warm_up()

    def counters(self) -> dict[str, float]:
        """See Counted and GraphCounts; empty if nothing is captured."""
        return self._graphs.cache.counts.as_counters() if self._graphs is not None else {}

    def memory(self) -> MemoryUse:
        """See NodeRunner."""
        return MemoryUse(
            pages_total=self._state.pool.total,
            pages_used=self._state.pool.used,
            pages_cached=self._state.pool.cached,
            slots_total=self._state.slots.count,
            slots_used=self._state.slots.used,
            preempted=self._state.preempted,
            preempted_pages=self._state.preempted_pages,
            last_preempted=self._state.last_preempted,
        )

    def held(self) -> dict[Handle, tuple[int, str]]:
        """See HoldsPages."""
        return self._state.held()

    # -- after a forward ---------------------------------------------------------------------------------------------

    def _run(self, running: KVStep, chunks: list[ScheduledChunk]) -> None:
        """Run the step and, for fused loops, all their iterations."""
        decode, again = self._state.decode, chunks
        while decode is not None or again:
            self._scheduler.look_ahead(again)
            outs = self._runner.run(decode, again)
            running.batches += outs
            for out in outs:
                self._account(running, out)
            going = [chunk.branch for out in outs for chunk in out.chunks if self._settle(running, out, chunk)]
            # Every row is settled before pages are asked for: a preemption must not meet a half-settled one.
            again = [
                self._scheduler.chunk(b, b.forward.tokens)
                for b in going
                if b.forward is not None and self._scheduler.reserve(b)
            ]
            again = [chunk for chunk in again if chunk.branch.is_reserved]
            decode = None

    def _account(self, running: KVStep, out: BatchOutput) -> None:
        result = running.result
        count = len(out.decode.branches) if out.decode else 0
        result.rows += count + len(out.chunks)
        result.tokens += count + sum(chunk.computed for chunk in out.chunks)
        for branch, error in out.failed:
            if branch.job is not None:
                self._state.fail(result, branch, branch.job, error)
        if out.decode is not None:
            self._state.decode_since = self._state.clock()
            if np.count_nonzero(out.left) < count:
                for index in np.nonzero(out.left == 0)[0].tolist():
                    self._state.active.pop(int(out.decode.keys[index]), None)
                self._state.is_decode_current = False

    def _settle(self, running: KVStep, out: BatchOutput, chunk: ScheduledChunk) -> bool:
        """Move a branch on after its chunk. True when a fused loop goes on within this step."""
        branch, forward = chunk.branch, chunk.forward
        branch.waiting_since = self._state.clock()
        if not chunk.is_last or branch.job is not chunk.job:
            return False
        if forward.is_replay:
            branch.replay.popleft()
            branch.is_evicted = branch.is_evicted and bool(branch.replay)
            return False
        self._state.slots.next_position[branch.slot] = self._loops.position_after(branch, forward)
        if forward.attend.write:
            self._loops.log(branch, forward)
            if self._state.cache is not None and branch.chain.keys:
                full = int(self._state.tables.length[branch.slot]) // self._state.pool.page_size
                self._state.cache.insert(branch.chain.keys[:full], self._state.tables.pages(branch.slot)[:full])
        if branch.loop is None:
            branch.forward = None
            branch.in_flight += 1
            running.fixed.append(branch)
            return False
        return self._iterate(running, out, chunk)

    def _iterate(self, running: KVStep, out: BatchOutput, chunk: ScheduledChunk) -> bool:
        """Carry a general loop's values over, or end it."""
        branch, job = chunk.branch, chunk.job
        assert job is not None and job.loop is not None and branch.loop is not None
        branch.loop.iteration += chunk.iterations - 1
        drawn = out.ids[chunk.sampled_at : chunk.sampled_at + 1] if chunk.samples and out.ids is not None else None
        try:
            emission, ended = self._loops.advance(branch, job, chunk.forward, drawn)
        except Exception as error:  # noqa: BLE001 a module that leaves out a carried port fails its own request only
            self._state.fail(running.result, branch, job, self._state.wrapped(error))
            return False
        if emission is not None:
            running.result.emissions.append(emission)
        if ended is not None:
            running.result.done.append(ended)
            self._state.hold(branch, ended.outputs)
            branch.job = branch.forward = branch.loop = None
            branch.in_flight += 1
            running.fixed.append(branch)
            return False
        branch.is_reserved = False
        # What is computed already is settled at once: who comes meanwhile runs beside the iteration behind it.
        if branch.loop.ready:
            return True
        return job.loop.fused and not job.loop.emit and running.result.tokens < FUSED_TOKENS

    # -- collecting --------------------------------------------------------------------------------------------------

    def _collect_decode(
        self, running: KVStep, out: BatchOutput, ids: np.ndarray, steps: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        assert out.decode is not None
        rows, keys, left, place = out.decode.slots, out.decode.keys, out.left, out.place
        ids = ids[: len(rows)]
        kept = None
        if running.dropped:
            kept = ~np.isin(keys, list(running.dropped))
            rows, keys, left, place, ids = rows[kept], keys[kept], left[kept], place[kept], ids[kept]
        slots = self._state.slots
        slots.history[rows, place] = ids
        slots.last[rows] = ids
        # count_nonzero: the cheapest question numpy answers; rows are looked at only when something ended.
        hits = slots.stop_ids[rows] == ids[:, None]
        if out.outputs:
            self._report(running, out, kept, left)
        if np.count_nonzero(hits) or np.count_nonzero(left) < len(left):
            bad = self._finish_rows(running.result, (keys, ids, left, hits.any(axis=1)))
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
            branch = self._state.looping[int(keys[index])]
            job = branch.job
            assert job is not None and branch.loop is not None
            iterations = branch.loop.limit - int(left[index])
            self._take_back(branch, int(keys[index]))
            if ids[index] < 0:
                has_bad = True
                self._state.fail(result, branch, job, self._state.no_id())
                continue
            reason = "stop" if stopped[index] else "length"
            outputs = self._loops.last_id(job, int(ids[index]))
            result.done.append(Done(job=job, outputs=outputs, reason=reason, iterations=iterations))
            self._state.slots.set_last(branch.slot, int(ids[index]))
            branch.request.held.update(outputs)
            self._loops.sync_log(branch)
            self._state.stop_decoding(branch)
            branch.job = branch.loop = None
            self._state.look_again(branch)
        return has_bad

    def _take_back(self, branch: Branch, key: int) -> None:
        """Undo what later steps in flight did for a loop that had already ended."""
        for later in self._state.in_flight:
            for out in later.batches:
                if out.decode is not None and key in out.decode.keys and key not in later.dropped:
                    later.dropped.add(key)
                    self._state.tables.truncate(branch.slot, 1)
                    self._state.slots.next_position[branch.slot] -= 1
                    self._state.slots.drawn[branch.slot] -= 1

    def _report(self, running: KVStep, out: BatchOutput, kept: np.ndarray | None, left: np.ndarray) -> None:
        assert out.decode is not None
        at = 0
        for index, branch in enumerate(out.decode.branches):
            if kept is not None and not kept[index]:
                continue
            job, loop = branch.job, branch.loop
            if job is not None and loop is not None and job.loop is not None and job.loop.emit:
                values = {port: out.outputs[port][index : index + 1] for port in job.loop.emit if port in out.outputs}
                iteration = loop.limit - int(left[at]) - 1
                running.result.emissions.append(Emission(job=job, iteration=iteration, outputs=values))
            at += 1

    def _collect_chunk(
        self, result: StepResult, out: BatchOutput, chunk: ScheduledChunk, ids: np.ndarray | None
    ) -> None:
        branch, job = chunk.branch, chunk.job
        if (
            job is None
            or self._state.requests.get(job.handle) is not branch.request
            or not chunk.samples
            and not chunk.is_last
        ):
            return
        by_port = chunk.forward.chunk_outputs.items()
        outputs = {port: values[0] if len(values) == 1 else torch.cat(values) for port, values in by_port}
        if chunk.samples:
            assert ids is not None and out.ids is not None and self._spec.sampling is not None
            drawn = int(ids[chunk.sampled_at])
            if drawn < 0:
                self._state.fail(result, branch, job, self._state.no_id())
                return
            if branch.slot >= 0:  # a row may have been freed
                self._state.slots.last[branch.slot] = drawn
            # On the host, where it is known: whoever asks a GPU for it again waits for the steps launched since.
            outputs[self._spec.sampling.port] = torch.tensor([drawn], dtype=torch.int64)
        if chunk.forward.is_replay or job.loop is not None or branch.job is not job:
            return
        result.done.append(Done(job=job, outputs=outputs, cached_tokens=branch.cached_tokens))
        self._state.hold(branch, outputs)
        branch.job = None
        self._state.look_again(branch)

    def _no_branch(self, name: str) -> EngineError:
        return EngineError(
            f"node {self.name} has no branch {name!r}", f"it has {', '.join(self._branch_names)}", node=self.name
        )
