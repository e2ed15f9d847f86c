"""The heavy part of a stateless module as CUDA graphs, one per bucket of rows. Owned by the module, run in its forward.

What surrounds it (lengths, choices that come on the host) stays ordinary code. Shapes are learned from what comes, and
captured when the engine asks the module for idle work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.cuda_graphs.buckets import Captures, GraphCounts

log = logging.getLogger(__name__)

KINDS: Final = 8
"""Shapes that are captured; later ones stay plain, and are counted as misses."""

Kind = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of one row."""


@dataclass(slots=True)
class _Bucket:
    """One graph with its buffers."""

    given: Tensor
    graph: Any = None
    made: Tensor | None = None


class InnerGraphs:
    """A function of rows [B, ...] to rows [B, ...], replayed where a bucket holds them.

    sizes: rows of the buckets. is_worth: whether so many rows of such a shape ([B, ...]) are worth a graph: where
    kernels are long the host runs ahead by itself. Without `captures` it is the function and nothing else.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        sizes: Sequence[int],
        captures: Captures | None = None,
        is_worth: Callable[[tuple[int, ...]], bool] = lambda shape: True,
    ) -> None:
        self._function = function
        self._sizes = sorted(sizes)
        self._captures = captures
        self._is_worth = is_worth
        self._buckets: dict[Kind, dict[int, _Bucket]] = {}
        self._later: list[tuple[Kind, int]] = []

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [B, ...]. Returns the function's rows, a tensor of their own."""
        bucket = self._chosen(rows)
        return self._function(rows) if bucket is None else self._replay(bucket, rows).clone()

    def borrow(self, rows: Tensor) -> Tensor:
        """The same for who copies them at once: they may lie where the next call of either overwrites them."""
        bucket = self._chosen(rows)
        return self._function(rows) if bucket is None else self._replay(bucket, rows)

    def _chosen(self, rows: Tensor) -> _Bucket | None:
        """The bucket that takes these rows; one that is still missing is learned and counted."""
        if self._captures is None:
            return None
        kind = (rows.dtype, tuple(rows.shape[1:]))
        self._learn(kind)
        bucket = self._bucket(kind, len(rows))
        if bucket is None:
            # What is not worth a graph is not missed.
            self._captures.counts.misses += self._is_worth(tuple(rows.shape))
        else:
            self._captures.counts.hits += 1
        return bucket

    def _replay(self, bucket: _Bucket, rows: Tensor) -> Tensor:
        bucket.given[: len(rows)].copy_(rows)
        if bucket.graph is not None:
            bucket.graph.replay()
        else:
            bucket.made = self._function(bucket.given)
        assert bucket.made is not None
        return bucket.made[: len(rows)]

    @property
    def sizes(self) -> dict[Kind, list[int]]:
        """By kind, the rows of the buckets that are there."""
        return {kind: sorted(buckets) for kind, buckets in self._buckets.items()}

    def capture_next(self) -> bool:
        """Capture the largest bucket that is missing, whose memory the others fit in. True when more are left.

        One that does not fit is left out and said to be, and its rows run plainly; so does a shape that cannot be
        captured at all.
        """
        if self._later and self._captures is not None:
            kind, size = self._later.pop(0)
            try:
                self._captures.measured(f"inner graph of {size} rows {list(kind[1])}", lambda: self._make(kind, size))
            except torch.OutOfMemoryError as error:
                log.error("rows %s of %d run plainly: %s", list(kind[1]), size, str(error).splitlines()[0])
            except Exception as error:  # noqa: BLE001 a function that cannot be captured still runs plainly
                self._later = [each for each in self._later if each[0] != kind]
                log.error("rows %s run plainly: %s: %s", list(kind[1]), type(error).__name__, error)
        return bool(self._later)

    def compile_later(self) -> None:
        """Run the function once for each bucket that is missing. See CompilesLater."""
        for kind, size in self._later:
            self._function(self._given(kind, size))

    @property
    def graph_counts(self) -> GraphCounts | None:
        """What `counters` tells; None where there are no graphs."""
        return None if self._captures is None else self._captures.counts

    def counters(self) -> dict[str, float]:
        """What the graphs did since the start, by name; empty where there are none."""
        return {} if self._captures is None else self._captures.counts.as_counters()

    def _learn(self, kind: Kind) -> None:
        if kind in self._buckets or len(self._buckets) >= KINDS:
            return
        self._buckets[kind] = {}
        self._later += [(kind, size) for size in self._sizes if self._is_worth((size, *kind[1]))]
        self._later.sort(key=lambda each: -each[1])

    def _bucket(self, kind: Kind, count: int) -> _Bucket | None:
        """The smallest bucket that holds so many rows. Not one that is padded by more than a third: rows cost time."""
        found = min((size for size in self._buckets.get(kind, ()) if count <= size <= count * 3 // 2), default=None)
        return None if found is None else self._buckets[kind][found]

    def _make(self, kind: Kind, size: int) -> None:
        assert self._captures is not None
        bucket = _Bucket(self._given(kind, size))
        bucket.graph, bucket.made = self._captures.graph(lambda: self._function(bucket.given))
        self._buckets[kind][size] = bucket

    def _given(self, kind: Kind, size: int) -> Tensor:
        assert self._captures is not None
        return torch.zeros((size, *kind[1]), dtype=kind[0], device=self._captures.device)
