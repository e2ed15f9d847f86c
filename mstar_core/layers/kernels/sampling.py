"""Triton kernel that draws one id per row from top-k and top-p truncated logits, one program per row.

For vocabularies of at most `LARGEST` ids, whose row fits the registers of one program. With a top-k of at most
`FEW` ids the kernel lists these and compares every pair; otherwise it narrows intervals of keys by their masses.
Masses are sums of integers, so a row's id depends on nothing but the row. Called through `layers.sampling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.launch import launch_options
from mstar_core.layers.kernels.logit_keys import INFINITY, LEAST, OUTSIDE, ordered, share_of

if TYPE_CHECKING:
    from torch import Tensor

LARGEST: Final = 4096
"""Most ids of a vocabulary."""

FEW: Final = 64
"""Largest top-k whose ids are compared in pairs."""

UNIT: Final = float(1 << 44)
"""Share of the most likely id: LARGEST of them fit an int64 with room to spare."""

_TOP: Final = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _edge_of_count(key, inside, count, peak_key):
    """Return the largest key that at least `count` keys reach: int64."""
    low, high = tl.full((), LEAST, tl.int64), peak_key.to(tl.int64)
    while low < high:
        # Four thresholds at a time. Four counts of at most 4096 share an int64, so one sum has them all.
        span = high - low
        first, second = low + (span + 4) // 5, low + (2 * span + 4) // 5
        third, fourth = low + (3 * span + 4) // 5, low + (4 * span + 4) // 5
        wide = key.to(tl.int64)
        packed = (wide >= first).to(tl.int64) + ((wide >= second).to(tl.int64) << 16)
        packed += ((wide >= third).to(tl.int64) << 32) + ((wide >= fourth).to(tl.int64) << 48)
        found = tl.sum(tl.where(inside, packed, 0), axis=0)
        if (found >> 48) & 0xFFFF >= count:
            low = fourth
        elif (found >> 32) & 0xFFFF >= count:
            low, high = third, fourth - 1
        elif (found >> 16) & 0xFFFF >= count:
            low, high = second, third - 1
        elif found & 0xFFFF >= count:
            low, high = first, second - 1
        else:
            high = first - 1
    return low


@triton.jit
def _edge_of_mass(key, share, goal, peak_key):
    """Return the largest key down to which the mass reaches the goal, and the mass above it: int64."""
    low, high = tl.full((), LEAST, tl.int64), peak_key.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum(tl.where(key >= middle, share, 0), axis=0) >= goal:
            low = middle
        else:
            high = middle - 1
    return low, tl.sum(tl.where(key > low, share, 0), axis=0)


@triton.jit
def _kept_mass(before, share, inside, top_p, total):
    """Return the mass of the elements that top-p keeps. before: mass above each element."""
    limit = tl.where(top_p < 1, top_p, 2.0).to(tl.float64) * total.to(tl.float64)
    stays = inside & ((before.to(tl.float64) < limit) | (before == 0))
    return tl.sum(tl.where(stays, share, 0), axis=0)


@triton.jit
def _goal(mass, chance):
    """Return the mass that the sum up to the drawn element must exceed: below `mass`."""
    return tl.minimum(tl.floor(chance.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), mass - 1)


@triton.jit
def _ranks(key, at, inside, count, peak_key):
    """Return which elements are among the `count` largest; of equal ones the lowest ids are."""
    edge = _edge_of_count(key, inside, count, peak_key)
    above, equal = inside & (key > edge), inside & (key == edge)
    ties = count - tl.sum(above.to(tl.int32), axis=0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= ties))


@triton.jit
def _pair_draw(key, at, ranked, count, peak, top_p, chance, listed, unit, few: tl.constexpr):
    """Draw among at most `few` ranked elements by comparing all pairs. listed: int64 [few] of scratch memory."""
    place = tl.cumsum(ranked.to(tl.int32), axis=0) - 1
    # Larger numbers come first: by key, then by id.
    order = (key.to(tl.int64) << 32) | (at ^ _TOP).to(tl.int64)
    tl.store(listed + place, order, mask=ranked)
    tl.debug_barrier()
    lane = tl.arange(0, few)
    mine = tl.load(listed + lane, mask=lane < count, other=0)
    inside = lane < count
    share = tl.where(inside, share_of(tl.where(inside, (mine >> 32).to(tl.int32), LEAST), peak, unit), 0)
    before = tl.sum(tl.where(mine[None, :] < mine[:, None], share[:, None], 0), axis=0)
    total = tl.sum(share, axis=0)
    goal = _goal(_kept_mass(before, share, inside, top_p, total), chance)
    hit = inside & (before <= goal) & (goal < before + share)
    return tl.sum(tl.where(hit, (mine & _TOP) ^ _TOP, 0), axis=0)


@triton.jit
def _search_draw(key, at, ranked, peak, peak_key, top_p, chance, unit):
    """Draw among all ranked elements by narrowing keys."""
    share = tl.where(ranked, share_of(tl.maximum(key, LEAST), peak, unit), 0)
    kept = tl.sum(share, axis=0)
    if top_p < 1:
        limit = tl.maximum(tl.ceil(top_p.to(tl.float64) * kept.to(tl.float64)).to(tl.int64), 1)
        edge, above = _edge_of_mass(key, share, limit, peak_key)
        each = tl.max(tl.where(key == edge, share, 0), axis=0)
        kept = above + (limit - above + each - 1) // tl.maximum(each, 1) * each
    goal = _goal(kept, chance)
    edge, above = _edge_of_mass(key, share, goal + 1, peak_key)
    equal = ranked & (key == edge)
    each = tl.max(tl.where(equal, share, 0), axis=0)
    tie = (goal - above) // tl.maximum(each, 1) + 1
    return tl.min(tl.where(equal & (tl.cumsum(equal.to(tl.int32), axis=0) == tie), at, _TOP), axis=0).to(tl.int64)


@triton.jit
def draw_kernel(
    logits,
    uniform,
    temperature,
    top_k,
    top_p,
    listed,
    drawn,
    vocab,
    stride,
    uniform_stride,
    unit,
    block: tl.constexpr,
    few: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Draw one id of a row. listed: int64 [rows, few] of scratch memory; drawn: int64 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < vocab
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    heat, limit, chance = tl.load(temperature + row), tl.load(top_p + row), tl.load(uniform + row * uniform_stride)
    count = tl.load(top_k + row).to(tl.int32)
    x = tl.load(logits + row * stride + at, mask=inside, other=-INFINITY).to(tl.float32)
    x = tl.where(x != x, INFINITY, x)
    best = tl.max(x, axis=0)
    found = tl.min(tl.where(inside & (x == best), at, _TOP), axis=0).to(tl.int64)
    is_good = tl.abs(best) < INFINITY
    if is_good & (heat > 0):
        y = tl.div_rn(x, tl.zeros_like(x) + heat)
        peak = tl.max(y, axis=0)
        is_good = tl.abs(peak) < INFINITY
        if is_good:
            key = tl.where(inside, ordered(y), OUTSIDE)
            peak_key = tl.max(key, axis=0)
            is_cut = (count > 0) & (count < vocab)
            ranked = inside
            if is_cut:
                ranked = _ranks(key, at, inside, count, peak_key)
            if is_cut & (count <= few):
                found = _pair_draw(key, at, ranked, count, peak, limit, chance, listed + row * few, unit, few)
            else:
                found = _search_draw(key, at, ranked, peak, peak_key, limit, chance, unit)
    tl.store(drawn + row, tl.where(is_good, found, -1))


def draw(logits: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Draw one id per row, as `layers.sampling.draw` does, on CUDA. Rows of the logits have unit stride."""
    rows, vocab = logits.shape
    block = max(FEW, triton.next_power_of_2(vocab))
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    listed = torch.empty((rows, FEW), dtype=torch.int64, device=logits.device)
    rules = (rule.contiguous() for rule in (temperature, top_k, top_p))
    draw_kernel[(rows,)](
        logits,
        uniform,
        *rules,
        listed,
        drawn,
        vocab,
        logits.stride(0),
        uniform.stride(0),
        UNIT,
        block=block,
        few=FEW,
        num_warps=max(4, min(8, block // 512)),
        **launch_options(logits.device),
    )
    return drawn
