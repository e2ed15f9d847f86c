"""Drawing of ids from logits: top-k, top-p and min-p, then one id at a point of what is left.

The PyTorch form is the definition. `draw` is for modules that draw within their forward, such as code predictors; the
engine's sampler uses `sorted_draw` on the CPU and kernels of its own on CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

BAD_ROW: Final = -1
"""Id of a row whose logits have no finite maximum."""

HEAD: Final = 512
"""Logits that are sorted first. Top-p sets of speech and text models are rarely larger."""

_ALL: Final = 1 << 62
"""A top-k that keeps all ids."""


def draw(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Draw one id per row, a function of that row's arguments only. Can be captured in a CUDA graph.

    logits: [B, vocab] of any float type, read as float32, on CUDA with at most 4096 ids; uniform: [B] in [0, 1), the
    point of the distribution to take; temperature: float32 [B], 0 is greedy; top_k: int64 [B], 0 is off; top_p: float32
    [B], 1 or more is off. Among equal logits, lower ids come first. Returns int64 [B], BAD_ROW where a row has no
    finite maximum.
    """
    if logits.is_cuda:
        kernels = importlib.import_module("mstar_core.layers.kernels.sampling")
        drawn: Tensor = kernels.draw(logits, uniform, temperature, top_k, top_p)
        return drawn
    greedy = temperature <= 0
    columns = {
        "temperature": torch.where(greedy, 1.0, temperature.float()),
        "greedy": greedy,
        "top_k": top_k,
        "top_p": torch.where(top_p < 1, top_p, 2.0).double(),
        "min_p": torch.zeros(len(logits), dtype=torch.float64),
    }
    return sorted_draw(logits.float(), columns, uniform.double())


def sorted_draw(logits: Tensor, columns: Mapping[str, Tensor], chance: Tensor) -> Tensor:
    """Draw one id per row by sorting. Every truncation keeps a prefix of the descending order, so one order serves all.

    logits: float32 [n, vocab]. columns: of n entries: temperature float32, greedy bool, top_k int64 (0 is off), top_p
    float64 (above 1 is off), min_p float64. chance: float64 [n] in [0, 1), the point of the distribution to take.
    Returns int64 [n], BAD_ROW where a row has no finite maximum (NaN, infinity, everything suppressed).

    Only the largest HEAD logits are sorted; a row that its HEAD does not settle is sorted whole. That choice depends on
    the row alone, so its ids do not depend on the batch.
    """
    greedy = columns["greedy"]
    if bool(greedy.all()):
        return _checked(*logits.max(dim=-1))
    scaled = logits / columns["temperature"][:, None]
    log_mass = scaled.logsumexp(dim=-1, keepdim=True)
    if scaled.shape[1] <= HEAD:
        drawn, _ = _pick(*scaled.sort(dim=-1, descending=True, stable=True), log_mass, columns, chance)
    else:
        drawn, settled = _pick(*_largest(scaled), log_mass, columns, chance)
        rest = (~(settled | greedy)).nonzero()[:, 0]
        if len(rest):
            whole = scaled[rest].sort(dim=-1, descending=True, stable=True)
            few = {name: column[rest] for name, column in columns.items() if len(column) == len(logits)}
            drawn[rest] = _pick(*whole, log_mass[rest], few, chance[rest])[0]
    return torch.where(greedy, _checked(*logits.max(dim=-1)), drawn) if bool(greedy.any()) else drawn


def probabilities(logits: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Return the distribution that `sorted_draw` draws from: float64 [n, vocab]. For tests."""
    values, ids = (logits / columns["temperature"][:, None]).sort(dim=-1, descending=True, stable=True)
    share, count, _ = _kept(values, values.logsumexp(dim=-1, keepdim=True), columns)
    share = share.masked_fill(torch.arange(share.shape[1], device=share.device) >= count, 0)
    share = share / share.sum(dim=-1, keepdim=True)
    spread = torch.zeros_like(share).scatter_(1, ids, share)
    one_hot = torch.zeros_like(share).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(columns["greedy"][:, None], one_hot, spread)


def _largest(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the HEAD largest values of each row and their ids, equal ones in order of id. Both [n, HEAD].

    topk takes equal values in any order, and bfloat16 logits are often equal: with the ids sorted first, a stable
    sort by value is the one order that does not depend on the kernel. Among those equal to the last one topk may
    have left out lower ids; `_pick` does not settle on these.
    """
    values, ids = scaled.topk(HEAD, dim=-1, sorted=False)
    ids = ids.sort(dim=-1).values
    values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _most(columns: Mapping[str, Tensor]) -> Tensor:
    """Return how many ids top-k keeps: int64 [n, 1]."""
    top_k = columns["top_k"][:, None]
    return torch.where(top_k > 0, top_k, _ALL)


def _kept(values: Tensor, log_mass: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities of sorted values, how many are kept [n, 1], and their running sum in float64."""
    most, width = _most(columns), values.shape[1]
    share = torch.exp((values - log_mass).to(torch.float64))
    total = share.cumsum(dim=-1)
    # top-p counts within what top-k left, as the usual chain of processors does.
    limited = total.gather(1, (most - 1).clamp(max=width - 1))
    mass = torch.where(most >= _ALL, 1.0, limited)
    keep = (total - share < columns["top_p"][:, None] * mass) & (torch.arange(width, device=values.device) < most)
    keep &= share >= columns["min_p"][:, None] * share[:, :1]
    return share, keep.sum(dim=-1, keepdim=True).clamp_(min=1), total


def _pick(
    values: Tensor, ids: Tensor, log_mass: Tensor, columns: Mapping[str, Tensor], chance: Tensor
) -> tuple[Tensor, Tensor]:
    """Invert the kept distribution. Returns the ids [n] and whether the sorted part sufficed to know them [n]."""
    most, width = _most(columns), values.shape[1]
    _, count, total = _kept(values, log_mass, columns)
    is_whole = (most >= _ALL) & (columns["top_p"][:, None] > 1) & (columns["min_p"][:, None] <= 0)
    mass = torch.where(is_whole, 1.0, total.gather(1, count - 1))
    at = (total <= chance[:, None] * mass).sum(dim=-1, keepdim=True)
    place = torch.minimum(at, count - 1)
    closed = torch.where(most >= _ALL, count < width, most <= width) | (is_whole & (at < width))
    best = values[:, :1]
    # Ties of the last value may be incomplete. With everything sorted no caller reads `settled`.
    closed = closed & (values.gather(1, place) > values[:, -1:])
    return _checked(best[:, 0], ids.gather(1, place)[:, 0]), (closed | ~(best.abs() < torch.inf))[:, 0]


def _checked(best: Tensor, ids: Tensor) -> Tensor:
    # A comparison instead of isfinite, which is five kernels.
    return torch.where(best.abs() < torch.inf, ids, BAD_ROW)
