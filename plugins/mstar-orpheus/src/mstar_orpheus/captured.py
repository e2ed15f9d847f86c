"""The vocoder's usual step as CUDA graphs, one per bucket of windows: noise, decoding and conversion in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

BUCKETS: Final = (1, 8, 32, 64)
WARM_UPS: Final = 2


class CapturedWindows:
    """Graphs of one function of window (int64 [B, n]) and facts (int64 [3, B]: noise mode, seed, place).

    A batch runs in the smallest bucket that holds it; the rows beyond it repeat whatever the buffers held.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], ids: int, fill: int, device: torch.device) -> None:
        self._buffers: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        pool = None
        for rows in BUCKETS:
            window = torch.full((rows, ids), fill, dtype=torch.int64, device=device)
            facts = torch.ones((3, rows), dtype=torch.int64, device=device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    step(window, facts)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                made = step(window, facts)
            pool = pool or graph.pool()
            self._buffers[rows] = (graph, window, facts, made)

    def run(self, window: Tensor, facts: Tensor) -> Tensor | None:
        """Samples of each window; None when no bucket holds the batch. facts: int64 [3, B], on the host."""
        rows = window.shape[0]
        bucket = next((size for size in BUCKETS if size >= rows), None)
        if bucket is None:
            return None
        graph, own_window, own_facts, made = self._buffers[bucket]
        own_window[:rows].copy_(window)
        own_facts[:, :rows].copy_(facts)
        graph.replay()
        return made[:rows].clone()
