"""Engine for nodes with a paged KV cache: a NodeRunner. Used by the worker's loop.

Sequences in resident loops stay in flat arrays and run in every step; other jobs join as prefill chunks within the
token budget. Under memory pressure the youngest request is preempted: its pages are freed and recomputed later from its
log, so results equal those of an undisturbed run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention import backend, make_pools
from mstar_core.engine.base import Done, Emission, Failed, Handle, LoopStep, MemoryUse, Pressure, StepResult
from mstar_core.engine.cache.loop_rows import LoopRows
from mstar_core.engine.cache.memory import KVMemory
from mstar_core.engine.cache.page_pool import PagePool
from mstar_core.engine.cache.page_table import PageTables
from mstar_core.engine.cache.prefix_cache import ContentChain, PrefixCache
from mstar_core.engine.cache.saved_pages import PageStore
from mstar_core.engine.cache.slots import Slots
from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache, GraphCounts
from mstar_core.engine.cuda_graphs.compilation import compile_in_parallel
from mstar_core.engine.cuda_graphs.node import NodeGraphs
from mstar_core.engine.kv.batch import BatchOutput, DecodeBatch, HostTransfer, KVStep, ScheduledChunk
from mstar_core.engine.kv.candidates import Candidates
from mstar_core.engine.kv.device_share import IMAGE, TEXT, DeviceShare, device_share
from mstar_core.engine.kv.follower import NodeFollower
from mstar_core.engine.kv.inputs import InputProcessor, position_dtype
from mstar_core.engine.kv.loops import Loops
from mstar_core.engine.kv.mirror import LeaderMirror
from mstar_core.engine.kv.model_runner import Faults, ModelRunner, fixed_ranks
from mstar_core.engine.kv.queue import RequestQueue
from mstar_core.engine.kv.scheduler import Scheduler
from mstar_core.engine.kv.sequence import Branch, KVRequest
from mstar_core.engine.module import node_module
from mstar_core.engine.runner import NodeRunner
from mstar_core.engine.transfers import HostCopy
from mstar_core.errors import ConfigError, EngineError, TooLarge
from mstar_core.graph.declare.sampling import check_biased

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.base import Job, JobKey, SamplingParams
    from mstar_core.engine.cache.feeds import Feeds
    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_core.engine.runner import Running
    from mstar_core.graph.compile.resident import LoopPorts
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule
    from mstar_core.parallel.collectives import TorchCollectives
    from mstar_core.parallel.link import PlanSender

FUSED_TOKENS: Final = 65536
"""Tokens of one step after which fused loops continue in the next one, so that a long rollout delays no other node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSettings:
    """Sizes and options of one KV node on one device.

    num_pages, page_size, max_slots: of its cache; max_seq_len: most tokens of a sequence. vocab: ids that it can draw,
    0 without sampling. token_budget: of a step. attention: name of a backend. lookahead: steps that may be launched
    before an earlier one is collected. image_share: see DeviceShare. graphs: sizes of the steps to capture. loop:
    ports per sequence of the node's resident loop, see `graph.compile.resident`; None if it carries only its sampled
    id.
    """

    device: torch.device
    dtype: torch.dtype
    num_pages: int
    page_size: int
    max_slots: int
    max_seq_len: int
    vocab: int
    token_budget: int
    attention: str = "torch"
    lookahead: int = 0
    image_share: float = 0.5
    prefix_cache: bool = True
    graphs: CaptureSizes = field(default_factory=CaptureSizes)
    loop: LoopPorts | None = None


class KVCacheEngine(NodeRunner):
    """Runs one KV node on one device. A step is done when its copies of `host_outputs` are, see NodeModule."""

    has_cache = True

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        settings: KVSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        faults: Faults | None = None,
        report: Callable[[str, str], None] | None = None,
        captures: GraphCache | None = None,
        to_host: Callable[[Tensor], HostTransfer] = HostCopy,
        is_captured: bool = True,
        share: DeviceShare | None = None,
    ) -> None:
        """report: called with the phase (`kernels` or `capture`) and the step, for each step captured here.

        captures: the cache of captured steps, by default a new one. to_host: starts a copy to the host. is_captured:
        False leaves it to the caller to call `capture`, for instance after the kernels of several nodes are compiled.
        share: divides device time between image passes and text; by default by `image_share`, for this device.
        """
        _check(spec, settings)
        assert spec.kv is not None
        self.name = spec.name
        self._spec = spec
        self._lookahead = settings.lookahead
        self._to_host = to_host
        self._host_outputs = frozenset(node_module(module).host_outputs)
        self._streamed_outputs = frozenset(node_module(module).streamed_outputs)
        self._fixed_ranks = fixed_ranks(spec)
        self._opened = 0
        self._collected = 0.0
        device, dtype, vocab = settings.device, settings.dtype, settings.vocab
        pool = PagePool(settings.num_pages, settings.page_size)
        self._memory = memory = KVMemory(
            pool,
            PageTables(pool, settings.max_slots, settings.max_seq_len),
            Slots(
                settings.max_slots, settings.max_seq_len, vocab if spec.sampling else 0, device, position_dtype(spec)
            ),
            PrefixCache(pool) if settings.prefix_cache else None,
        )
        if settings.loop is not None:
            memory.rows = LoopRows(spec, settings.loop, memory.slots, dtype, settings.max_seq_len + 1)
        pools = make_pools(spec.kv, settings.num_pages, settings.page_size, dtype, device)
        attention = self._attention = backend(settings.attention, pools, settings.page_size)
        self._store = PageStore(pools)
        self._runner = ModelRunner(
            spec, module, attention, memory, self._store, runs_ahead=settings.lookahead > 0, faults=faults
        )
        self._sizes = settings.graphs
        self._graphs = self._prepare_graphs(module, attention, settings, captures, report)
        inputs = InputProcessor(spec, module, device, dtype)
        self._queue = RequestQueue(spec.name, memory, clock)
        self._loops = Loops(spec, memory, inputs, vocab)
        self._candidates = Candidates(spec, self._queue, inputs.on_device)
        self._share = share or device_share(settings.image_share, device, clock)
        self._scheduler = Scheduler(
            spec, self._queue, self._loops, self._candidates, self._runner, settings.token_budget, self._share
        )
        if is_captured and self._graphs is not None:
            if device.type == "cuda":
                compile_in_parallel(self.trace, f"node {self.name}")
            self.capture()

    def _prepare_graphs(
        self,
        module: KVModule,
        attention: AttentionBackend,
        settings: KVSettings,
        captures: GraphCache | None,
        report: Callable[[str, str], None] | None,
    ) -> NodeGraphs | None:
        """Make the node's captured steps, of which there are none yet, and give them to the runner."""
        spec, sizes = self._spec, settings.graphs
        draws = spec.sampling is not None and settings.vocab > 0
        if not (sizes.decode or sizes.prefill) or not (spec.hints.capture_sizes or draws):
            return None
        cache = captures or GraphCache(settings.device)
        cache.name, cache.report = spec.name, report
        graphs = NodeGraphs(
            spec,
            module,
            attention,
            self._memory.slots,
            self._memory.tables,
            id_port=self._runner.id_port,
            vocab=settings.vocab,
            token_budget=settings.token_budget,
            cache=cache,
            rows=self._memory.rows,
        )
        self._runner.decode, self._runner.prefill, self._runner.passes = graphs.decode, graphs.prefill, graphs.passes
        self._runner.prompts = graphs.prompts
        return graphs

    # -- before the first request ------------------------------------------------------------------------------------

    def trace(self, compiling: Compiling) -> None:
        """See NodeRunner: goes through the steps that `capture` captures."""
        if self._graphs is not None:
            self._graphs.trace(self._sizes, compiling)

    def capture(self) -> None:
        """Capture the steps of the settings. Raises StartError if memory is short for all sizes of a kind."""
        if self._graphs is not None:
            self._graphs.capture(self._sizes)

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes: those of steps that were only traced hold no values."""
        self._memory.pool.evict_cached()

    # -- tensor parallelism ------------------------------------------------------------------------------------------

    def lead(self, sender: PlanSender, collectives: TorchCollectives, size: int) -> None:
        """Publish every change of this node's device state to the followers of a group of `size` ranks."""
        mirror = self._runner.mirror = LeaderMirror(self.name, self._memory, sender, collectives, size)
        if self._graphs is not None:
            self._graphs.cache.mirror = mirror

    def follower(self, collectives: TorchCollectives) -> NodeFollower:
        """Return the executor of a leader's plans on this node, whose own queue then stays empty."""
        return NodeFollower(self._runner, self._memory, self._attention, self._store, collectives, self._graphs)

    # -- the worker's calls ------------------------------------------------------------------------------------------

    def open(self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1) -> None:
        """See NodeRunner. Raises TooLarge when the request could never fit, EngineError for a handle in use."""
        if handle in self._queue.requests:
            raise EngineError(f"handle {handle} is already open at node {self.name}", node=self.name)
        assert self._spec.kv is not None
        if sampling.logit_bias:
            check_biased(sampling.logit_bias, self._memory.slots.vocab)
        self._candidates.check_count(rows)
        names, pool, tables = self._spec.kv.branches, self._memory.pool, self._memory.tables
        limit = tables.max_tokens * len(names) * rows
        needed = pool.pages_for(-(-max_tokens // rows)) * rows
        if max_tokens > limit or needed > pool.total:
            raise TooLarge(
                f"the request can never fit the cache of node {self.name}"
                + (f": {rows} candidates need {needed} pages of {pool.total}" if rows > 1 else ""),
                f"it may hold {max_tokens} tokens ({needed} pages); the pool has {pool.total} pages of "
                f"{pool.page_size}, a sequence at most {tables.max_tokens} tokens",
                ("shorten the input" if rows == 1 else "ask for less") + ", or give the deployment more cache",
                value=max_tokens,
                allowed=min(limit, pool.total * pool.page_size),
            )
        self._opened += 1
        request = KVRequest(handle, self._opened, sampling)
        for name in names:
            request.branches[name] = Branch(request, name, ContentChain(pool.page_size))
        self._queue.requests[handle] = request

    def submit(self, job: Job) -> None:
        """See NodeRunner. A job of a failed request is dropped: its first failure has already ended it."""
        request = self._queue.requests.get(job.handle)
        if request is None or request.is_failed:
            return
        branch = request.branches.get(job.branch)
        if branch is None:
            error = EngineError(
                f"node {self.name} has no branch {job.branch!r}",
                f"it has {', '.join(request.branches)}",
                node=self.name,
            )
            self._queue.ready.failed.append(Failed(job=job, error=error))
            return
        if not branch.has_work:
            branch.waiting_since = self._queue.clock()
        if job.loop is not None and job.loop.feed is not None and self._memory.feeds is not None:
            is_empty = job.loop.after_end == "empty"
            self._memory.feeds.open(int(job.key), int(job.handle), empty_after_end=is_empty)
        branch.queue.append(job)
        self._queue.pending[branch.key] = branch
        self._queue.has_changed = True  # it may be older than those that wait

    def feed(self, key: JobKey, ids: Sequence[int], ended: bool) -> None:
        """See NodeRunner."""
        queue, feeds, number = self._queue, self._memory.feeds, int(key)
        if feeds is None:
            return
        feeds.add(number, ids, ended=ended)
        branch = queue.starving.get(number)
        if branch is None:
            return
        if not feeds.is_dry(branch.slot):
            queue.wake(branch)
        elif ended:
            self._end_with_stream(queue.ready)

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """See NodeRunner. Does nothing at a node without these branches. Raises EngineError for a busy one."""
        request = self._queue.requests.get(handle)
        if request is None or source not in request.branches or into not in request.branches:
            return
        old, new = request.branches[source], request.branches[into]
        if new.job is not None or old.is_decoding:
            raise EngineError(f"branch {into!r} cannot be forked from {source!r} while they run", node=self.name)
        if not request.slots or source == into:
            return
        self._memory.tables.release(new.slot)
        self._memory.slots.copy(old.slot, new.slot)
        new.log, new.logged, new.chain = list(old.log), old.logged, old.chain.copy()
        new.replay.clear()
        self._candidates.free(new)
        is_incomplete = old.is_evicted or bool(old.replay) or old.job is not None
        if not is_incomplete:
            self._memory.tables.fork(old.slot, new.slot)
        new.is_evicted = is_incomplete and new.logged > 0
        new.saves_pages, new.saved = old.saves_pages, old.saved
        if new.is_evicted and new.saves_pages and new.saved is None:
            new.saved = self._scheduler.saved_pages(old)
        self._queue.has_changed = True

    def holds(self, handle: Handle, branch: str) -> bool:
        """See NodeRunner."""
        request = self._queue.requests.get(handle)
        found = None if request is None else request.branches.get(branch)
        return found is not None and (found.has_work or found.logged > 0)

    def close(self, handle: Handle) -> None:
        """See NodeRunner."""
        request = self._queue.requests.pop(handle, None)
        if request is None:
            return
        for branch in request.sequences():
            self._queue.remove(branch)
            self._queue.stop_decoding(branch)
            if branch.candidates is not None:
                branch.candidates.job = None
            if branch.slot >= 0:
                self._memory.tables.release(branch.slot)
        self._memory.slots.give_back(request.slots)
        if self._memory.feeds is not None:
            self._memory.feeds.forget(int(handle))
        self._queue.has_changed = True

    def end_loops(self, handle: Handle) -> None:
        """See NodeRunner."""
        request = self._queue.requests.get(handle)
        if request is None or request.is_failed:
            return
        for branch in request.branches.values():
            group = branch.candidates
            if group is not None and group.is_for_loop and group.job is None:
                self._candidates.free(branch)
        for branch in request.sequences():
            if not branch.has_work:
                self._loops.roll_back(branch)
        self._queue.has_changed = True

    def pressure(self) -> Pressure:
        """See NodeRunner."""
        queue = self._queue
        if len(queue.in_flight) > self._lookahead:
            return Pressure(waiting=len(queue.pending))
        waiting = ready = 0
        oldest = queue.decode_since if queue.active else float("inf")
        for branch in queue.pending.values():
            if queue.is_waiting(branch):
                waiting += 1
            else:
                ready += 1
                oldest = min(oldest, branch.waiting_since)
        ready += len(queue.active) + len(queue.ready.done) + len(queue.ready.failed)
        return Pressure(ready=ready, waiting=waiting, oldest_s=oldest)

    def launch(self) -> KVStep | None:
        """See NodeRunner."""
        queue = self._queue
        if len(queue.in_flight) > self._lookahead:
            return None
        started = queue.clock()
        if queue.active:
            self._scheduler.grow_decode_batch()
        self._share.turn = TEXT
        chunks = self._scheduler.schedule_chunks() if queue.pending else []
        if queue.starving:
            self._end_with_stream(queue.ready)
        decode = queue.decode if queue.is_decode_current else queue.current_decode()
        if self._share.turn != TEXT:
            decode = None
        result, queue.ready = queue.ready, StepResult()
        step = KVStep([], result, started)
        if decode is not None or chunks:
            self._run_timed(step, decode, chunks)
            step.copy_to_host(self._host_outputs, self._streamed_outputs, self._to_host)
        elif not (result.done or result.failed or result.emissions):
            return None
        queue.in_flight.append(step)
        return step

    def is_done(self, running: Running) -> bool:
        """See NodeRunner."""
        assert isinstance(running, KVStep)
        return running.is_done

    def collect(self, running: Running) -> StepResult:
        """See NodeRunner. Steps must be collected in launch order."""
        queue = self._queue
        assert isinstance(running, KVStep) and queue.in_flight and queue.in_flight[0] is running
        queue.in_flight.pop(0)
        if running.timed is not None:
            self._share.collected(running.timed)
        for copy in running.copies:
            copy.wait()
        result = running.result
        steps: list[tuple[np.ndarray, np.ndarray]] = []
        for out in running.batches:
            ids = out.host_ids.wait().numpy() if out.host_ids is not None else None
            if out.decode is not None:
                assert ids is not None
                self._collect_decode(running, out, ids, steps)
            for chunk in out.chunks:
                self._collect_chunk(result, out, chunk, ids)
        if queue.starving:
            self._end_with_stream(result)
        for branch in running.held:
            branch.in_flight -= 1
            if not branch.has_work:  # a general loop has ended, and no job follows yet
                queue.remove(branch)
        queue.has_changed = True
        if steps:
            keys, drawn = (
                steps[0] if len(steps) == 1 else (np.concatenate(column) for column in zip(*steps, strict=True))
            )
            result.loop = LoopStep(keys=keys, ids=drawn)
        if result.done or result.failed or result.emissions:
            with torch.inference_mode():
                self._candidates.merge(result)
            result.drop_closed(queue.requests)
        now = queue.clock()
        result.duration_s = now - max(running.started, self._collected)
        self._collected = now
        if running.timed is not None and running.timed.is_over:
            result.duration_s = running.timed.seconds or 0.0
        return result

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Hits and misses of captured steps; None where nothing is captured."""
        return self._graphs.cache.counts if self._graphs is not None else None

    def idle(self) -> bool:
        """See NodeRunner: captures the next queued bucket."""
        assert not self._queue.in_flight, "a busy engine does not capture"
        return self._graphs is not None and self._graphs.idle()

    def compile_later(self) -> None:
        """See NodeRunner."""
        if self._graphs is not None:
            self._graphs.warm_up()

    def counters(self) -> dict[str, float]:
        """See NodeRunner and GraphCounts; empty where nothing is captured."""
        return self._graphs.cache.counts.as_counters() if self._graphs is not None else {}

    def memory(self) -> MemoryUse:
        """See NodeRunner."""
        return self._memory.use()

    def pages_and_waits(self) -> dict[Handle, tuple[int, str]]:
        """See NodeRunner."""
        return self._queue.pages_and_waits()

    # -- after a forward ---------------------------------------------------------------------------------------------

    def _run_timed(self, step: KVStep, decode: DecodeBatch | None, chunks: list[ScheduledChunk]) -> None:
        """Run the step; time it on the device if images are made at this node."""
        share = self._share
        if share.turn == IMAGE or share.is_engaged:
            size = (len(decode.branches) if decode else 0, *((chunk.branch.name, chunk.count) for chunk in chunks))
            kind = share.turn or TEXT
            step.timed = share.begin(kind, size, is_prefill=kind == TEXT and bool(chunks))
        self._run(step, decode, chunks)
        if step.timed is not None:
            share.launched(step.timed)

    def _run(self, step: KVStep, decode: DecodeBatch | None, chunks: list[ScheduledChunk]) -> None:
        """Run the step and, for fused loops, all their iterations."""
        rows = 0
        while decode is not None or chunks:
            self._scheduler.plan_ahead(chunks)
            outs = self._runner.run(decode, chunks)
            step.batches += outs
            for out in outs:
                self._account(step, out)
            rows = rows or step.result.rows
            going = [chunk.branch for out in outs for chunk in out.chunks if self._settle(step, out, chunk)]
            # All branches are settled before pages are reserved: a preemption must not meet a half-settled one.
            chunks = [
                self._scheduler.chunk(branch, branch.forward.tokens)
                for branch in going
                if branch.forward is not None and self._scheduler.reserve(branch)
            ]
            chunks = [chunk for chunk in chunks if chunk.branch.is_reserved]
            decode = None
        step.result.rows = rows  # the iterations of a fused loop have the same rows

    def _account(self, step: KVStep, out: BatchOutput) -> None:
        queue, result, decode = self._queue, step.result, out.decode
        count = len(decode.branches) if decode else 0
        result.rows += count + len(out.chunks)
        jobs = (chunk.job or chunk.branch.job for chunk in out.chunks)  # a replay is part of the interrupted job
        result.ran += [job.key for job in jobs if job is not None]
        result.tokens += count + sum(chunk.computed for chunk in out.chunks)
        for branch, error in out.failed:
            if branch.job is not None:
                queue.fail(result, branch, branch.job, error)
        if decode is not None:
            queue.decode_since = queue.clock()
            if np.count_nonzero(out.left) < count:
                for index in np.nonzero(out.left == 0)[0].tolist():
                    queue.leave_decode(int(decode.keys[index]))
                queue.is_decode_current = False
            if self._memory.feeds is not None:
                self._starve(decode, out.left, self._memory.feeds)

    def _starve(self, decode: DecodeBatch, left: np.ndarray, feeds: Feeds) -> None:
        """Take the loops out of the decode batch whose next item has not come."""
        for index in np.nonzero(feeds.dry(decode.slots) & (left > 0))[0].tolist():
            key = int(decode.keys[index])
            if self._queue.leave_decode(key):
                self._queue.starving[key] = decode.branches[index]

    def _end_with_stream(self, result: StepResult) -> None:
        """End the loops whose stream is over once their last iteration is collected."""
        feeds = self._memory.feeds
        assert feeds is not None
        for key, branch in list(self._queue.starving.items()):
            if feeds.is_over(branch.slot) and not self._queue.is_in_flight(key):
                slots, loop = self._memory.slots, branch.loop_state
                iterations = loop.limit - int(slots.left[branch.slot])
                self._end_loop(result, branch, int(slots.last[branch.slot]), "done", iterations)

    def _settle(self, step: KVStep, out: BatchOutput, chunk: ScheduledChunk) -> bool:
        """Move a branch on after its chunk. True when a fused loop goes on within this step."""
        branch, forward, memory = chunk.branch, chunk.forward, self._memory
        branch.waiting_since = self._queue.clock()
        if not chunk.is_last or branch.job is not chunk.job:
            return False
        if forward.is_replay:
            branch.replay.popleft()
            branch.is_evicted = branch.is_evicted and bool(branch.replay)
            return False
        self._loops.finish_pass(branch, forward)
        if forward.attend.write and memory.prefixes is not None and branch.chain.keys:
            full = int(memory.tables.length[branch.slot]) // memory.pool.page_size
            memory.prefixes.insert(branch.chain.keys[:full], memory.tables.pages(branch.slot)[:full])
        if branch.loop is None:
            branch.forward = None
            self._hold(step, branch)
            return False
        return self._iterate(step, out, chunk)

    def _iterate(self, step: KVStep, out: BatchOutput, chunk: ScheduledChunk) -> bool:
        """Carry a general loop's values to its next iteration, or end it."""
        branch, job = chunk.branch, chunk.job
        assert job is not None and job.loop is not None and branch.loop is not None
        branch.loop.iteration += chunk.iterations - 1
        drawn = out.ids[chunk.sampled_at : chunk.sampled_at + 1] if chunk.samples and out.ids is not None else None
        try:
            emission, ended = self._loops.advance(branch, job, chunk.forward, drawn)
        except Exception as error:  # noqa: BLE001 a module that omits a carried port fails its own request only
            self._queue.fail(step.result, branch, job, error)
            return False
        if emission is not None:
            step.result.emissions.append(emission)
        if ended is not None:
            step.result.done.append(ended)
            self._queue.remember(branch, ended.outputs)
            branch.job = branch.forward = branch.loop = None
            self._hold(step, branch)
            return False
        branch.is_reserved = False
        # Iterations that are already computed are settled at once.
        if branch.loop.ready:
            return True
        return job.loop.fused and not job.loop.emit and step.result.tokens < FUSED_TOKENS

    def _hold(self, step: KVStep, branch: Branch) -> None:
        """Let a branch wait until a step is collected."""
        branch.in_flight += 1
        step.held.append(branch)

    # -- collecting --------------------------------------------------------------------------------------------------

    def _collect_decode(
        self, step: KVStep, out: BatchOutput, ids: np.ndarray, steps: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        assert out.decode is not None
        indices, keys, left, place = out.decode.slots, out.decode.keys, out.left, out.place
        ids = ids[: len(indices)]
        kept = None
        if step.dropped:
            kept = ~np.isin(keys, list(step.dropped))
            indices, keys, left, place, ids = indices[kept], keys[kept], left[kept], place[kept], ids[kept]
        slots = self._memory.slots
        slots.history[indices, place] = ids
        slots.last[indices] = ids
        # count_nonzero is numpy's cheapest test; sequences are looked at only when one has ended.
        hits = slots.stop_ids[indices] == ids[:, None]
        if out.outputs:
            self._emit(step, out, kept, left)
        if np.count_nonzero(hits) or np.count_nonzero(left) < len(left):
            if self._finish_loops(step.result, keys, ids, left, hits.any(axis=1)):
                good = ids >= 0
                keys, ids = keys[good], ids[good]
        if len(keys):
            steps.append((keys, ids))

    def _finish_loops(
        self, result: StepResult, keys: np.ndarray, ids: np.ndarray, left: np.ndarray, stopped: np.ndarray
    ) -> bool:
        """End the loops that stopped, ran out of iterations, or drew no valid id. True if one did the last."""
        has_bad = False
        for index in np.nonzero(stopped | (left == 0) | (ids < 0))[0].tolist():
            branch = self._queue.looping[int(keys[index])]
            job = branch.job
            assert job is not None and branch.loop is not None
            iterations = branch.loop.limit - int(left[index])
            self._undo(branch, int(keys[index]))
            if ids[index] < 0:
                has_bad = True
                self._queue.fail(result, branch, job, self._no_id())
                continue
            self._end_loop(result, branch, int(ids[index]), "stop" if stopped[index] else "length", iterations)
        return has_bad

    def _end_loop(self, result: StepResult, branch: Branch, last: int, reason: str, iterations: int) -> None:
        """Report the end of a resident loop and let its branch go on."""
        assert branch.job is not None
        outputs = self._loops.last_outputs(branch, branch.job, last)
        result.done.append(Done(job=branch.job, outputs=outputs, reason=reason, iterations=iterations))
        self._memory.slots.set_last(branch.slot, last)
        branch.request.last_values.update(outputs)
        self._loops.sync_log(branch)
        self._queue.stop_decoding(branch)
        branch.job = branch.loop = None
        self._queue.requeue(branch)

    def _undo(self, branch: Branch, key: int) -> None:
        """Undo what later steps in flight have done for a loop that had already ended."""
        for later in self._queue.in_flight:
            for out in later.batches:
                if out.decode is not None and key in out.decode.keys and key not in later.dropped:
                    later.dropped.add(key)
                    self._memory.tables.truncate(branch.slot, 1)
                    self._memory.slots.next_position[branch.slot] -= 1
                    self._memory.slots.drawn[branch.slot] -= 1

    def _emit(self, step: KVStep, out: BatchOutput, kept: np.ndarray | None, left: np.ndarray) -> None:
        """Report what loops of the decode batch emit besides their ids."""
        assert out.decode is not None
        at = 0
        shares = {port: self._shares(port, value) for port, value in out.outputs.items()}
        for index, branch in enumerate(out.decode.branches):
            if kept is not None and not kept[index]:
                continue
            job, loop = branch.job, branch.loop
            if job is not None and loop is not None and job.loop is not None and job.loop.emit:
                values = {port: shares[port][index] for port in job.loop.emit if port in shares}
                iteration = loop.limit - int(left[at]) - 1
                step.result.emissions.append(Emission(job=job, iteration=iteration, outputs=values))
            at += 1

    def _shares(self, port: str, value: Tensor) -> Sequence[Tensor]:
        """Return each sequence's share of a reported port: its value where the type is fixed, else one row."""
        is_whole = value.dim() - 1 == self._fixed_ranks.get(port)
        shares: tuple[Tensor, ...] = value.unbind(0) if is_whole else value.split(1)
        return shares

    def _collect_chunk(
        self, result: StepResult, out: BatchOutput, chunk: ScheduledChunk, ids: np.ndarray | None
    ) -> None:
        branch, job = chunk.branch, chunk.job
        if job is None or self._queue.requests.get(job.handle) is not branch.request:
            return
        if not chunk.samples and not chunk.is_last:
            return
        outputs = chunk.forward.outputs
        if chunk.samples:
            assert ids is not None and self._spec.sampling is not None
            drawn = int(ids[chunk.sampled_at])
            if drawn < 0:
                self._queue.fail(result, branch, job, self._no_id())
                return
            if branch.slot >= 0:  # a candidate may have been freed
                self._memory.slots.last[branch.slot] = drawn
            # On the host, where it is known: reading it from the GPU again would wait for later launches.
            outputs[self._spec.sampling.port] = torch.tensor([drawn], dtype=torch.int64)
        if chunk.forward.is_replay or job.loop is not None or branch.job is not job:
            return
        result.done.append(Done(job=job, outputs=outputs, cached_tokens=branch.cached_tokens))
        self._queue.remember(branch, outputs)
        branch.job = None
        self._queue.requeue(branch)

    def _no_id(self) -> EngineError:
        return EngineError(f"node {self.name} gave no finite logits for this request", node=self.name)


def _check(spec: NodeSpec, settings: KVSettings) -> None:
    if spec.kv is None:
        raise ConfigError(f"node {spec.name} has no cache", hint="a KV_CACHE node declares KVSpec", key=spec.name)
    if settings.max_slots < spec.kv.slots(requests=1):
        raise ConfigError(
            f"node {spec.name} needs {spec.kv.slots(requests=1)} slots for one request, "
            f"{settings.max_slots} are configured",
            f"{len(spec.kv.branches)} for each of one cache and {spec.kv.rows} candidates",
            key="max_slots",
        )
