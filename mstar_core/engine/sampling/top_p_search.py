"""Top-p kernels, second narrowing: from the elements of the bins to one key and one place.

A bracket is an interval of keys, both ends in, with the mass above it, that is known to hold the element of a goal.
The masses of a row, int64 [4 + ways]: above the drawn element's bracket, above the edge's, of all, unused; then the
sums of the second narrowing. Its extents, int32 [4]:
-1 - low and high of both brackets, the drawn element's first. Its
state after the second narrowing, int64 [8]: bracket of the drawn element (low, high, mass above), bracket of the edge
(the same), the edge's goal, one unused. Without top-p the edge's bracket is empty and its goal is the whole mass.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from mstar_core.engine.sampling.top_p_bins import bin_of, peak_of
from mstar_core.layers.kernels.logit_keys import INFINITY, LEAST, OUTSIDE, share_of

STATE: Final = 8
"""Numbers in the state of a row."""

SUMS: Final = 4
"""Masses of a row before those of the second narrowing."""

_TOP: Final = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _fine(extents, way, ways: tl.constexpr):
    """Thresholds of the second narrowing: half for each bracket, the first just above it and the last its low end."""
    steps: tl.constexpr = ways // 2 - 1
    side, step = way // (ways // 2), way % (ways // 2)
    low, high = -1 - tl.load(extents + side * 2).to(tl.int64), tl.load(extents + side * 2 + 1).to(tl.int64)
    inner = low + (high - low) * (steps - step) // steps
    return tl.where(step == 0, high + 1, inner)


@triton.jit
def _at(values, way, index):
    return tl.sum(tl.where(way == index, values, 0), axis=0)


@triton.jit
def _first(sums, way, goal, ways: tl.constexpr):
    """The first threshold at which the mass reaches the goal."""
    return tl.min(tl.where(sums >= goal, way, ways - 1), axis=0)


@triton.jit
def _goal(mass, chance):
    """The drawn element's goal for the kept mass: the running sum must exceed chance * mass."""
    return tl.minimum(tl.floor(chance * mass.to(tl.float64)).to(tl.int64) + 1, mass)


@triton.jit
def _edge_goal(total, limit):
    """Mass that the top-p set must reach; the whole mass without top-p."""
    wanted = tl.ceil(tl.minimum(limit, 1.0) * total.to(tl.float64)).to(tl.int64)
    return tl.where(limit > 1, total, tl.minimum(wanted, total))


@triton.jit
def gather_kernel(
    keys,
    left,
    peaks,
    greedy,
    chosen,
    masses,
    counts,
    extents,
    vocab,
    chunks,
    unit,
    bins: tl.constexpr,
    cells: tl.constexpr,
    chunk: tl.constexpr,
    ways: tl.constexpr,
):
    """List the places in the chosen bins, in no order; add up the mass of all and that above both brackets."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    peak = peak_of(peaks, row, chunks, cells)
    if (tl.load(greedy + row) == 0) & (tl.abs(peak) < INFINITY):
        first, last = tl.load(chosen + row * 4), tl.load(chosen + row * 4 + 1)
        edge_first, edge_last = tl.load(chosen + row * 4 + 2), tl.load(chosen + row * 4 + 3)
        at = part * chunk + tl.arange(0, chunk)
        inside = at < vocab
        key = tl.load(keys + row * vocab + at, mask=inside, other=LEAST)
        share = tl.where(inside, share_of(key, peak, unit), 0)
        place = bin_of(key, peak, bins)
        each = tl.arange(0, 4)
        above = tl.sum(tl.where(place < first, share, 0), axis=0)
        edge_above = tl.where(edge_last < 0, 0, tl.sum(tl.where(place < edge_first, share, 0), axis=0))
        sums = tl.where(each == 0, above, tl.where(each == 1, edge_above, tl.sum(share, axis=0)))
        tl.atomic_add(masses + row * (4 + ways) + each, sums, mask=(each < 3) & (sums != 0), sem="relaxed")
        held = inside & (place >= first) & (place <= last)
        edged = inside & (place >= edge_first) & (place <= edge_last)
        many = tl.sum((held | edged).to(tl.int32), axis=0)
        if many > 0:
            base = tl.atomic_add(counts + row * 2, many, sem="relaxed")
            to = base + tl.cumsum((held | edged).to(tl.int32), axis=0) - 1
            tl.store(left + row * vocab + to, at, mask=held | edged)
            # Lows are kept with their sign turned, so that one operation widens all four ends.
            ends = tl.where(each == 0, tl.max(tl.where(held, -1 - key, OUTSIDE), axis=0), OUTSIDE)
            ends = tl.where(each == 1, tl.max(tl.where(held, key, OUTSIDE), axis=0), ends)
            ends = tl.where(each == 2, tl.max(tl.where(edged, -1 - key, OUTSIDE), axis=0), ends)
            ends = tl.where(each == 3, tl.max(tl.where(edged, key, OUTSIDE), axis=0), ends)
            tl.atomic_max(extents + row * 4 + each, ends, mask=ends != OUTSIDE, sem="relaxed")


@triton.jit
def _keys_at(keys, taken, row, at, count, vocab):
    """Places in the row of the elements `at` of the list, and their keys; outside of the list a key below all."""
    inside = at < count
    place = tl.load(taken + row * vocab + at, mask=inside, other=0)
    return place, tl.load(keys + row * vocab + place, mask=inside, other=OUTSIDE)


@triton.jit
def narrow_kernel(
    keys,
    taken,
    peaks,
    greedy,
    masses,
    counts,
    extents,
    vocab,
    chunks,
    unit,
    cells: tl.constexpr,
    chunk: tl.constexpr,
    ways: tl.constexpr,
):
    """Add up, over what the bins left, the mass at or above each threshold."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts + row * 2)
    if part * chunk < count:
        peak = peak_of(peaks, row, chunks, cells)
        way = tl.arange(0, ways)
        sums = tl.zeros((ways,), tl.int64)
        for start in range(part * chunk, count, tl.num_programs(0) * chunk):
            _, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab)
            share = tl.where(key >= LEAST, share_of(tl.maximum(key, LEAST), peak, unit), 0)
            for each in tl.static_range(ways):
                limit = _fine(extents + row * 4, tl.full((), each, tl.int32), ways)
                sums += tl.where(way == each, tl.sum(tl.where(key >= limit, share, 0), axis=0), 0)
        tl.atomic_add(masses + row * (4 + ways) + 4 + way, sums, mask=sums != 0, sem="relaxed")


@triton.jit
def _refined(masses, extents, limit, chance, ways: tl.constexpr):
    """State of a row from the sums of the second narrowing."""
    half: tl.constexpr = ways // 2
    way = tl.arange(0, half)
    drawn, edged = tl.load(masses + 4 + way), tl.load(masses + 4 + half + way)
    above, edge_above, total = tl.load(masses), tl.load(masses + 1), tl.load(masses + 2)
    # The first threshold stands above the bracket: what lies there is in the mass above it already.
    drawn = tl.where(way == 0, -1, drawn - _at(drawn, way, 0) + above)
    edged = tl.where(way == 0, -1, edged - _at(edged, way, 0) + edge_above)
    limits, edge_limits = _fine(extents, way, ways), _fine(extents, half + way, ways)
    is_whole = limit > 1
    edge_goal = _edge_goal(total, limit)
    edge = _first(edged, way, edge_goal, half)
    kept = tl.where(is_whole, edge_goal, _at(edged, way, edge))
    least, most = _first(drawn, way, _goal(edge_goal, chance), half), _first(drawn, way, _goal(kept, chance), half)
    low = _at(limits, way, most)
    # Just below the threshold before; the first one stands just above the bracket.
    high = _at(limits, way, least - 1) - 1
    above = tl.where(least == 1, above, _at(drawn, way, least - 1))
    edge_high = _at(edge_limits, way, edge - 1) - 1
    edge_above = tl.where(edge == 1, edge_above, _at(edged, way, edge - 1))
    edge_low = tl.where(is_whole, edge_high + 1, _at(edge_limits, way, edge))
    return low, high, above, edge_low, edge_high, edge_above, edge_goal


@triton.jit
def collect_kernel(
    keys, taken, left, masses, counts, extents, states, top_p, chance, vocab, chunk: tl.constexpr, ways: tl.constexpr
):
    """List those of a list whose keys lie in a refined bracket, in no order; write the row's state."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts + row * 2)
    if part * chunk < count:
        low, high, above, edge_low, edge_high, edge_above, goal = _refined(
            masses + row * (4 + ways), extents + row * 4, tl.load(top_p + row), tl.load(chance + row), ways
        )
        if part == 0:
            own = states + row * 8
            tl.store(own, low)
            tl.store(own + 1, high)
            tl.store(own + 2, above)
            tl.store(own + 3, edge_low)
            tl.store(own + 4, edge_high)
            tl.store(own + 5, edge_above)
            tl.store(own + 6, goal)
        for start in range(part * chunk, count, tl.num_programs(0) * chunk):
            place, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab)
            held = (key >= low) & (key <= high) | (key >= edge_low) & (key <= edge_high)
            many = tl.sum(held.to(tl.int32), axis=0)
            if many > 0:
                base = tl.atomic_add(counts + row * 2 + 1, many, sem="relaxed")
                to = base + tl.cumsum(held.to(tl.int32), axis=0) - 1
                tl.store(left + row * vocab + to, place, mask=held)


@triton.jit
def _extent(keys, taken, row, count, low, high, vocab, chunk: tl.constexpr):
    """The least and the largest key that are there between low and high."""
    least, most = tl.full((chunk,), _TOP, tl.int32), tl.full((chunk,), OUTSIDE, tl.int32)
    for start in range(0, count, chunk):
        _, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab)
        held = (key >= low) & (key <= high)
        least = tl.minimum(least, tl.where(held, key, _TOP))
        most = tl.maximum(most, tl.where(held, key, OUTSIDE))
    return tl.min(least, axis=0).to(tl.int64), tl.max(most, axis=0).to(tl.int64)


@triton.jit
def _searched(keys, taken, row, count, low, high, above, goal, peak, unit, vocab, chunk: tl.constexpr):
    """Narrow a bracket to one key. Returns the key and the mass above it."""
    ways: tl.constexpr = 16
    way = tl.arange(0, ways)
    low, high = _extent(keys, taken, row, count, low, high, vocab, chunk)
    while low < high:
        sums = tl.zeros((ways,), tl.int64)
        limits = high - (high - low) * way // (ways - 1)
        for start in range(0, count, chunk):
            _, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab)
            inside = (key >= low) & (key <= high)
            share = tl.where(inside, share_of(tl.maximum(key, LEAST), peak, unit), 0)
            for each in tl.static_range(ways):
                limit = high - (high - low) * each // (ways - 1)
                sums += tl.where(way == each, tl.sum(tl.where(key >= limit, share, 0), axis=0), 0)
        sums += above
        found = _first(sums, way, goal, ways)
        above = tl.where(found == 0, above, _at(sums, way, found - 1))
        high = tl.where(found == 0, high, _at(limits, way, found - 1) - 1)
        low = _at(limits, way, found)
        low, high = _extent(keys, taken, row, count, low, high, vocab, chunk)
    return low.to(tl.int32), above


@triton.jit
def _tied(keys, taken, row, count, wanted, tie, vocab, chunk: tl.constexpr):
    """The place of the tie-th, in order of place, of the elements with one key."""
    many = tl.zeros((chunk,), tl.int32)
    least = tl.full((chunk,), _TOP, tl.int32)
    for start in range(0, count, chunk):
        place, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab)
        many += (key == wanted).to(tl.int32)
        least = tl.minimum(least, tl.where(key == wanted, place, _TOP))
    low = tl.min(least, axis=0)
    if (tl.sum(many, axis=0) > 1) & (tie > 0):
        # Eight bits of the place at a time, from the highest: places have 24 at most.
        low = tl.zeros((), tl.int32)
        left = tie.to(tl.int32)
        each = tl.arange(0, 256)
        for step in tl.static_range(3):
            found = tl.zeros((256,), tl.int32)
            for start in range(0, count, chunk):
                place, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab)
                digit = (place - low) >> (16 - 8 * step)
                equal = (key == wanted) & (digit >= 0) & (digit < 256)
                found += tl.histogram(tl.where(equal, digit, 0), 256, mask=equal)
            before = tl.cumsum(found, axis=0) - found
            at = tl.max(tl.where(before <= left, tl.where(found > 0, each, 0), 0), axis=0)
            left -= tl.sum(tl.where(each == at, before, 0), axis=0)
            low += at << (16 - 8 * step)
    return low.to(tl.int64)


@triton.jit
def finish_kernel(
    keys,
    taken,
    ids,
    peaks,
    places,
    greedy,
    counts,
    states,
    top_p,
    chance,
    drawn,
    vocab,
    chunks,
    unit,
    is_restricted: tl.constexpr,
    cells: tl.constexpr,
    chunk: tl.constexpr,
):
    """One program per row: the edge's key, the kept mass, the drawn key, and among its ties the place."""
    row = tl.program_id(0).to(tl.int64)
    cell = tl.arange(0, cells)
    there = cell < chunks
    best = tl.load(peaks + (row * chunks + cell) * 2, mask=there, other=-INFINITY)
    highest = tl.max(best, axis=0)
    place = tl.load(places + row * chunks + cell, mask=there, other=_TOP)
    found = tl.min(tl.where(best == highest, place, _TOP), axis=0).to(tl.int64)
    peak = peak_of(peaks, row, chunks, cells)
    is_good = tl.abs(highest) < INFINITY
    if tl.load(greedy + row) == 0:
        is_good = is_good & (tl.abs(peak) < INFINITY)
        if is_good:
            state = states + row * 8
            count = tl.load(counts + row * 2 + 1)
            kept = tl.load(state + 6)
            if tl.load(top_p + row) <= 1:
                low, high, above = tl.load(state + 3), tl.load(state + 4), tl.load(state + 5)
                key, above = _searched(keys, taken, row, count, low, high, above, kept, peak, unit, vocab, chunk)
                share = tl.maximum(share_of(key, peak, unit), 1)
                kept = above + (kept - above + share - 1) // share * share
            goal = _goal(kept, tl.load(chance + row))
            low, high, above = tl.load(state), tl.load(state + 1), tl.load(state + 2)
            key, above = _searched(keys, taken, row, count, low, high, above, goal, peak, unit, vocab, chunk)
            tie = (goal - above - 1) // tl.maximum(share_of(key, peak, unit), 1)
            found = _tied(keys, taken, row, count, key, tie, vocab, chunk)
    if is_restricted:
        found = tl.load(ids + found, mask=is_good, other=0).to(tl.int64)
    tl.store(drawn + row, tl.where(is_good, found, -1))
