"""Narrows the interval of keys that holds an element of a row's descending order. Kernels of `nucleus`.

A goal is a mass; its element is the first, from the largest key down, at which the running sum of shares reaches it.
A bracket is an interval of keys, both ends in, with the mass above it, that is known to hold the element of a goal.

State of a row after a narrowing, int64 [8]: bracket of the drawn element (low, high, mass above), bracket of the
nucleus' edge (the same), the edge's goal, one unused. Without top-p the edge's bracket is empty and its goal the
whole mass.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

STATE: Final = 8
"""Numbers in the state of a row."""

LEAST: Final = tl.constexpr(-2139095041)
"""Key of minus infinity: every element is at or above it. Places outside of a row get a key below."""

_OUTSIDE: Final = tl.constexpr(-(1 << 31))
_INFINITY: Final = tl.constexpr(float("inf"))
_STEP: Final = tl.constexpr(0.3125)  # exact times a small integer, so that a fused multiply changes nothing


@triton.jit
def ordered(x):
    """int32 that orders as the float32 does; -0 counts as 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _share(key, peak, unit):
    """exp(value - peak) in fixed point, int64: 0 to unit."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return (tl.exp(bits.to(tl.float32, bitcast=True) - peak) * unit).to(tl.int64)


@triton.jit
def _peak(peaks, row, chunks, cells: tl.constexpr):
    """The largest value of a row."""
    cell = tl.arange(0, cells)
    return tl.max(tl.load(peaks + (row * chunks + cell) * 2 + 1, mask=cell < chunks, other=-_INFINITY), axis=0)


@triton.jit
def _coarse(peak, way, ways: tl.constexpr):
    """Thresholds of the first narrowing, from the largest value down, the last below everything. way: scalar or [n]."""
    # Even where most draws fall, then wider, to twenty nats below: hardly anything may be left to the last one.
    far = tl.maximum(way - 24, 0)
    limit = ordered(peak - (way + far * far).to(tl.float32) * _STEP)
    return tl.where(way == ways - 1, LEAST, limit)


@triton.jit
def _fine(state, way, ways: tl.constexpr):
    """Thresholds of the second: half for each bracket, of which the first is just above it and the last its low end."""
    steps: tl.constexpr = ways // 2 - 1
    side, step = way // (ways // 2), way % (ways // 2)
    low, high = tl.load(state + side * 3), tl.load(state + side * 3 + 1)
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
def _brackets(limits, sums, way, start, top, above, edge_goal, kept, chance, ways: tl.constexpr):
    """The bracket of the drawn element when the kept mass lies between edge_goal and kept: low, high, mass above."""
    least, most = _first(sums, way, _goal(edge_goal, chance), ways), _first(sums, way, _goal(kept, chance), ways)
    low = _at(limits, way, most)
    high = tl.where(least == start, top, _at(limits, way, least - 1) - 1)
    return low, high, tl.where(least == start, above, _at(sums, way, least - 1))


@triton.jit
def _after_first(masses, peak, row, limit, chance, ways: tl.constexpr):
    """State of a row from the sums over all of it."""
    way = tl.arange(0, ways)
    sums = tl.load(masses + row * 2 * ways + way)
    limits = _coarse(peak, way, ways).to(tl.int64)
    total = _at(sums, way, ways - 1)
    is_whole = limit > 1
    wanted = tl.minimum(tl.ceil(tl.where(is_whole, 1.0, limit) * total.to(tl.float64)).to(tl.int64), total)
    edge_goal = tl.where(is_whole, total, wanted)
    edge = _first(sums, way, edge_goal, ways)
    top = ordered(peak).to(tl.int64)
    edge_low = tl.where(is_whole, top + 1, _at(limits, way, edge))
    edge_high = tl.where(edge == 0, top, _at(limits, way, edge - 1) - 1)
    edge_above = tl.where(edge == 0, 0, _at(sums, way, edge - 1))
    low, high, above = _brackets(limits, sums, way, 0, top, total * 0, edge_goal, _at(sums, way, edge), chance, ways)
    return low, high, above, edge_low, tl.where(is_whole, top, edge_high), edge_above, edge_goal


@triton.jit
def _after_second(masses, state, row, limit, chance, ways: tl.constexpr):
    """State of a row from the sums over what the first narrowing left."""
    half: tl.constexpr = ways // 2
    way = tl.arange(0, half)
    drawn = tl.load(masses + (row * 2 + 1) * ways + way)
    edged = tl.load(masses + (row * 2 + 1) * ways + half + way)
    edge_goal = tl.load(state + 6)
    # The first threshold stands above the bracket: what lies there is in the mass above it already.
    edged = tl.where(way == 0, -1, edged - _at(edged, way, 0) + tl.load(state + 5))
    drawn = tl.where(way == 0, -1, drawn - _at(drawn, way, 0) + tl.load(state + 2))
    edge_limits, limits = _fine(state, half + way, ways), _fine(state, way, ways)
    is_whole = limit > 1
    edge = _first(edged, way, edge_goal, half)
    kept = tl.where(is_whole, edge_goal, _at(edged, way, edge))
    low, high, above = _brackets(
        limits, drawn, way, 1, tl.load(state + 1), tl.load(state + 2), edge_goal, kept, chance, half
    )
    edge_high = tl.where(edge == 1, tl.load(state + 4), _at(edge_limits, way, edge - 1) - 1)
    edge_above = tl.where(edge == 1, tl.load(state + 5), _at(edged, way, edge - 1))
    edge_low = tl.where(is_whole, tl.load(state + 3), _at(edge_limits, way, edge))
    return low, high, above, edge_low, edge_high, edge_above, edge_goal


@triton.jit
def _keys_at(keys, taken, row, at, count, vocab, is_first: tl.constexpr):
    """Places in the row of the elements `at` of the list, and their keys; outside of the list a key below all."""
    inside = at < count
    place = at if is_first else tl.load(taken + row * vocab + at, mask=inside, other=0)
    return place, tl.load(keys + row * vocab + place, mask=inside, other=_OUTSIDE)


@triton.jit
def narrow_kernel(
    keys, taken, peaks, greedy, masses, counts, states, vocab, chunks, unit,
    is_first: tl.constexpr, cells: tl.constexpr, chunk: tl.constexpr, ways: tl.constexpr,
):  # fmt: skip
    """Add up the mass at or above each threshold, over the row (first) or over what the first narrowing left."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    peak = _peak(peaks, row, chunks, cells)
    if (tl.load(greedy + row) == 0) & (tl.abs(peak) < _INFINITY):
        count = vocab if is_first else tl.load(counts + row * 2)
        way = tl.arange(0, ways)
        state = states + row * 16
        sums = tl.zeros((ways,), tl.int64)
        for start in range(part * chunk, count, tl.num_programs(0) * chunk):
            _, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab, is_first)
            share = tl.where(key >= LEAST, _share(tl.maximum(key, LEAST), peak, unit), 0)
            for each in tl.static_range(ways):
                index = tl.full((), each, tl.int32)
                limit = _coarse(peak, index, ways) if is_first else _fine(state, index, ways)
                sums += tl.where(way == each, tl.sum(tl.where(key >= limit, share, 0), axis=0), 0)
        cell = masses + (row * 2 + (0 if is_first else 1)) * ways + way
        tl.atomic_add(cell, sums, mask=sums != 0, sem="relaxed")


@triton.jit
def collect_kernel(
    keys, taken, left, peaks, greedy, masses, counts, states, top_p, chance, vocab, chunks,
    is_first: tl.constexpr, cells: tl.constexpr, chunk: tl.constexpr, ways: tl.constexpr,
):  # fmt: skip
    """List the places whose keys lie in a bracket, in no order; write the row's state."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    peak = _peak(peaks, row, chunks, cells)
    if (tl.load(greedy + row) == 0) & (tl.abs(peak) < _INFINITY):
        limit, at_chance = tl.load(top_p + row), tl.load(chance + row)
        state = states + row * 16
        if is_first:
            low, high, above, edge_low, edge_high, edge_above, goal = _after_first(
                masses, peak, row, limit, at_chance, ways
            )
        else:
            low, high, above, edge_low, edge_high, edge_above, goal = _after_second(
                masses, state, row, limit, at_chance, ways
            )
        if part == 0:
            own = state if is_first else state + 8
            tl.store(own, low)
            tl.store(own + 1, high)
            tl.store(own + 2, above)
            tl.store(own + 3, edge_low)
            tl.store(own + 4, edge_high)
            tl.store(own + 5, edge_above)
            tl.store(own + 6, goal)
        count = vocab if is_first else tl.load(counts + row * 2)
        counter = counts + row * 2 + (0 if is_first else 1)
        for start in range(part * chunk, count, tl.num_programs(0) * chunk):
            place, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab, is_first)
            held = (key >= low) & (key <= high) | (key >= edge_low) & (key <= edge_high)
            many = tl.sum(held.to(tl.int32), axis=0)
            if many > 0:
                base = tl.atomic_add(counter, many, sem="relaxed")
                to = base + tl.cumsum(held.to(tl.int32), axis=0) - 1
                tl.store(left + row * vocab + to, place, mask=held)


@triton.jit
def _extent(keys, taken, row, count, low, high, vocab, chunk: tl.constexpr):
    """The least and the largest key that are there between low and high."""
    least, most = tl.full((chunk,), 0x7FFFFFFF, tl.int32), tl.full((chunk,), _OUTSIDE, tl.int32)
    for start in range(0, count, chunk):
        _, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab, False)
        held = (key >= low) & (key <= high)
        least = tl.minimum(least, tl.where(held, key, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(held, key, _OUTSIDE))
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
            _, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab, False)
            inside = (key >= low) & (key <= high)
            share = tl.where(inside, _share(tl.maximum(key, LEAST), peak, unit), 0)
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
    ways: tl.constexpr = 16
    way = tl.arange(0, ways)
    low, high = tie * 0, tie * 0 + vocab - 1
    # Up to `high` there are more than `tie` of them, below `low` at most that many.
    many = tl.zeros((chunk,), tl.int32)
    only = tl.full((chunk,), 0x7FFFFFFF, tl.int32)
    for start in range(0, count, chunk):
        place, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab, False)
        many += (key == wanted).to(tl.int32)
        only = tl.minimum(only, tl.where(key == wanted, place, 0x7FFFFFFF))
    if (tl.sum(many, axis=0) == 1) | (tie == 0):
        low = tl.min(only, axis=0).to(tl.int64)
        high = low
    while low < high:
        numbers = tl.zeros((ways,), tl.int64)
        for start in range(0, count, chunk):
            place, key = _keys_at(keys, taken, row, start + tl.arange(0, chunk), count, vocab, False)
            equal = key == wanted
            for each in tl.static_range(ways):
                limit = low + (high - low) * each // (ways - 1)
                here = tl.sum((equal & (place <= limit)).to(tl.int32), axis=0).to(tl.int64)
                numbers += tl.where(way == each, here, 0)
        found = tl.min(tl.where(numbers > tie, way, ways - 1), axis=0)
        limits = low + (high - low) * way // (ways - 1)
        low = tl.where(found == 0, low, _at(limits, way, found - 1) + 1)
        high = _at(limits, way, found)
    return low


@triton.jit
def finish_kernel(
    keys, taken, ids, peaks, places, greedy, counts, states, top_p, chance, drawn, vocab, chunks, unit,
    is_restricted: tl.constexpr, cells: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """One program per row: the edge's key, the kept mass, the drawn key, and among its ties the place."""
    row = tl.program_id(0).to(tl.int64)
    cell = tl.arange(0, cells)
    there = cell < chunks
    best = tl.load(peaks + (row * chunks + cell) * 2, mask=there, other=-_INFINITY)
    highest = tl.max(best, axis=0)
    place = tl.load(places + row * chunks + cell, mask=there, other=0x7FFFFFFF)
    found = tl.min(tl.where(best == highest, place, 0x7FFFFFFF), axis=0).to(tl.int64)
    peak = _peak(peaks, row, chunks, cells)
    is_good = tl.abs(highest) < _INFINITY
    if tl.load(greedy + row) == 0:
        is_good = is_good & (tl.abs(peak) < _INFINITY)
        if is_good:
            state = states + row * 16 + 8
            count = tl.load(counts + row * 2 + 1)
            kept = tl.load(state + 6)
            if tl.load(top_p + row) <= 1:
                low, high, above = tl.load(state + 3), tl.load(state + 4), tl.load(state + 5)
                key, above = _searched(keys, taken, row, count, low, high, above, kept, peak, unit, vocab, chunk)
                share = tl.maximum(_share(key, peak, unit), 1)
                kept = above + (kept - above + share - 1) // share * share
            goal = _goal(kept, tl.load(chance + row))
            low, high, above = tl.load(state), tl.load(state + 1), tl.load(state + 2)
            key, above = _searched(keys, taken, row, count, low, high, above, goal, peak, unit, vocab, chunk)
            tie = (goal - above - 1) // tl.maximum(_share(key, peak, unit), 1)
            found = _tied(keys, taken, row, count, key, tie, vocab, chunk)
    if is_restricted:
        found = tl.load(ids + found, mask=is_good, other=0).to(tl.int64)
    tl.store(drawn + row, tl.where(is_good, found, -1))
