"""All captured steps of one KV node: which are captured before the first request and which when idle.

Used by the model runner, while no step of the node is in flight for captures.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from mstar_core.engine.cuda_graphs.compilation import zero_filled
from mstar_core.engine.cuda_graphs.decode import DecodeSteps
from mstar_core.engine.cuda_graphs.kinds import StepFamily
from mstar_core.engine.cuda_graphs.passes import CapturedPasses

if TYPE_CHECKING:
    from collections.abc import Callable

    from mstar_core.engine.cuda_graphs.cache import CaptureSizes, GraphCache, StepBuckets
    from mstar_core.engine.cuda_graphs.compilation import Compiling
    from mstar_core.engine.cuda_graphs.kinds import StepKind
    from mstar_core.engine.cuda_graphs.ragged import CapturedNode
    from mstar_core.engine.device_state.loop_values import DeviceLoopValues
    from mstar_core.engine.marks import Mark
    from mstar_core.graph.declare.nodes import NodeSpec

log = logging.getLogger(__name__)


class NodeGraphs:
    """The captured decode steps and passes of one node, in one cache. Owned by its runner.

    decode: None for a node that draws no ids.
    """

    def __init__(
        self,
        spec: NodeSpec,
        node: CapturedNode,
        cache: GraphCache,
        *,
        id_port: str,
        token_budget: int,
        mark: Callable[[], Mark],
        values: DeviceLoopValues | None = None,
    ) -> None:
        """mark: returns a mark behind all launched work. values: of the node's resident loop.

        Prompts of ids of a node with values are not captured before a request.
        """
        self.cache = cache
        self.decode: DecodeSteps | None = None
        self._name = spec.name
        self._slots = node.slots
        self._budget = token_budget
        self._unplanned: CaptureSizes | None = None
        draws = node.sampler is not None
        if draws:
            self.decode = DecodeSteps(node, cache, id_port=id_port, mark=mark, values=values)
        self.passes = CapturedPasses(
            spec,
            node,
            cache,
            id_port=id_port,
            token_budget=token_budget,
            ids=draws and values is None and not node.has_memory,
        )

    def capture(self, sizes: CaptureSizes) -> None:
        """Capture decode and prefill before the first request and queue the later sizes.

        Raises StartError if memory is short for all sizes of a kind.
        """
        if self.decode is None:
            self.cache.report = None
            return
        # Traced samples have queued prompt passes, which are many: they are captured when the node is idle.
        queue = self.cache.queue
        prompts = [planned for planned in queue if self.passes.is_prompt(planned.buckets)]
        self.cache.queue = [planned for planned in queue if planned not in prompts]
        with torch.inference_mode():
            self._plan(sizes.decode, sizes.prefill)
            self.cache.capture_all()
            self._plan(sizes.decode_later, sizes.prefill_later)
            if self.cache.listener is None:  # followers run nothing but what is published
                self.cache.compile_queued()
            self.cache.queue += prompts
        self.cache.report = None  # later captures are not part of the start
        self._warn_of_misses()

    def capture_usual(self) -> None:
        """Capture the queued buckets that prompts of single requests use, before the first one."""
        usual = [each for each in self.cache.queue if self.passes.is_usual(each.buckets, each.size)]
        self.cache.queue = usual + [each for each in self.cache.queue if each not in usual]
        with torch.inference_mode():
            for _ in usual:
                self.cache.capture_next()

    def queue(self, sizes: CaptureSizes) -> None:
        """Queue the captures of a node that serves already: those of decode steps first, the largest of them foremost.

        It holds every decode batch. Prompts and further sizes follow when these are captured.
        """
        self.cache.report = None
        if self.decode is not None:
            self.decode.plan(sizes.decode)
            self._unplanned = sizes
            self.cache.later = len(sizes.prefill) + len(sizes.decode_later) + len(sizes.prefill_later)

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
        self.passes.plan_ids(prefill, self._budget)

    def buckets_of(self, kind: StepKind) -> StepBuckets[Any]:
        """Return the buckets that the leader of a tensor-parallel group names."""
        if kind.family is not StepFamily.DECODE:
            return self.passes.buckets_of(kind)
        assert self.decode is not None
        return self.decode.variants[kind.adjusts, kind.masks]

    def idle(self) -> bool:
        """Capture the next queued bucket. Returns whether more are queued."""
        with torch.inference_mode():
            is_left = not self.cache.is_complete and self.cache.capture_next()
            if self._unplanned is not None and not is_left:
                sizes, self._unplanned = self._unplanned, None
                self.cache.later = 0
                self._plan(sizes.decode, sizes.prefill)
                self._plan(sizes.decode_later, sizes.prefill_later)
                self._warn_of_misses()
                is_left = not self.cache.is_complete
            return is_left

    def warm_up(self) -> None:
        """Run each queued step once, uncaptured, which compiles its kernels."""
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
