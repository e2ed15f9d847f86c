"""Top-p sampling in eight Triton kernels, without sorting or a host decision. Used by captured steps.

It draws from the same distribution with the same random numbers as `sampler.sample`. Top-k and min-p first truncate
the row (`top_k`). Then two elements of the descending order are searched: the edge of the top-p set and the drawn one.
A histogram of the row by distance from its largest value gives the bins that must hold them; the elements of these bins
are listed and narrowed once more, and one program per row finds both among the few that are left. Masses are sums of
integers, so no result depends on the order of a sum, on the number of programs or on the bucket of rows.
"""

from __future__ import annotations

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
class Pieces:
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


class NucleusSampler:
    """Draws `rows` ids at a time. A call always launches the same kernels, so it can be captured."""

    def __init__(self, rows: int, vocab: int, device: torch.device, ids: Tensor | None = None) -> None:
        """ids: int32 [vocab] on the device, ascending: the id of each column; None where they are the same."""
        self.rows, self.vocab, self._device, self._ids = rows, vocab, device, ids
        # With few rows the last kernel is bound by barriers, not by elements.
        self.pieces = Pieces() if rows > 8 else Pieces(finish=1024, finish_warps=4)
        self._unit = float(1 << min(UNIT_BITS, 62 - vocab.bit_length()))

    def draw(
        self,
        logits: Tensor,
        *,
        seen: Tensor | None,
        slots: Tensor,
        penalty: Tensor,
        temperature: Tensor,
        top_p: Tensor,
        greedy: Tensor,
        chance: Tensor,
        top_k: Tensor | None = None,
        min_p: Tensor | None = None,
    ) -> Tensor:
        """Draw one id per row: int64 [rows], BAD_ROW where a row has no finite maximum.

        logits: [rows, vocab] of any float type, read as float32, rows with unit stride; seen: bool [slots, ids] or
        None without a penalty; slots: int64 [rows]; penalty, temperature: float32 [rows]; top_p, chance: float64
        [rows], top_p above 1 = off; greedy: bool [rows]; top_k int64, min_p float64 [rows], 0 = off; both or none.
        """
        rows, vocab, unit, cut = self.rows, self.vocab, self._unit, self.pieces
        assert logits.shape == (rows, vocab) and logits.stride(1) == 1, (logits.shape, logits.stride())
        chunks = triton.cdiv(vocab, cut.scale)
        cells, ways = triton.next_power_of_2(chunks), cut.ways
        # Not kept: during a capture they come from the graphs' memory pool, which all buckets share.
        keys, first, second = (self._made(torch.int32, rows, vocab) for _ in range(3))
        peaks, places = self._made(torch.float32, rows, chunks, 2), self._made(torch.int32, rows, chunks)
        histogram, chosen = self._made(torch.int32, rows, BINS), self._made(torch.int32, rows, 4)
        masses, counts = self._made(torch.int64, rows, SUMS + ways), self._made(torch.int32, rows, 2)
        extents, states = self._made(torch.int32, rows, 4), self._made(torch.int64, rows, STATE)
        drawn = self._made(torch.int64, rows)
        marks, flags = logits if seen is None else seen.view(torch.uint8), greedy.view(torch.uint8)
        ids, is_restricted = (drawn, False) if self._ids is None else (self._ids, True)
        _scale_kernel[(chunks, rows)](
            logits,
            marks,
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
            logits.stride(0),
            marks.stride(0),
            is_penalised=seen is not None,
            is_restricted=is_restricted,
            chunk=cut.scale,
            bins=BINS,
            ways=ways,
            num_warps=cut.scale_warps,
        )
        if top_k is not None and min_p is not None:
            limits = torch.empty_like(top_p)
            truncate_kernel[(rows,)](
                keys,
                peaks,
                flags,
                top_k,
                min_p,
                top_p,
                limits,
                vocab,
                chunks,
                unit,
                cells=cells,
                chunk=min(triton.next_power_of_2(vocab), cut.truncate),
                num_warps=cut.truncate_warps,
            )
            top_p = limits
        count_kernel[(triton.cdiv(vocab, cut.count), rows)](
            keys,
            peaks,
            flags,
            histogram,
            vocab,
            chunks,
            bins=BINS,
            cells=cells,
            chunk=cut.count,
            num_warps=cut.count_warps,
        )
        choose_kernel[(rows,)](histogram, top_p, chance, chosen, bins=BINS, num_warps=1)
        gather_kernel[(triton.cdiv(vocab, cut.gather), rows)](
            keys,
            first,
            peaks,
            flags,
            chosen,
            masses,
            counts,
            extents,
            vocab,
            chunks,
            unit,
            bins=BINS,
            cells=cells,
            chunk=cut.gather,
            ways=ways,
            num_warps=cut.gather_warps,
        )
        # Only the device knows the lengths of the lists: launch enough programs for a long one.
        narrow, collect = (min(triton.cdiv(vocab, piece), LIST_PARTS) for piece in (cut.narrow, cut.collect))
        narrow_kernel[(narrow, rows)](
            keys,
            first,
            peaks,
            flags,
            masses,
            counts,
            extents,
            vocab,
            chunks,
            unit,
            cells=cells,
            chunk=cut.narrow,
            ways=ways,
            num_warps=1,
        )
        collect_kernel[(collect, rows)](
            keys,
            first,
            second,
            masses,
            counts,
            extents,
            states,
            top_p,
            chance,
            vocab,
            chunk=cut.collect,
            ways=ways,
            num_warps=1,
        )
        finish_kernel[(rows,)](
            keys,
            second,
            ids,
            peaks,
            places,
            flags,
            counts,
            states,
            top_p,
            chance,
            drawn,
            vocab,
            chunks,
            unit,
            is_restricted=is_restricted,
            cells=cells,
            chunk=cut.finish,
            num_warps=cut.finish_warps,
        )
        return drawn

    def _made(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
