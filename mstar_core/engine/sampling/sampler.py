"""Sampler: penalty, temperature, top-k, top-p, min-p, draw. Used by the model runner.

Every truncation keeps a prefix of the descending distribution, so one sorted pass serves all of them. Only the
largest HEAD logits are sorted; a row that its HEAD does not settle is sorted whole. That choice depends on the row
alone, so its ids do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.sampling import rng
from mstar_core.engine.transfers import upload

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import SamplingParams

HEAD: Final = 512
"""Logits that are sorted first. Top-p sets of speech and text models are rarely larger."""

BAD_ROW: Final = -1
"""Id of a row whose logits have no finite maximum."""

TOP_K_OFF: Final = 1 << 62
"""Value of `SamplingRows.top_k` that keeps all ids."""
_INFINITY: Final = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters of one batch, made once per change of membership.

    All tensors have one row per sequence on the logits' device. temperature [B, 1] float32 (1 for greedy rows);
    top_p, min_p [B, 1] float64; top_k [B, 1] int64; penalty [B, 1] float32; state int64 [B] of the seeds.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    penalty: Tensor
    state: Tensor
    greedy: Tensor
    all_greedy: bool
    any_greedy: bool
    is_penalised: bool
    has_bonus: bool
    has_top_k: bool
    has_min_p: bool
    has_whole: bool

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], device: torch.device) -> SamplingRows:
        """Gather the parameters of a batch."""

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [row.temperature <= 0 for row in rows]
        return cls(
            temperature=column([1.0 if row.temperature <= 0 else row.temperature for row in rows], torch.float32),
            # Off is above 1: rounding of the cumulative sum must not cut the tail.
            top_p=column([2.0 if row.top_p >= 1 else row.top_p for row in rows], torch.float64),
            top_k=column([TOP_K_OFF if row.top_k <= 0 else row.top_k for row in rows], torch.int64),
            min_p=column([row.min_p for row in rows], torch.float64),
            penalty=column([row.repetition_penalty for row in rows], torch.float32),
            state=rng.seeded(torch.tensor([rng.to_int64(row.seed) for row in rows], dtype=torch.int64, device=device)),
            greedy=torch.tensor(greedy, dtype=torch.bool, device=device),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
            is_penalised=any(row.repetition_penalty != 1 for row in rows),
            has_bonus=any(row.repetition_penalty < 1 for row in rows),
            has_top_k=any(row.top_k > 0 for row in rows),
            has_min_p=any(row.min_p > 0 for row in rows),
            has_whole=any(row.top_p >= 1 and row.top_k <= 0 and row.min_p <= 0 for row in rows),
        )

    @classmethod
    def uploaded(cls, rows: Sequence[SamplingParams], device: torch.device) -> SamplingRows:
        """Gather the parameters of a batch without waiting for the device."""
        made = cls.of(rows, torch.device("cpu"))
        if device.type == "cpu":
            return made
        columns = {
            each.name: upload(value, device)
            for each in fields(made)
            if isinstance(value := getattr(made, each.name), torch.Tensor)
        }
        return replace(made, **columns)  # type: ignore[arg-type]  # only its tensors are replaced

    def select(self, index: Tensor) -> SamplingRows:
        """Return the parameters of some of the rows."""
        return replace(
            self,
            temperature=self.temperature[index],
            top_p=self.top_p[index],
            top_k=self.top_k[index],
            min_p=self.min_p[index],
            penalty=self.penalty[index],
            state=self.state[index],
            greedy=self.greedy[index],
        )


def sample(logits: Tensor, rows: SamplingRows, seen: Tensor | None, counter: Tensor) -> Tensor:
    """Draw one id per row.

    logits: float32 [B, vocab]; seen: bool [B, vocab] where a penalty applies; counter: int64 [B], ids drawn before.
    Returns int64 [B]; BAD_ROW where a row has no finite maximum (NaN, infinity, everything suppressed).
    """
    if rows.all_greedy:
        if rows.is_penalised and seen is not None:
            logits = penalised(logits, rows, seen)
        return _checked(*logits.max(dim=-1))
    return sample_at(logits, rows, seen, rng.uniform_of(rows.state, counter))


def sample_at(logits: Tensor, rows: SamplingRows, seen: Tensor | None, chance: Tensor) -> Tensor:
    """Draw one id per row at a given point of its distribution. chance: float64 [B] in [0, 1); the rest as `sample`."""
    if rows.is_penalised and seen is not None:
        logits = penalised(logits, rows, seen)
    drawn = _draw(logits, rows, chance[:, None])
    if not rows.any_greedy:
        return drawn
    return torch.where(rows.greedy, _checked(*logits.max(dim=-1)), drawn)


def penalised(logits: Tensor, rows: SamplingRows, seen: Tensor) -> Tensor:
    """Divide the positive and multiply the negative logits of seen ids. logits: [B, vocab]; seen: bool [B, vocab]."""
    divided, multiplied = logits / rows.penalty, logits * rows.penalty
    # For penalties of 1 or more the smaller value is right for both signs, at a fifth of the cost of a comparison.
    changed = torch.where(logits > 0, divided, multiplied) if rows.has_bonus else torch.minimum(divided, multiplied)
    return torch.where(seen, changed, logits)


def probabilities(logits: Tensor, rows: SamplingRows, seen: Tensor | None) -> Tensor:
    """Return the distribution that `sample` draws from: float64 [B, vocab]. For tests."""
    if rows.is_penalised and seen is not None:
        logits = penalised(logits, rows, seen)
    values, ids = (logits / rows.temperature).sort(dim=-1, descending=True, stable=True)
    share, count, _ = _kept(values, values.logsumexp(dim=-1, keepdim=True), rows)
    share = share.masked_fill(torch.arange(share.shape[1], device=share.device) >= count, 0)
    share = share / share.sum(dim=-1, keepdim=True)
    spread = torch.zeros_like(share).scatter_(1, ids, share)
    one_hot = torch.zeros_like(share).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(rows.greedy[:, None], one_hot, spread)


def _draw(logits: Tensor, rows: SamplingRows, chance: Tensor) -> Tensor:
    scaled = logits / rows.temperature
    log_mass = scaled.logsumexp(dim=-1, keepdim=True)
    vocab = scaled.shape[1]
    if vocab <= HEAD:
        return _pick(*scaled.sort(dim=-1, descending=True, stable=True), log_mass, rows, chance)[0]
    drawn, settled = _pick(*_largest(scaled), log_mass, rows, chance)
    if not bool(settled.all()):
        rest = (~settled).nonzero()[:, 0]
        whole = scaled[rest].sort(dim=-1, descending=True, stable=True)
        drawn[rest] = _pick(*whole, log_mass[rest], rows.select(rest), chance[rest])[0]
    return drawn


def _largest(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the HEAD largest values of each row and their ids, equal ones in order of id. Both [B, HEAD].

    topk takes equal values in any order, and bfloat16 logits are often equal: with the ids sorted first, a stable
    sort by value is the one order that does not depend on the kernel. Among those equal to the last one topk may
    have left out lower ids; `_pick` does not settle on these.
    """
    values, ids = scaled.topk(HEAD, dim=-1, sorted=False)
    ids = ids.sort(dim=-1).values
    values, order = scaled.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _kept(values: Tensor, log_mass: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities of sorted values, how many are kept [B, 1], and their running sum in float64."""
    share = torch.exp((values - log_mass).to(torch.float64))
    total = share.cumsum(dim=-1)
    width = values.shape[1]
    keep = total - share
    if rows.has_top_k:
        # top-p counts within what top-k left, as the usual chain of processors does.
        limited = total.gather(1, (rows.top_k - 1).clamp(max=width - 1))
        mass = torch.where(rows.top_k >= TOP_K_OFF, 1.0, limited)
        keep = (keep < rows.top_p * mass) & (torch.arange(width, device=values.device) < rows.top_k)
    else:
        keep = keep < rows.top_p
    if rows.has_min_p:
        keep &= share >= rows.min_p * share[:, :1]
    return share, keep.sum(dim=-1, keepdim=True).clamp_(min=1), total


def _pick(values: Tensor, ids: Tensor, log_mass: Tensor, rows: SamplingRows, chance: Tensor) -> tuple[Tensor, Tensor]:
    """Invert the kept distribution. Returns the ids [B] and whether the sorted part sufficed to know them [B]."""
    width = values.shape[1]
    _, count, total = _kept(values, log_mass, rows)
    mass = total.gather(1, count - 1)
    closed = count < width
    if rows.has_top_k:
        closed = torch.where(rows.top_k >= TOP_K_OFF, closed, rows.top_k <= width)
    if rows.has_whole:
        is_whole = (rows.top_k >= TOP_K_OFF) & (rows.top_p > 1) & (rows.min_p <= 0)
        mass = torch.where(is_whole, 1.0, mass)
    at = (total <= chance * mass).sum(dim=-1, keepdim=True)
    place = torch.minimum(at, count - 1)
    if rows.has_whole:
        closed = closed | (is_whole & (at < width))
    drawn = ids.gather(1, place)[:, 0]
    best = values[:, :1]
    # Ties of the last value may be incomplete. With everything sorted no caller reads `settled`.
    closed = closed & (values.gather(1, place) > values[:, -1:])
    settled = closed | ~(best.abs() < _INFINITY)
    if rows.any_greedy:
        settled = settled | rows.greedy[:, None]
    return _checked(best[:, 0], drawn), settled[:, 0]


def _checked(best: Tensor, ids: Tensor) -> Tensor:
    # A comparison instead of isfinite, which is five kernels; this runs in every step.
    return torch.where(best.abs() < _INFINITY, ids, BAD_ROW)
