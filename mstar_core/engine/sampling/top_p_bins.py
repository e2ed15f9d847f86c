"""Top-p kernels, first narrowing: a histogram of a row by distance from its maximum, and the bins of an element.

A goal is a mass; its element is the first, from the largest key down, at which the running sum of shares reaches it.
A count bounds the mass of its bin from both sides, which is enough to say which bins can hold the element of a goal:
the bounds choose what is looked at, never what is drawn.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from mstar_core.layers.kernels.logit_keys import INFINITY, LEAST, distance_below

BINS: Final = 256

_PER_UNIT: Final = tl.constexpr(8.0)  # bins to a nat; a power of two, so that only the subtraction before it rounds
_ROUNDING: Final = tl.constexpr(1e-4)  # far above the error of a float32 exponential
_SLACK: Final = tl.constexpr(1e-12)  # far above the error of a float64 sum


@triton.jit
def bin_of(key, peak, bins: tl.constexpr):
    """Bin of a key: rises as keys fall, equal for equal keys, the same in every kernel."""
    return tl.minimum(distance_below(key, peak) * _PER_UNIT, bins - 1.0).to(tl.int32)


@triton.jit
def peak_of(peaks, row, chunks, cells: tl.constexpr):
    """The largest value of a row."""
    cell = tl.arange(0, cells)
    return tl.max(tl.load(peaks + (row * chunks + cell) * 2 + 1, mask=cell < chunks, other=-INFINITY), axis=0)


@triton.jit
def count_kernel(
    keys, peaks, greedy, histogram, vocab, chunks, bins: tl.constexpr, cells: tl.constexpr, chunk: tl.constexpr
):
    """Count the elements of each bin. histogram: int32 [rows, bins], added to."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    peak = peak_of(peaks, row, chunks, cells)
    if (tl.load(greedy + row) == 0) & (tl.abs(peak) < INFINITY):
        at = part * chunk + tl.arange(0, chunk)
        inside = at < vocab
        key = tl.load(keys + row * vocab + at, mask=inside, other=LEAST)
        found = tl.histogram(bin_of(key, peak, bins), bins, mask=inside)
        each = tl.arange(0, bins)
        tl.atomic_add(histogram + row * bins + each, found, mask=found != 0, sem="relaxed")


@triton.jit
def _possible(most, rest, quota, each, bins: tl.constexpr):
    """The first bin whose mass from the top, at most `most`, can reach the quota of all, when `rest` is below it."""
    return tl.min(tl.where((1.0 - quota + _SLACK) * most >= (quota - _SLACK) * rest, each, bins - 1), axis=0)


@triton.jit
def _certain(least, rest, quota, each, bins: tl.constexpr):
    """The first bin whose mass from the top, at least `least`, must reach the quota, when `rest` at most is below."""
    return tl.min(tl.where((1.0 - quota - _SLACK) * least >= (quota + _SLACK) * rest, each, bins - 1), axis=0)


@triton.jit
def choose_kernel(histogram, top_p, chance, chosen, bins: tl.constexpr):
    """First and last bin that can hold the drawn element, then those for the edge of the nucleus: int32 [rows, 4].

    Without top-p there is no edge, and its first bin lies after its last.
    """
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, bins)
    count = tl.load(histogram + row * bins + each).to(tl.float64)
    high = tl.exp(each.to(tl.float32) / -_PER_UNIT).to(tl.float64) * (1.0 + _ROUNDING)
    low = tl.exp((each.to(tl.float32) + 1.0) / -_PER_UNIT).to(tl.float64) * (1.0 - _ROUNDING)
    upper, lower = count * high, count * tl.where(each == bins - 1, 0.0, low)
    most, least = tl.cumsum(upper, axis=0), tl.cumsum(lower, axis=0)
    slack = tl.sum(upper, axis=0) * _SLACK
    rest_most = tl.sum(upper, axis=0) - most + slack
    rest_least = tl.maximum(tl.sum(lower, axis=0) - least - slack, 0.0)
    limit, at = tl.load(top_p + row), tl.load(chance + row)
    is_whole = limit > 1
    limit = tl.minimum(limit, 1.0)
    edge_first = _possible(most, rest_least, limit, each, bins)
    edge_last = _certain(least, rest_most, limit, each, bins)
    # The kept mass ends with the edge: at most all down to the last bin that can hold it.
    kept = tl.sum(tl.where(each == edge_last, most / tl.maximum(most + rest_least, 1e-30), 0.0), axis=0)
    kept = tl.where(is_whole, 1.0, tl.maximum(kept, limit))
    tl.store(chosen + row * 4, _possible(most, rest_least, at * limit, each, bins))
    tl.store(chosen + row * 4 + 1, _certain(least, rest_most, at * kept, each, bins))
    tl.store(chosen + row * 4 + 2, tl.where(is_whole, bins, edge_first))
    tl.store(chosen + row * 4 + 3, tl.where(is_whole, -1, edge_last))
