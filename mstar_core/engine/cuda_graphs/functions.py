"""Captured functions of a batch, such as the encoder inside a stateless module. Owned and called by the module.

Host-side code around the function (lengths, choices by value) stays uncaptured. Shapes are learned from the batches
that arrive and captured when the engine asks the module for idle work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Union

import torch

from mstar_core.engine.cuda_graphs.cache import Size, StaticStep, StepBuckets

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCache, GraphCounts

MOST_SHAPES: Final = 8
"""Shapes that are captured; later ones run uncaptured and count as misses."""

ItemShape = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of one item of an input."""

ItemShapes = tuple[ItemShape, ...]
"""Those of each input."""

Rows = Union["Tensor", "list[Tensor]"]
"""An input of a batch, [B, ...] or its rows, which need no copy of the whole."""


class FunctionStep(StaticStep["Tensor"]):
    """The function over static inputs."""

    def __init__(self, function: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
        self._function = function
        self.given = given

    def forward(self) -> Tensor:
        """See StaticStep."""
        return self._function(*self.given)


class CapturedFunction:
    """A function of batches [B, ...] that gives a batch [B, ...], replayed where a bucket holds them.

    sizes: batch sizes of the buckets. is_worth: whether a batch whose first input has this shape [B, ...] is worth a
    graph; where kernels are long, the host runs ahead without one. Without a cache the function is called as it is.
    The items of a batch must not depend on each other: padding keeps values of earlier batches.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        sizes: Sequence[int],
        cache: GraphCache | None = None,
        is_worth: Callable[[tuple[int, ...]], bool] = lambda shape: True,
    ) -> None:
        self._function = function
        self._sizes = sorted(sizes)
        self._cache = cache
        self._is_worth = is_worth
        self._buckets: dict[ItemShapes, StepBuckets[FunctionStep]] = {}

    def __call__(self, *inputs: Rows) -> Tensor:
        """Return the function of a batch, inputs [B, ...] or lists of B rows, in memory of its own."""
        step = self._chosen(inputs)
        return self._plain(inputs) if step is None else self._replay(step, inputs).clone()

    def borrow(self, *inputs: Rows) -> Tensor:
        """Return the function of a batch, possibly in memory that the next call overwrites."""
        step = self._chosen(inputs)
        return self._plain(inputs) if step is None else self._replay(step, inputs)

    def _plain(self, inputs: tuple[Rows, ...]) -> Tensor:
        return self._function(*(torch.stack(each) if isinstance(each, list) else each for each in inputs))

    def _chosen(self, inputs: tuple[Rows, ...]) -> FunctionStep | None:
        """Return the smallest bucket that holds the batch, padded by half at most; learn and count a missing one."""
        if self._cache is None:
            return None
        shapes = tuple((each[0].dtype, tuple(each[0].shape)) for each in inputs)
        self._learn(shapes)
        count, buckets = len(inputs[0]), self._buckets.get(shapes)
        step = None if buckets is None else buckets.smallest(count, most=count * 3 // 2)
        if step is not None:
            self._cache.counts.hits += 1
        elif self._is_worth((count, *shapes[0][1])):
            self._cache.counts.misses += 1
        return step

    def _replay(self, step: FunctionStep, inputs: tuple[Rows, ...]) -> Tensor:
        count = len(inputs[0])
        for static, given in zip(step.given, inputs, strict=True):
            if isinstance(given, list):
                torch._foreach_copy_(list(static[:count]), given)
            else:
                static[:count].copy_(given)
        return step.run()[:count]

    @property
    def sizes(self) -> dict[ItemShapes, list[int]]:
        """Batch sizes of the captured buckets, by shape."""
        return {shapes: [size for (size,) in buckets.sizes] for shapes, buckets in self._buckets.items()}

    def capture_next(self) -> bool:
        """Capture the largest missing bucket; the others fit its memory. Returns whether more are missing."""
        return self._cache is not None and self._cache.capture_next()

    def compile_later(self) -> None:
        """Run the function once for each missing bucket, without capturing it."""
        if self._cache is not None:
            self._cache.warm_up()

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Return the counts that `counters` reports, None without a cache."""
        return None if self._cache is None else self._cache.counts

    def counters(self) -> dict[str, float]:
        """Return the counts since the start by metric name, empty without a cache."""
        return {} if self._cache is None else self._cache.counts.as_counters()

    def _learn(self, shapes: ItemShapes) -> None:
        if self._cache is None or shapes in self._buckets or len(self._buckets) >= MOST_SHAPES:
            return
        device = self._cache.device

        def build(size: Size) -> FunctionStep:
            given = [torch.zeros((*size, *item), dtype=dtype, device=device) for dtype, item in shapes]
            return FunctionStep(self._function, given)

        first, each = shapes[0][1], sum(dtype.itemsize * math.prod(item) for dtype, item in shapes)
        # The largest of all shapes is captured first: the others then fit into the memory of its intermediate values.
        self._buckets[shapes] = self._cache.buckets(
            build, lambda size: f"captured function of {size[0]} items {list(first)}", lambda size: (-size[0] * each,)
        )
        self._buckets[shapes].plan((size,) for size in self._sizes if self._is_worth((size, *first)))
