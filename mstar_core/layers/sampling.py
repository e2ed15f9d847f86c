"""Functional sampling for modules that draw ids inside a forward, such as code predictors.

The semantics are those of the engine's sampler: temperature, top-k, then top-p within what top-k left.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

BAD_ROW: Final = -1
"""Id of a row whose logits have no finite maximum."""

ONE_BLOCK: Final = 4096
"""Largest vocabulary that the CUDA kernel draws from."""


def draw(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Draw one id per row, a function of that row's arguments only. Can be captured in a CUDA graph.

    logits: [B, vocab] of any float type, read as float32; uniform: [B] in [0, 1), the point of the distribution to
    take; temperature: float32 [B], 0 is greedy; top_k: int64 [B], 0 is off; top_p: float32 [B], 1 or more is off.
    Among equal logits, lower ids come first. Returns int64 [B], BAD_ROW where a row has no finite maximum.
    """
    if logits.is_cuda and logits.shape[1] <= ONE_BLOCK and logits.stride(1) == 1:
        kernels = importlib.import_module("mstar_core.layers.kernels.sampling")
        drawn: Tensor = kernels.draw(logits, uniform, temperature, top_k, top_p)
        return drawn
    return sorted_draw(logits, uniform, temperature, top_k, top_p)


def sorted_draw(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Draw as `draw` does, by sorting every row. For the CPU and larger vocabularies."""
    wide, vocab = logits.float(), logits.shape[1]
    is_greedy = (temperature <= 0)[:, None]
    values, ids = (wide / torch.where(is_greedy, 1.0, temperature[:, None].float())).sort(
        dim=-1, descending=True, stable=True
    )
    # Relative to the largest, so that a kernel with integer masses has the same shares.
    share = torch.exp(values - values[:, :1]).double()
    place = torch.arange(vocab, device=logits.device)
    count = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)[:, None]
    share = share.masked_fill(place >= count, 0)
    total = share.cumsum(dim=-1)
    limit = torch.where(top_p < 1, top_p, 2.0)[:, None].double() * total[:, -1:]
    kept = ((total - share < limit) & (place < count)).sum(dim=-1, keepdim=True).clamp(min=1)
    mass = total.gather(1, kept - 1)
    at = (total <= uniform[:, None].double() * mass).sum(dim=-1, keepdim=True)
    drawn = ids.gather(1, torch.where(is_greedy, 0, torch.minimum(at, kept - 1)))[:, 0]
    return torch.where(values[:, 0].abs() < torch.inf, drawn, BAD_ROW)
