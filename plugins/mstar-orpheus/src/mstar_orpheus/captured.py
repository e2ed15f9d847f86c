"""The vocoder's usual steps as CUDA graphs: noise, decoding and conversion in one launch. Owned by the vocoder node.

The buckets of whole windows that serving begins with are captured before ready, the others one by one when the
worker has nothing to do; until then the next larger one serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from mstar_core.engine.cuda_graphs.buckets import recording

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

FIRST_BUCKETS: Final = (1, 8, 32)
LATER_BUCKETS: Final = (64, 16, 4, 2, 24, 48)
"""In the order of their capture."""
SHORT_BUCKETS: Final = (1, 8)
"""For windows that begin a stream early."""
WARM_UPS: Final = 2
FACTS: Final = 3
STAGES: Final = 3
"""Pinned buffers of a bucket, used in turn: two steps may be in flight while a third is filled."""

Pool = Any
"""Torch's handle of the memory that graphs share; it has no public type."""
Step = Callable[["Tensor", "Tensor"], "Tensor"]


class Bucket:
    """One captured step for `rows` windows of `ids` ids. Rows beyond a batch repeat whatever the buffer held.

    Host and device hold one array: facts, int64 [3, rows], then windows, int64 [rows, ids].
    """

    def __init__(self, step: Step, rows: int, ids: int, fill: int, device: torch.device, pool: Pool) -> None:
        count = rows * (FACTS + ids)
        self._given = torch.full((count,), fill, dtype=torch.int64, device=device)
        window, facts = self._given[rows * FACTS :].view(rows, ids), self._given[: rows * FACTS].view(FACTS, rows)
        facts.fill_(1)
        initial = self._given.cpu()
        self._staged = [torch.empty(count, dtype=torch.int64, pin_memory=True).copy_(initial) for _ in range(STAGES)]
        self._arrays = [_views(each.numpy(), rows, ids) for each in self._staged]
        self._turn = 0
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                step(window, facts)
        torch.cuda.current_stream().wait_stream(side)
        with recording(pool) as self.graph:
            self._made = step(window, facts)

    def run(self, window: np.ndarray, facts: np.ndarray) -> Tensor:
        """Samples of each window, on the device: to be copied by this stream before the next step."""
        rows = len(window)
        self._turn = (self._turn + 1) % STAGES
        staged_facts, staged_windows = self._arrays[self._turn]
        staged_facts[:, :rows] = facts
        staged_windows[:rows] = window
        self._given.copy_(self._staged[self._turn], non_blocking=True)
        self.graph.replay()
        return self._made[:rows]


def first_buckets(ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows and ids of the buckets that are there before ready."""
    return [(rows, ids[0]) for rows in FIRST_BUCKETS]


def later_buckets(ids: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows and ids of the others, in the order of their capture."""
    return [(rows, ids[0]) for rows in LATER_BUCKETS] + [(rows, each) for each in ids[1:] for rows in SHORT_BUCKETS]


def _views(flat: np.ndarray, rows: int, ids: int) -> tuple[np.ndarray, np.ndarray]:
    return flat[: rows * FACTS].reshape(FACTS, rows), flat[rows * FACTS :].reshape(rows, ids)


class CapturedWindows:
    """Graphs of one function of window (int64 [B, n]) and facts (int64 [3, B]: noise mode, seed, place).

    ids: lengths of windows that are captured, the usual one first; shorter ones begin a stream early, and get small
    buckets only.
    """

    def __init__(self, step: Step, ids: tuple[int, ...], fill: int, device: torch.device) -> None:
        self._step, self._fill, self._device = step, fill, device
        self._pool: Pool = None
        self._buckets: dict[tuple[int, int], Bucket] = {}
        for rows, length in first_buckets(ids):
            self._capture(rows, length)
        self._left = later_buckets(ids)

    def idle(self) -> bool:
        """Capture one more bucket. True when more are left."""
        if self._left:
            self._capture(*self._left.pop(0))
        return bool(self._left)

    def run(self, window: np.ndarray, facts: np.ndarray) -> Tensor | None:
        """Samples of each window on the device; None when no bucket holds the batch. facts: int64 [3, B]."""
        rows, ids = window.shape
        found = min((size for size, length in self._buckets if length == ids and size >= rows), default=None)
        return None if found is None else self._buckets[found, ids].run(window, facts)

    def _capture(self, rows: int, ids: int) -> None:
        self._buckets[rows, ids] = Bucket(self._step, rows, ids, self._fill, self._device, self._pool)
        self._pool = self._pool or self._buckets[rows, ids].graph.pool()
