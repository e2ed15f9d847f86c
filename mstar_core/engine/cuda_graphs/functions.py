"""Captured functions of a batch, such as the encoder inside a stateless module. Owned and called by the module.

Host-side code around the function (lengths, choices by value) stays uncaptured. Shapes are learned from the batches
that arrive and captured when the engine asks the module for idle work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.cuda_graphs.cache import Size, StaticStep, StepBuckets

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache, GraphCounts

MOST_SHAPES: Final = 8
"""Shapes that are captured; later ones run uncaptured and count as misses."""

ItemShape = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of one batch item."""


class FunctionStep(StaticStep["Tensor"]):
    """The function over one static input."""

    def __init__(self, function: Callable[[Tensor], Tensor], given: Tensor) -> None:
        self._function = function
        self.given = given

    def forward(self) -> Tensor:
        """See StaticStep."""
        return self._function(self.given)


class CapturedFunction:
    """A function of a batch [B, ...] that gives a batch [B, ...], replayed where a bucket holds it.

    sizes: batch sizes of the buckets. is_worth: whether a batch of a shape [B, ...] is worth a graph; where kernels are
    long, the host runs ahead without one. Without a cache the function is called as it is.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        sizes: Sequence[int],
        cache: GraphCache | None = None,
        is_worth: Callable[[tuple[int, ...]], bool] = lambda shape: True,
    ) -> None:
        self._function = function
        self._sizes = sorted(sizes)
        self._cache = cache
        self._is_worth = is_worth
        self._buckets: dict[ItemShape, StepBuckets[FunctionStep]] = {}

    def __call__(self, batch: Tensor) -> Tensor:
        """Return the function of a batch [B, ...] in memory of its own."""
        step = self._chosen(batch)
        return self._function(batch) if step is None else self._replay(step, batch).clone()

    def borrow(self, batch: Tensor) -> Tensor:
        """Return the function of a batch, possibly in memory that the next call overwrites."""
        step = self._chosen(batch)
        return self._function(batch) if step is None else self._replay(step, batch)

    def _chosen(self, batch: Tensor) -> FunctionStep | None:
        """Return the smallest bucket that holds the batch, padded by half at most; learn and count a missing one."""
        if self._cache is None:
            return None
        shape: ItemShape = (batch.dtype, tuple(batch.shape[1:]))
        self._learn(shape)
        count, buckets = len(batch), self._buckets.get(shape)
        step = None if buckets is None else buckets.smallest(count, most=count * 3 // 2)
        if step is not None:
            self._cache.counts.hits += 1
        elif self._is_worth(tuple(batch.shape)):
            self._cache.counts.misses += 1
        return step

    def _replay(self, step: FunctionStep, batch: Tensor) -> Tensor:
        step.given[: len(batch)].copy_(batch)
        return step.run()[: len(batch)]

    @property
    def sizes(self) -> dict[ItemShape, list[int]]:
        """Batch sizes of the captured buckets, by shape."""
        return {shape: [size for (size,) in buckets.sizes] for shape, buckets in self._buckets.items()}

    def capture_next(self) -> bool:
        """Capture the largest missing bucket; the others fit its memory. Returns whether more are missing."""
        return self._cache is not None and self._cache.capture_next()

    def compile_later(self) -> None:
        """Run the function once for each missing bucket. See CompilesLater."""
        if self._cache is not None:
            self._cache.warm_up()

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Return the counts that `counters` reports, None without a cache."""
        return None if self._cache is None else self._cache.counts

    def counters(self) -> dict[str, float]:
        """Return the counts since the start by metric name, empty without a cache."""
        return {} if self._cache is None else self._cache.counts.as_counters()

    def _learn(self, shape: ItemShape) -> None:
        if self._cache is None or shape in self._buckets or len(self._buckets) >= MOST_SHAPES:
            return
        dtype, item = shape
        device = self._cache.device

        def build(size: Size) -> FunctionStep:
            return FunctionStep(self._function, torch.zeros((*size, *item), dtype=dtype, device=device))

        self._buckets[shape] = self._cache.buckets(
            build, lambda size: f"captured function of {size[0]} items {list(item)}", lambda size: (-size[0],)
        )
        self._buckets[shape].plan((size,) for size in self._sizes if self._is_worth((size, *item)))
