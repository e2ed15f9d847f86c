"""Top-p sampling in eight Triton kernels, without sorting or a host decision. Used on CUDA.

It draws what `layers.sampling.sorted_draw` draws. Top-k and min-p first truncate the row (`top_k`). Then two elements
of the descending order are searched: the edge of the top-p set and the drawn one. A histogram by distance from the
largest value gives the bins that must hold them; their elements are listed and narrowed once more, and one program per
row finds both among the few left. Masses are sums of integers, so no result depends on the batch or the order of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from mstar_core.engine.sampling.top_k import truncate_kernel
from mstar_core.engine.sampling.top_p_bins import BINS, choose_kernel, count_kernel
from mstar_core.engine.sampling.top_p_search import (
    STATE,
    SUMS,
    collect_kernel,
    finish_kernel,
    gather_kernel,
    narrow_kernel,
)
from mstar_core.layers.kernels.logit_keys import INFINITY, OUTSIDE, ordered

if TYPE_CHECKING:
    from torch import Tensor

UNIT_BITS: Final = 44
"""Fraction bits of a probability relative to the largest of its row: 2 ** 18 of them fit a sum with a spare bit."""

LIST_PARTS: Final = 32
"""Programs per row that process a list."""


@triton.jit
def _scale_kernel(
    logits,
    seen,
    ids,
    slots,
    penalty,
    temperature,
    keys,
    peaks,
    places,
    histogram,
    masses,
    counts,
    extents,
    vocab,
    chunks,
    logits_stride,
    seen_stride,
    is_penalised: tl.constexpr,
    is_restricted: tl.constexpr,
    chunk: tl.constexpr,
    bins: tl.constexpr,
    ways: tl.constexpr,
):
    """Penalise, divide by the temperature and write keys, with the largest logit, its place and value of each chunk.

    Also clears the sums and counts of the next kernels.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * chunk + tl.arange(0, chunk)
    inside = at < vocab
    x = tl.load(logits + row * logits_stride + at, mask=inside, other=-INFINITY).to(tl.float32)
    x = tl.where(x != x, INFINITY, x)
    if is_penalised:
        weight = tl.load(penalty + row)
        id_of = tl.load(ids + at, mask=inside, other=0) if is_restricted else at
        known = tl.load(seen + tl.load(slots + row) * seen_stride + id_of, mask=inside, other=0) != 0
        x = tl.where(known, tl.where(x > 0, tl.div_rn(x, weight), x * weight), x)
    best = tl.max(x, axis=0)
    y = tl.div_rn(x, tl.load(temperature + row))
    tl.store(keys + row * vocab + at, ordered(y), mask=inside)
    cell = row * chunks + part
    tl.store(peaks + cell * 2, best)
    tl.store(peaks + cell * 2 + 1, tl.max(y, axis=0))
    tl.store(places + cell, tl.min(tl.where(inside & (x == best), at, 0x7FFFFFFF), axis=0))
    if part == 0:
        tl.store(histogram + row * bins + tl.arange(0, bins), tl.zeros((bins,), tl.int32))
        tl.store(masses + row * (4 + ways) + tl.arange(0, 4), tl.zeros((4,), tl.int64))
        tl.store(masses + row * (4 + ways) + 4 + tl.arange(0, ways), tl.zeros((ways,), tl.int64))
        tl.store(counts + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
        tl.store(extents + row * 4 + tl.arange(0, 4), tl.full((4,), OUTSIDE, tl.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Elements and warps per program of each kernel. No result depends on them."""

    scale: int = 1024
    scale_warps: int = 4
    count: int = 2048
    count_warps: int = 2
    gather: int = 512
    gather_warps: int = 1
    narrow: int = 256
    collect: int = 512
    finish: int = 2048
    finish_warps: int = 8
    ways: int = 32
    truncate: int = 4096
    truncate_warps: int = 8


_FEW_ROWS: Final = Blocks(finish=1024, finish_warps=4)
"""With few rows the last kernel is bound by barriers, not by elements."""

_MANY_ROWS: Final = Blocks()


def draw(
    logits: Tensor,
    columns: Mapping[str, Tensor],
    chance: Tensor,
    slots: Tensor,
    seen: Tensor | None,
    ids: Tensor | None,
) -> Tensor:
    """Draw one id per row: int64 [rows], BAD_ROW where a row has no finite maximum. Launches the same kernels always.

    logits: [rows, vocab] of any float type, read as float32, rows with unit stride; columns: penalty, temperature
    float32, top_p float64 (above 1 is off), greedy bool, top_k int64 and min_p float64 (0 is off), all [rows]; chance:
    float64 [rows]; slots: int64 [rows]; seen: bool [slots, ids], None without a penalty; ids: int32 [vocab] on the
    device, ascending: the id of each column, None where they are the same.
    """
    (rows, vocab), device = logits.shape, logits.device
    assert logits.stride(1) == 1, logits.stride()
    cut, unit = _MANY_ROWS if rows > 8 else _FEW_ROWS, float(1 << min(UNIT_BITS, 62 - vocab.bit_length()))

    def made(dtype: torch.dtype, *shape: int) -> Tensor:
        # Not kept: during a capture they come from the graphs' memory pool, which all buckets share.
        return torch.empty(shape, dtype=dtype, device=device)

    chunks = triton.cdiv(vocab, cut.scale)
    keys, first, second = (made(torch.int32, rows, vocab) for _ in range(3))
    peaks, places = made(torch.float32, rows, chunks, 2), made(torch.int32, rows, chunks)
    histogram, chosen = made(torch.int32, rows, BINS), made(torch.int32, rows, 4)
    masses, counts = made(torch.int64, rows, SUMS + cut.ways), made(torch.int32, rows, 2)
    extents, states = made(torch.int32, rows, 4), made(torch.int64, rows, STATE)
    drawn, limits = made(torch.int64, rows), torch.empty_like(chance)
    marks = logits if seen is None else seen.view(torch.uint8)
    greedy, table = columns["greedy"].view(torch.uint8), drawn if ids is None else ids
    # What several kernels take. Only the device knows the lengths of the lists: enough programs for a long one start.
    row, sizes, lists = (keys, peaks, greedy), (vocab, chunks, unit), (masses, counts, extents)
    cells, ways = {"cells": triton.next_power_of_2(chunks)}, {"ways": cut.ways}
    narrow, collect = (min(triton.cdiv(vocab, piece), LIST_PARTS) for piece in (cut.narrow, cut.collect))

    inputs = (logits, marks, table, slots, columns["penalty"], columns["temperature"])
    flags = {"is_penalised": seen is not None, "is_restricted": ids is not None}
    scale = {"chunk": cut.scale, "bins": BINS, "num_warps": cut.scale_warps}
    cleared = (keys, peaks, places, histogram, *lists, vocab, chunks, logits.stride(0), marks.stride(0))
    _scale_kernel[(chunks, rows)](*inputs, *cleared, **flags, **scale, **ways)
    rules = (columns["top_k"], columns["min_p"], columns["top_p"], limits)
    span = min(triton.next_power_of_2(vocab), cut.truncate)
    truncate_kernel[(rows,)](*row, *rules, *sizes, chunk=span, num_warps=cut.truncate_warps, **cells)
    counting = {"bins": BINS, "chunk": cut.count, "num_warps": cut.count_warps}
    count_kernel[(triton.cdiv(vocab, cut.count), rows)](*row, histogram, vocab, chunks, **counting, **cells)
    choose_kernel[(rows,)](histogram, limits, chance, chosen, bins=BINS, num_warps=1)
    gathering = {"bins": BINS, "chunk": cut.gather, "num_warps": cut.gather_warps}
    found = (keys, first, peaks, greedy)
    gather_kernel[(triton.cdiv(vocab, cut.gather), rows)](*found, chosen, *lists, *sizes, **gathering, **cells, **ways)
    narrow_kernel[(narrow, rows)](*found, *lists, *sizes, chunk=cut.narrow, num_warps=1, **cells, **ways)
    ends = (states, limits, chance)
    collect_kernel[(collect, rows)](keys, first, second, *lists, *ends, vocab, chunk=cut.collect, num_warps=1, **ways)
    last = (keys, second, table, peaks, places, greedy, counts, *ends, drawn, *sizes)
    finishing = {"is_restricted": ids is not None, "chunk": cut.finish, "num_warps": cut.finish_warps}
    finish_kernel[(rows,)](*last, **finishing, **cells)
    return drawn
