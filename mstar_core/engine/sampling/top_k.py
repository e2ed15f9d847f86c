"""Top-k and min-p truncation of captured sampling, in one Triton kernel before those of top-p. Needs triton.

One program per row narrows to the key of the k-th element by counting, then replaces the keys of all elements that the
rules leave out by that of minus infinity, whose mass is zero. Rows without these rules return at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mstar_core.engine.sampling.top_p_bins import peak_of
from mstar_core.layers.kernels.logit_keys import INFINITY, LEAST, OUTSIDE, ordered, share_of


@triton.jit
def _count(keys, row, vocab, limit, chunk: tl.constexpr):
    """Count the keys of a row at or above a limit."""
    found = tl.zeros((chunk,), tl.int32)
    for start in range(0, vocab, chunk):
        at = start + tl.arange(0, chunk)
        key = tl.load(keys + row * vocab + at, mask=at < vocab, other=OUTSIDE)
        found += (key.to(tl.int64) >= limit).to(tl.int32)
    return tl.sum(found, axis=0)


@triton.jit
def truncate_kernel(
    keys, peaks, greedy, top_k, min_p, top_p, limits, vocab, chunks, unit, cells: tl.constexpr, chunk: tl.constexpr
):
    """Apply top-k and min-p to the keys of a row. limits: float64 [rows], what top-p is of the mass that is left.

    top-p counts within the mass that top-k leaves, and min-p cuts what top-p keeps, as in `sampler`: where min-p leaves
    less mass, the limit grows by as much.
    """
    row = tl.program_id(0).to(tl.int64)
    count, floor, limit = tl.load(top_k + row), tl.load(min_p + row), tl.load(top_p + row)
    peak = peak_of(peaks, row, chunks, cells)
    applies = (tl.load(greedy + row) == 0) & (tl.abs(peak) < INFINITY) & ((count > 0) | (floor > 0))
    if applies:
        # The largest limit that at least `count` keys reach: 33 bits hold every difference of two keys.
        low, high = tl.full((), LEAST, tl.int64), ordered(peak).to(tl.int64)
        if (count > 0) & (count < vocab):
            while low < high:
                middle = low + (high - low + 1) // 2
                if _count(keys, row, vocab, middle, chunk) >= count:
                    low = middle
                else:
                    high = middle - 1
            edge = low
            ties = count - _count(keys, row, vocab, edge + 1, chunk)
        else:
            edge = tl.full((), LEAST, tl.int64)
            ties = tl.full((), 1, tl.int64) * vocab
        before = tl.zeros((), tl.int64)
        mass, kept = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        for start in range(0, vocab, chunk):
            at = start + tl.arange(0, chunk)
            inside = at < vocab
            key = tl.load(keys + row * vocab + at, mask=inside, other=OUTSIDE)
            # Of the elements at the edge the first ones stay, in order of their place.
            equal = inside & (key.to(tl.int64) == edge)
            order = before + tl.cumsum(equal.to(tl.int64), axis=0)
            before += tl.sum(equal.to(tl.int64), axis=0)
            ranked = inside & ((key.to(tl.int64) > edge) | (equal & (order <= ties)))
            share = tl.where(ranked, share_of(tl.maximum(key, LEAST), peak, unit), 0)
            stays = ranked & (share.to(tl.float64) >= floor * unit)
            mass += tl.sum(share, axis=0)
            kept += tl.sum(tl.where(stays, share, 0), axis=0)
            tl.store(keys + row * vocab + at, tl.full((chunk,), LEAST, tl.int32), mask=inside & (stays == 0))
        if limit <= 1:
            limit = limit * mass.to(tl.float64) / tl.maximum(kept, 1).to(tl.float64)
            limit = tl.where(limit < 1, limit, 2.0)
    tl.store(limits + row, limit)
