"""Draws ids from logits in a fixed number of kernels, without asking the host: the sampler inside captured steps.

The same distribution and the same random numbers as `sampler.sample` for rows that use temperature, top-p, penalty or
the arg-max. Nothing is sorted: the edge of the nucleus and then the drawn element are found by searching the float32
number line, sixteen thresholds to a pass. A sum of shares differs from the sorted running sum by rounding only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

WAYS: Final = 16
PASSES: Final = 8  # 16 ** 8 = 2 ** 32, every float32
SPLITS: Final = 32
BLOCK: Final = 256
_LEAST: Final = tl.constexpr(-(1 << 31))
_INFINITY: Final = tl.constexpr(float("inf"))


@triton.jit
def _key(x):
    """int32 that orders as the float32 does; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _scale_kernel(
    logits, seen, slots, penalty, temperature, scaled, peak, place, mass,
    vocab, span, seen_stride, is_penalised: tl.constexpr, block: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """Penalise and divide by the temperature; peak, place (of the unscaled) and mass (of the scaled) per split."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    heat = tl.load(temperature + row)
    if is_penalised:
        slot = tl.load(slots + row)
        weight = tl.load(penalty + row)
    # Every lane keeps its own maximum and sum; they meet once, at the end.
    lane = tl.arange(0, block)
    best = tl.full((block,), -_INFINITY, tl.float32)
    where = tl.full((block,), 0x7FFFFFFF, tl.int32)
    top = tl.full((block,), -_INFINITY, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(split * span, tl.minimum((split + 1) * span, vocab), block):
        at = start + lane
        inside = (at < vocab) & (at < (split + 1) * span)
        x = tl.load(logits + row * vocab + at, mask=inside, other=-_INFINITY)
        x = tl.where(x != x, _INFINITY, x)
        if is_penalised:
            known = tl.load(seen + slot * seen_stride + at, mask=inside, other=0) != 0
            changed = tl.where(x > 0, tl.div_rn(x, weight), x * weight)
            x = tl.where(known & inside, changed, x)
        where = tl.where(x > best, at, where)
        best = tl.maximum(best, x)
        y = tl.div_rn(x, heat)
        tl.store(scaled + row * vocab + at, y, mask=inside)
        higher = tl.maximum(top, y)
        safe = tl.where(higher == -_INFINITY, 0.0, higher)
        total = total * tl.exp(top - safe) + tl.where(inside, tl.exp(y - safe), 0.0)
        top = higher
    high, level = tl.max(best, axis=0), tl.max(top, axis=0)
    safe = tl.where(level == -_INFINITY, 0.0, level)
    cell = row * splits + split
    tl.store(peak + cell * 2, high)
    tl.store(peak + cell * 2 + 1, level)
    tl.store(place + cell, tl.min(tl.where(best == high, where, 0x7FFFFFFF), axis=0))
    tl.store(mass + cell, tl.sum(total.to(tl.float64) * tl.exp((top - safe).to(tl.float64)), axis=0))


@triton.jit
def _level_kernel(peak, place, mass, log_mass, greedy_id, best_of, splits: tl.constexpr):
    """Per row: log of the sum of exponentials, the arg-max and its logit."""
    row = tl.program_id(0)
    at = row * splits + tl.arange(0, splits)
    best, top = tl.load(peak + at * 2), tl.load(peak + at * 2 + 1)
    highest = tl.max(best, axis=0)
    tl.store(greedy_id + row, tl.min(tl.where(best == highest, tl.load(place + at), 0x7FFFFFFF), axis=0).to(tl.int64))
    tl.store(best_of + row, highest)
    level = tl.max(top, axis=0)
    safe = tl.where(level == -_INFINITY, 0.0, level)
    kept = tl.where(top == -_INFINITY, 0.0, tl.exp((top - safe).to(tl.float64)))
    tl.store(log_mass + row, (safe.to(tl.float64) + tl.log(tl.sum(tl.load(mass + at) * kept, axis=0))).to(tl.float32))


@triton.jit
def _base(state, partial, goal, row, step, inclusive: tl.constexpr, ways: tl.constexpr, splits: tl.constexpr):
    """Where this pass begins: the highest threshold of the pass before whose mass still reaches the goal."""
    start = tl.load(state + row).to(tl.int64)
    way = tl.arange(0, ways)
    cells = partial + (row * splits + tl.arange(0, splits)[:, None]) * ways + way[None, :]
    above = tl.sum(tl.load(cells), axis=0)
    reached = above >= goal if inclusive else above > goal
    return start + step * tl.max(tl.where(reached, way, 0), axis=0).to(tl.int64)


@triton.jit
def _search_kernel(
    scaled, log_mass, goals, states, partials, vocab, span, rows, level, step, wider,
    inclusive: tl.constexpr, ways: tl.constexpr, block: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """One pass: the mass at or above each of the thresholds, per split. level 0 begins, 1.. narrow by four bits.

    step: between thresholds here; wider: between those of the pass before.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    goal = tl.load(goals + row)
    base = tl.full((), _LEAST, tl.int64)
    if level > 0:
        state, partial = states + (level - 1) * rows, partials + (level - 1) * rows * splits * ways
        base = _base(state, partial, goal, row, wider, inclusive, ways, splits)
    if split == 0:
        tl.store(states + level * rows + row, base.to(tl.int32))
    # The last pass asks for two neighbours only: what is at or above the edge, and what is above it.
    way = tl.arange(0, ways)
    limit = tl.minimum(base + step * way.to(tl.int64), 0x7FFFFFFF).to(tl.int32)
    shift = tl.load(log_mass + row)
    total = tl.zeros((block, ways), tl.float32)
    for start in range(split * span, tl.minimum((split + 1) * span, vocab), block):
        at = start + tl.arange(0, block)
        inside = (at < vocab) & (at < (split + 1) * span)
        x = tl.load(scaled + row * vocab + at, mask=inside, other=-_INFINITY)
        share = tl.where(inside, tl.exp(x - shift), 0.0)
        total += tl.where(_key(x)[:, None] >= limit[None, :], share[:, None], 0.0)
    tl.store(partials + ((level * rows + row) * splits + split) * ways + way, tl.sum(total.to(tl.float64), axis=0))


@triton.jit
def _edge_kernel(
    log_mass, states, partials, top_p, chance, goals, lowest, quota, rows, passes,
    ways: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """After the search of the nucleus: its lowest key, how many ties of it stay, and the mass to draw at."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(states + passes * rows + row)
    way = tl.arange(0, ways)
    cells = partials + ((passes * rows + row) * splits + tl.arange(0, splits)[:, None]) * ways + way[None, :]
    above = tl.sum(tl.sum(tl.load(cells), axis=0) * (way == 1), axis=0)
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    share = tl.exp(bits.to(tl.float32, bitcast=True) - tl.load(log_mass + row)).to(tl.float64)
    limit = tl.load(top_p + row)
    ties = tl.maximum(tl.ceil((limit - above) / share), 1.0)
    is_whole = limit > 1
    tl.store(goals + row, tl.load(chance + row) * tl.where(is_whole, 1.0, above + ties * share))
    tl.store(lowest + row, tl.where(is_whole, _LEAST, key))
    tl.store(quota + row, tl.where(is_whole, 2147483647.0, ties).to(tl.int64))


@triton.jit
def _count_kernel(scaled, states, lowest, counts, vocab, span, rows, passes, block: tl.constexpr, splits: tl.constexpr):
    """Ties of the drawn key per split."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    key = tl.maximum(tl.load(states + passes * rows + row), tl.load(lowest + row))
    found = tl.zeros((block,), tl.int32)
    for start in range(split * span, tl.minimum((split + 1) * span, vocab), block):
        at = start + tl.arange(0, block)
        inside = (at < vocab) & (at < (split + 1) * span)
        x = tl.load(scaled + row * vocab + at, mask=inside, other=0.0)
        found += (inside & (_key(x) == key)).to(tl.int32)
    tl.store(counts + row * splits + split, tl.sum(found, axis=0))


@triton.jit
def _draw_kernel(
    scaled, log_mass, states, partials, goals, lowest, quota, counts, greedy, greedy_id, best_of, drawn,
    vocab, span, rows, passes, ways: tl.constexpr, block: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """The id at the drawn key; among ties the one that the remaining mass points at, in order of index."""
    row = tl.program_id(0).to(tl.int64)
    searched = tl.load(states + passes * rows + row)
    floor = tl.load(lowest + row)
    key = tl.maximum(searched, floor)
    way = tl.arange(0, ways)
    cells = partials + ((passes * rows + row) * splits + tl.arange(0, splits)[:, None]) * ways + way[None, :]
    above = tl.sum(tl.sum(tl.load(cells), axis=0) * (way == 1), axis=0)
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    share = tl.exp(bits.to(tl.float32, bitcast=True) - tl.load(log_mass + row)).to(tl.float64)
    wanted = tl.maximum(tl.floor((tl.load(goals + row) - above) / share), 0.0)
    last = tl.load(quota + row) - 1
    wanted = tl.where(searched < floor, 1.0e9, wanted)
    tie = tl.where(key == floor, tl.minimum(wanted, last.to(tl.float64)), wanted).to(tl.int64)
    split = tl.arange(0, splits)
    per_split = tl.load(counts + row * splits + split).to(tl.int64)
    tie = tl.minimum(tie, tl.sum(per_split, axis=0) - 1)
    before = tl.cumsum(per_split, axis=0) - per_split
    held = (before <= tie) & (tie < before + per_split)
    chosen = tl.max(tl.where(held, split, 0), axis=0)
    left = tie - tl.max(tl.where(held, before, 0), axis=0)
    found = tl.full((), -1, tl.int64)
    for start in range(chosen * span, tl.minimum((chosen + 1) * span, vocab), block):
        at = start + tl.arange(0, block)
        inside = (at < vocab) & (at < (chosen + 1) * span)
        x = tl.load(scaled + row * vocab + at, mask=inside, other=0.0)
        equal = (inside & (_key(x) == key)).to(tl.int64)
        rank = tl.cumsum(equal, axis=0)
        here = tl.max(tl.where((equal != 0) & (rank == left + 1), at.to(tl.int64), -1), axis=0)
        found = tl.maximum(found, here)
        left -= tl.sum(equal, axis=0)
        # Ranks are counted within a block: once found, nothing later may match again.
        left = tl.where(here >= 0, -1, left)
    chose = tl.where(tl.load(greedy + row) != 0, tl.load(greedy_id + row), found)
    tl.store(drawn + row, tl.where(tl.abs(tl.load(best_of + row)) < _INFINITY, chose, -1))


class NucleusSampler:
    """Buffers for drawing `rows` ids of a vocabulary; one call is always the same kernels, so it can be captured."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        def made(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows, self.vocab = rows, vocab
        self.span = triton.cdiv(triton.cdiv(vocab, SPLITS), BLOCK) * BLOCK
        self.scaled = made(rows, vocab, dtype=torch.float32)
        self.peak = made(rows, SPLITS, 2, dtype=torch.float32)
        self.place = made(rows, SPLITS, dtype=torch.int32)
        self.mass = made(rows, SPLITS, dtype=torch.float64)
        self.log_mass = made(rows, dtype=torch.float32)
        self.greedy_id = made(rows, dtype=torch.int64)
        self.best_of = made(rows, dtype=torch.float32)
        self.states = made(PASSES + 1, rows, dtype=torch.int32)
        self.partials = made(PASSES + 1, rows, SPLITS, WAYS, dtype=torch.float64)
        self.goals = made(rows, dtype=torch.float64)
        self.lowest = made(rows, dtype=torch.int32)
        self.quota = made(rows, dtype=torch.int64)
        self.counts = made(rows, SPLITS, dtype=torch.int32)

    def draw(
        self, logits: Tensor, *, seen: Tensor | None, slots: Tensor, penalty: Tensor, temperature: Tensor,
        top_p: Tensor, greedy: Tensor, chance: Tensor,
    ) -> Tensor:  # fmt: skip
        """Draw one id per row: int64 [rows], BAD_ROW where a row has no finite maximum.

        logits: float32 [rows, vocab]; seen: bool [slots, vocab] or None without a penalty; slots: int64 [rows];
        penalty, temperature: float32 [rows]; top_p, chance: float64 [rows], top_p above 1 = off; greedy: bool [rows].
        """
        rows, grid = self.rows, (self.rows, SPLITS)
        drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
        marks = logits if seen is None else seen.view(torch.uint8)
        _scale_kernel[grid](
            logits, marks, slots, penalty, temperature, self.scaled, self.peak, self.place, self.mass,
            self.vocab, self.span, marks.stride(0), is_penalised=seen is not None, block=BLOCK, splits=SPLITS,
        )  # fmt: skip
        _level_kernel[(rows,)](
            self.peak, self.place, self.mass, self.log_mass, self.greedy_id, self.best_of, splits=SPLITS
        )
        self._search(top_p, inclusive=True)
        _edge_kernel[(rows,)](
            self.log_mass, self.states, self.partials, top_p, chance, self.goals, self.lowest, self.quota,
            rows, PASSES, ways=WAYS, splits=SPLITS,
        )  # fmt: skip
        self._search(self.goals, inclusive=False)
        _count_kernel[grid](
            self.scaled, self.states, self.lowest, self.counts, self.vocab, self.span, rows, PASSES,
            block=BLOCK, splits=SPLITS,
        )  # fmt: skip
        _draw_kernel[(rows,)](
            self.scaled, self.log_mass, self.states, self.partials, self.goals, self.lowest, self.quota, self.counts,
            greedy.view(torch.uint8), self.greedy_id, self.best_of, drawn, self.vocab, self.span, rows, PASSES,
            ways=WAYS, block=BLOCK, splits=SPLITS,
        )  # fmt: skip
        return drawn

    def _search(self, goals: Tensor, *, inclusive: bool) -> None:
        for level in range(PASSES + 1):
            _search_kernel[(self.rows, SPLITS)](
                self.scaled, self.log_mass, goals, self.states, self.partials, self.vocab, self.span, self.rows, level,
                1 << max(28 - 4 * level, 0), 1 << min(32 - 4 * level, 28),
                inclusive=inclusive, ways=WAYS, block=BLOCK, splits=SPLITS,
            )  # fmt: skip
