"""All captured steps of one KV node: which are captured before the first request and which when idle.

Used by the KV engine, which calls it while no step of the node is in flight, and by its model runner.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from mstar_core.engine.cuda_graphs.compilation import zero_filled
from mstar_core.engine.cuda_graphs.decode import DECODE, DECODE_ADJUSTING, DecodeSteps
from mstar_core.engine.cuda_graphs.kinds import WirePrefix, decoded
from mstar_core.engine.cuda_graphs.passes import LoopPassSteps, PassKind
from mstar_core.engine.cuda_graphs.prefill import PREFILL, PREFILL_ADJUSTING, PrefillSteps
from mstar_core.engine.cuda_graphs.prefixes import kind_of
from mstar_core.engine.cuda_graphs.prompts import PromptSteps

if TYPE_CHECKING:
    from mstar_core.engine.attention import AttentionBackend
    from mstar_core.engine.cache.loop_rows import LoopRows
    from mstar_core.engine.cache.page_table import PageTables
    from mstar_core.engine.cache.slots import Slots
    from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache, StepBuckets
    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_core.graph.declare.nodes import NodeSpec
    from mstar_core.layers.kv_view import KVModule

log = logging.getLogger(__name__)


class NodeGraphs:
    """The captured decode, prefill and loop passes of one node, in one cache. Owned by its KV engine.

    decode, prefill: None for a node that draws no ids; prefill also for one whose decode steps take more than ids.
    passes: None for a node without `capture_sizes`; prompts: None for one without `capture_prompts`.
    """

    def __init__(
        self,
        spec: NodeSpec,
        module: KVModule,
        attention: AttentionBackend,
        slots: Slots,
        tables: PageTables,
        *,
        id_port: str,
        vocab: int,
        token_budget: int,
        cache: GraphCache,
        rows: LoopRows | None = None,
    ) -> None:
        """rows: values per sequence of the node's resident loop. Prompts of such a node are not captured."""
        self.cache = cache
        self.decode: DecodeSteps | None = None
        self.prefill: PrefillSteps | None = None
        self.passes: LoopPassSteps | None = None
        self.prompts: PromptSteps | None = None
        self._name = spec.name
        self._slots = slots
        self._budget = token_budget
        if spec.sampling is not None and vocab:
            self.decode = DecodeSteps(spec, module, attention, slots, tables, id_port=id_port, cache=cache, rows=rows)
            self.prefill = PrefillSteps(self.decode, cache) if rows is None else None
        if spec.hints.capture_sizes or spec.hints.capture_tokens:
            self.passes = LoopPassSteps(spec, module, attention, tables, slots.count, cache, token_budget)
        if spec.hints.capture_prompts:
            self.prompts = PromptSteps(
                spec, module, attention, tables, cache, token_budget, counts_ids=self.prefill is None
            )

    def capture(self, sizes: CaptureSizes) -> None:
        """Capture decode and prefill before the first request and queue the later sizes.

        Raises StartError if memory is short for all sizes of a kind.
        """
        if self.decode is None:
            self.cache.report = None
            return
        # Traced samples have queued prompt passes, which are many: they are captured when the node is idle.
        queue, prompts = self.cache.queue, self.prompts
        aside = [each for each in queue if prompts is not None and prompts.owns(each.buckets)]
        self.cache.queue = [each for each in queue if each not in aside]
        with torch.inference_mode():
            self._plan(sizes.decode, sizes.prefill)
            self.cache.capture_all()
            self._plan(sizes.decode_later, sizes.prefill_later)
            if self.cache.mirror is None:  # followers run nothing but what is published
                self.cache.compile_queued()
            self.cache.queue += aside
        self.cache.report = None  # later captures are not part of the start
        self._warn_of_misses()

    def trace(self, sizes: CaptureSizes, compiling: Compiling) -> None:
        """Go through the steps of all sizes inside `compiling_only`: two steps if the kernel cache has their kernels.

        Called before `capture`, which must not compile kernels one by one: they are most of a first start.
        """
        if self.decode is None:
            return
        with torch.inference_mode(), zero_filled():
            self._plan(sizes.decode, sizes.prefill)
            self._plan(sizes.decode_later, sizes.prefill_later)
            try:
                self.cache.warm_up(lambda: not compiling.has_missed)
            finally:
                self.cache.queue.clear()

    def _plan(self, decode: tuple[int, ...], prefill: tuple[int, ...]) -> None:
        assert self.decode is not None
        self.decode.plan(decode)
        if self.prefill is not None:
            self.prefill.plan(prefill, self._budget)

    def buckets_of(self, kind: bytes) -> StepBuckets[Any]:
        """Return the buckets of a kind that the leader of a tensor-parallel group has published."""
        if kind in (DECODE, DECODE_ADJUSTING):
            assert self.decode is not None
            return self.decode.buckets if kind == DECODE else self.decode.adjusting
        if kind in (PREFILL, PREFILL_ADJUSTING):
            assert self.prefill is not None
            return self.prefill.buckets if kind == PREFILL else self.prefill.adjusting
        assert self.passes is not None
        wire = decoded(kind)
        if isinstance(wire, WirePrefix):
            return self.passes.prefixes.buckets_of(kind_of(wire))
        return self.passes.buckets_of(PassKind.of_wire(wire))

    def idle(self) -> bool:
        """Capture the next queued bucket. Returns whether more are queued."""
        if self.cache.is_complete:
            return False
        with torch.inference_mode():
            return self.cache.capture_next()

    def warm_up(self) -> None:
        """Run each queued step once, uncaptured. See NodeRunner.compile_later."""
        with torch.inference_mode():
            self.cache.warm_up()

    def _warn_of_misses(self) -> None:
        """Log decode steps that the deployment's limits allow and no single graph covers."""
        assert self.decode is not None
        largest = max([size for (size,) in (*self.decode.buckets.sizes, *self.decode.buckets.planned)], default=0)
        if self._slots.device.type == "cuda" and 0 < largest < self._slots.count:
            log.warning(
                "node %s: decode steps of more than %d sequences take several CUDA-graph replays each, and %d are "
                "admitted; lower max_concurrent_requests to %d or leave more memory for larger graphs",
                self._name,
                largest,
                self._slots.count,
                largest,
            )
