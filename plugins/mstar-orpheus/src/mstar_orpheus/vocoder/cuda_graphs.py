"""Captured vocoder steps: noise, decoding and conversion in one CUDA graph. Owned by the vocoder node.

The first buckets of whole windows are captured before ready, the others one by one when the worker is idle. Until then
the next larger bucket serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.attention.staging import Staging
from mstar_core.engine.cuda_graphs.cache import GraphCache, Size, StaticStep, StepBuckets

if TYPE_CHECKING:
    from torch import Tensor

FIRST_BUCKETS: Final = (1, 8, 32)
LATER_BUCKETS: Final = (64, 16, 4, 2, 24, 48)
"""In the order of their capture."""
SHORT_BUCKETS: Final = (1, 8)
"""Buckets of the shorter windows that start a stream early."""
NOISE_PARAMS: Final = 3

Step = Callable[["Tensor", "Tensor"], "Tensor"]


class WindowStep(StaticStep["Tensor"]):
    """The step of `count` windows of `ids` ids. Padding repeats earlier windows."""

    def __init__(self, step: Step, count: int, ids: int, fill: int, device: torch.device) -> None:
        self._step = step
        self._count = count
        self._shapes = {"noise_params": (NOISE_PARAMS, count), "window": (count, ids)}
        sizes = {name: (torch.int64, shape[0] * shape[1]) for name, shape in self._shapes.items()}
        self._staging = Staging(sizes, device)
        self.load(np.full((count, ids), fill), np.ones((NOISE_PARAMS, count), dtype=np.int64))

    def load(self, window: np.ndarray, noise_params: np.ndarray) -> None:
        """Fill the buffers with one copy. window: int64 [n, ids]; noise_params: int64 [3, n]."""
        padded = np.ones((NOISE_PARAMS, self._count), dtype=np.int64)
        padded[:, : len(window)] = noise_params
        self._staging.put({"noise_params": padded, "window": window})

    def forward(self) -> Tensor:
        """See StaticStep: samples of each window."""
        fields = self._staging.device
        return self._step(*(fields[name].view(self._shapes[name]) for name in ("window", "noise_params")))


class CapturedWindows:
    """Captured steps of a function of window (int64 [B, n]) and noise_params (int64 [3, B]: noise mode, seed, place).

    ids: lengths of windows, the usual one first; shorter ones start a stream early and get small buckets only.
    """

    def __init__(self, step: Step, ids: tuple[int, ...], fill: int, device: torch.device) -> None:
        self._step = step
        self._fill = fill
        self._device = device
        self.cache = GraphCache(device, name="snac_decoder")
        self._buckets = {length: self._of_length(length) for length in ids}
        self._plan(first_buckets(ids))
        self.cache.capture_all()
        self._plan(later_buckets(ids))
        self.cache.compile_queued()

    def idle(self) -> bool:
        """Capture one more bucket. Returns whether more are queued."""
        return self.cache.capture_next()

    def run(self, window: np.ndarray, noise_params: np.ndarray) -> Tensor | None:
        """Return samples of each window on the device, None if no bucket holds the batch. noise_params: int64 [3, B].

        The next call overwrites them.
        """
        count, ids = window.shape
        buckets = self._buckets.get(ids)
        step = None if buckets is None else buckets.smallest(count)
        if step is None:
            self.cache.counts.misses += 1
            return None
        self.cache.counts.hits += 1
        step.load(window, noise_params)
        return step.run()[:count]

    def _of_length(self, ids: int) -> StepBuckets[WindowStep]:
        def order(size: Size) -> Size:
            known = [*FIRST_BUCKETS, *LATER_BUCKETS]
            return (int(len(self._buckets) > 0 and ids != next(iter(self._buckets))), known.index(size[0]))

        return self.cache.buckets(
            lambda size: WindowStep(self._step, size[0], ids, self._fill, self._device),
            lambda size: f"vocoder graph of {size[0]} windows of {ids} ids",
            order,
        )

    def _plan(self, sizes: list[tuple[int, int]]) -> None:
        for count, ids in sizes:
            self._buckets[ids].plan([(count,)])


def first_buckets(ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return windows and ids of the buckets that are captured before ready."""
    return [(count, ids[0]) for count in FIRST_BUCKETS]


def later_buckets(ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return windows and ids of the other buckets, in the order of their capture."""
    later = [(count, ids[0]) for count in LATER_BUCKETS]
    return later + [(count, id_count) for id_count in ids[1:] for count in SHORT_BUCKETS]
