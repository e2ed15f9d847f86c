"""Dense attention of passes that append, without a mask within a sequence, by split-KV programs.

One sequence of 258 tokens and 16 heads has 80 tiles, each with up to ten thousand keys, for the 132 multiprocessors of
an H100. So several programs process the keys of one tile and a second kernel combines their results. With enough tiles
there is one split. A caller that stores keys itself may bring another first kernel, see `PlacedView`.

Cost model: a page is read in full blocks of keys by the tensor memory accelerator (TMA), with one page-table look-up
per block and no mask. The remainder of a page beyond full blocks is gathered after them. The last tile of a sequence
costs as much as a full one: a second tile size made all tiles slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from mstar_core.engine.attention.kernels.page_copies import append
from mstar_core.engine.attention.static import LOG2E, StaticAttention
from mstar_core.layers.kernels.launch import launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values
    from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
    from mstar_core.layers.kv_view import DenseKernel

PROGRAMS: Final = 396
"""Programs that run at once on an H100: three for each of its 132 multiprocessors."""

MAX_SPLITS: Final = 8

BLOCK: Final = 64
"""Tokens per tile. A frame of 258 tokens has five tiles per head."""

KEYS: Final = 64
"""Keys per block."""

STAGES: Final = 3
"""Blocks in flight."""

COMBINED: Final = 1024
"""Values per program that combines splits: 16 lines of 64."""


@triton.jit
def _attend_block(q, k, v, known, top, total, mixed, scale, is_masked: tl.constexpr):
    """Attend to one block of keys. Return the new score maximum, sum of weights and weighted sum of values."""
    score = tl.dot(q, k.T)
    if is_masked:
        score = tl.where(known[None, :], score, -1.0e30)
    higher = tl.maximum(top, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    return higher, total, tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None])


@triton.jit
def _split_kv_kernel(
    query,
    pool,
    lines,
    mixed_out,
    top_out,
    total_out,
    tile_row,
    tile_start,
    tile_count,
    tile_cached,
    tables,
    scale,
    query_stride,
    max_pages,
    kv_heads,
    groups,
    all_lines,
    tiles,
    splits,
    page: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    keys: tl.constexpr,
    stages: tl.constexpr,
    is_whole: tl.constexpr,
    overlaps: tl.constexpr,
):
    heads = kv_heads * groups
    program = tl.program_id(0)
    tile = program % tiles
    head = program // tiles % heads
    split = program // (tiles * heads)
    count = tl.load(tile_count + tile)
    row = tl.load(tile_row + tile)
    first = tl.load(tile_start + tile).to(tl.int64)
    # An unused sequence has no keys. All its splits are empty, and combining them gives zeros.
    end = tl.where(row < 0, 0, tl.load(tile_cached + tile) + count)
    table = tables + tl.maximum(row, 0) * max_pages
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    per: tl.constexpr = page // keys
    rest: tl.constexpr = page % keys
    whole = end // page
    blocks = whole * per + tl.cdiv(end - whole * per * keys, keys)
    begin = split * blocks // splits
    stop = (split + 1) * blocks // splits
    token = tl.arange(0, block)
    at = tl.arange(0, width)
    inside = token < count
    load = query + (first + token[:, None]) * query_stride + head * width + at[None, :]
    q = tl.load(load, mask=inside[:, None], other=0.0)
    top = tl.full((block,), -1.0e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    mixed = tl.zeros((block, width), tl.float32)
    key = tl.arange(0, keys)
    column = head // groups * width
    if per > 0:
        last = tl.minimum(stop, whole * per)
        number = tl.load(table + begin // per, mask=begin < last, other=0)
        for at_block in tl.range(begin, last, num_stages=stages):
            start = number * (2 * page) + (at_block % per) * keys
            k = lines.load([start, column])
            v = lines.load([start + page, column])
            number = tl.load(table + (at_block + 1) // per, mask=at_block + 1 < last, other=0)
            top, total, mixed = _attend_block(q, k, v, key < keys, top, total, mixed, scale, False)
    # The remainders of full pages, then the last page if it is partial.
    head_pool = pool + column
    line = kv_heads * width
    for left in tl.range(tl.maximum(begin, whole * per), stop, num_stages=2 if per == 0 else 1):
        place = (left - whole * per) * keys + key
        known = place < end - whole * per * keys
        of = tl.zeros((keys,), tl.int32) + whole
        if rest > 0:
            of = tl.minimum(place // rest, whole)
        within = place - of * rest + tl.where(of < whole, per * keys, 0)
        offset = (tl.load(table + of, mask=known, other=0).to(tl.int64) * (2 * page) + within) * line
        k_left = tl.load(head_pool + offset[:, None] + at[None, :], mask=known[:, None], other=0.0)
        v_left = tl.load(head_pool + offset[:, None] + page * line + at[None, :], mask=known[:, None], other=0.0)
        top, total, mixed = _attend_block(q, k_left, v_left, known, top, total, mixed, scale, True)
    mine = split.to(tl.int64) * all_lines + (first + token) * heads + head
    output = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    into = mixed_out + mine[:, None] * width + at[None, :]
    tl.store(into, output.to(mixed_out.dtype.element_ty), mask=inside[:, None])
    if not is_whole:
        tl.store(top_out + mine, top, mask=inside)
        tl.store(total_out + mine, total, mask=inside)


@triton.jit
def _combine_kernel(
    mixed_in,
    top_in,
    total_in,
    out,
    all_lines,
    width: tl.constexpr,
    splits: tl.constexpr,
    some: tl.constexpr,
    overlaps: tl.constexpr,
):
    line = tl.program_id(0) * some + tl.arange(0, some)
    at = tl.arange(0, width)
    inside = line < all_lines
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    highest = tl.full((some,), -1.0e30, tl.float32)
    for split in tl.static_range(splits):
        highest = tl.maximum(highest, tl.load(top_in + split * all_lines + line, mask=inside, other=-1.0e30))
    total = tl.zeros((some,), tl.float32)
    mixed = tl.zeros((some, width), tl.float32)
    for split in tl.static_range(splits):
        slot = split * all_lines + line
        weight = tl.exp2(tl.load(top_in + slot, mask=inside, other=-1.0e30) - highest)
        weight *= tl.load(total_in + slot, mask=inside, other=0.0)
        part = tl.load(mixed_in + slot[:, None] * width + at[None, :], mask=inside[:, None], other=0.0)
        total += weight
        mixed += weight[:, None] * part.to(tl.float32)
    output = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + line[:, None] * width + at[None, :], output.to(out.dtype.element_ty), mask=inside[:, None])


def splits_of(tiles: int, heads: int) -> int:
    """Return the KV splits per tile: as many as run at once, or 1 if the tiles fill the device."""
    return min(MAX_SPLITS, max(1, PROGRAMS // (tiles * heads)))


def descriptor_of(pool: Tensor) -> TensorDescriptor:
    """Return the TMA descriptor of a pool's blocks of keys and values."""
    pages, halves, page, kv_heads, width = pool.shape
    return TensorDescriptor.from_tensor(pool.view(pages * halves * page, kv_heads * width), [KEYS, width])


def attend_split_kv(
    query: Tensor,
    pool: Tensor,
    descriptor: TensorDescriptor,
    fields: Mapping[str, Tensor],
    factor: float,
    *,
    max_pages: int,
    splits: int,
) -> Tensor:
    """Attend without a mask among the tokens of a sequence. Returns [T, heads, width] in the query's dtype.

    query: [T, heads, width], the last two dimensions contiguous; pool: see `make_pools`; descriptor: of the pool;
    fields: row, start, count, cached int32 [tiles] and tables int32 [sequences * max_pages], see `PagedDenseAttention`;
    factor: the scale times log2(e).
    """
    count, heads, width = query.shape
    kv_heads, page, all_lines, tiles = pool.shape[3], pool.shape[2], count * heads, len(fields["row"])
    out = torch.empty((count, heads, width), dtype=query.dtype, device=query.device)
    mixed, top, total = split_outputs(out, splits)
    _split_kv_kernel[(tiles * heads * splits,)](
        query,
        pool,
        descriptor,
        mixed,
        top,
        total,
        fields["row"],
        fields["start"],
        fields["count"],
        fields["cached"],
        fields["tables"],
        factor,
        query.stride(0),
        max_pages,
        kv_heads,
        heads // kv_heads,
        all_lines,
        tiles,
        splits,
        page=page,
        width=width,
        block=BLOCK,
        keys=KEYS,
        stages=STAGES,
        is_whole=splits == 1,
        num_warps=4,
        **launch_options(query.device),
    )
    if splits > 1:
        combine(mixed, top, total, out)
    return out


def split_outputs(out: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate outputs of the splits of `out` [T, heads, width]: [splits, T * heads, width], and float32 maxima and
    sums [splits, T * heads]. A single split writes to `out` itself.
    """
    if splits == 1:
        return out, out, out
    lines, width = out.shape[0] * out.shape[1], out.shape[2]
    mixed = torch.empty((splits, lines, width), dtype=out.dtype, device=out.device)
    top, total = torch.empty((2, splits, lines), dtype=torch.float32, device=out.device).unbind()
    return mixed, top, total


def combine(mixed: Tensor, top: Tensor, total: Tensor, out: Tensor) -> None:
    """Combine weighted splits into `out`. Shapes: see `split_outputs`."""
    splits, lines, width = mixed.shape
    some = max(1, COMBINED // width)
    _combine_kernel[(triton.cdiv(lines, some),)](
        mixed, top, total, out, lines, width=width, splits=splits, some=some, num_warps=4, **launch_options(out.device)
    )


class PagedDenseAttention(StaticAttention):
    """Dense attention of one bucket of passes that append: every token attends to its whole sequence.

    An append kernel and an attention kernel run, then one to combine splits if there are several. splits: per tile, or
    None for as many as fill the device.
    """

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape, splits: int | None = None) -> None:
        super().__init__(pools, page_size, shape)
        self._splits = splits
        self._tiles = -(-shape.tokens // BLOCK)
        self._descriptors: dict[int, TensorDescriptor] = {}
        self._kernel_descriptors: dict[int, object] = {}

    @property
    def fields(self) -> Fields:
        """See StaticAttention. row, start, count, cached: sequence, first token, tokens and cached tokens of a tile."""
        shape = self._shape
        tiles = {name: (torch.int32, shape.sequences * self._tiles) for name in ("row", "start", "count", "cached")}
        places = {"places": (torch.int64, shape.packed_tokens)}
        return {**places, **tiles, "tables": (torch.int32, shape.sequences * shape.pages)}

    def values(self, metadata: AttentionMetadata) -> Values:
        """See StaticAttention."""
        shape, count = self._shape, len(metadata.page_rows)
        within = np.arange(self._tiles) * BLOCK
        sizes = np.minimum(shape.tokens - within, BLOCK)
        known = np.full(shape.sequences, -1)
        known[:count] = np.arange(count)
        # The kernel attends to `cached + count` keys of a tile. Here that is the whole sequence for every tile.
        held = np.zeros(shape.sequences, dtype=np.int64)
        held[:count] = metadata.lengths + shape.tokens
        return {
            "places": metadata.places(self._page_size, shape.packed_tokens, -1),
            "row": np.repeat(known, self._tiles),
            "start": (np.arange(shape.sequences)[:, None] * shape.tokens + within).reshape(-1),
            "count": np.tile(sizes, shape.sequences),
            "cached": (held[:, None] - sizes).reshape(-1),
            "tables": metadata.tables[metadata.page_rows, : shape.pages],
        }

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        append(self._pools[layer], self._page_size, self._device["places"], key, value)
        return self.attend_placed(layer, query, scale)

    def places(self, layer: int) -> tuple[Tensor, Tensor]:
        """See PlacedView."""
        return self._pools[layer], self._device["places"]

    def attend_placed(
        self, layer: int, query: Tensor, scale: float | None = None, kernel: DenseKernel | None = None
    ) -> Tensor:
        """See PlacedView."""
        pool, shape = self._pools[layer], self._shape
        heads, width = query.shape[1:]
        factor = (width**-0.5 if scale is None else scale) * LOG2E
        if kernel is not None and kernel.supports(query, pool, shape.tokens):
            if layer not in self._kernel_descriptors:
                self._kernel_descriptors[layer] = kernel.descriptor_of(pool)
            return kernel.attend(
                query,
                pool,
                self._kernel_descriptors[layer],
                self._device,
                factor,
                tokens=shape.tokens,
                max_pages=shape.pages,
                splits=self._splits or kernel.splits_of(shape.sequences, shape.tokens, heads),
            )
        if layer not in self._descriptors:
            self._descriptors[layer] = descriptor_of(pool)
        return attend_split_kv(
            query,
            pool,
            self._descriptors[layer],
            self._device,
            factor,
            max_pages=shape.pages,
            splits=self._splits or splits_of(shape.sequences * self._tiles, heads),
        )
