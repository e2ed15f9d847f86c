"""Attention of packed tokens over the pages, in one kernel of fixed grid. Used by captured prompts and passes on CUDA.

A tile is up to BLOCK tokens of one piece and one query head. Tiles beyond those in use do nothing, tokens beyond the
last prompt get zeros. Nothing is planned: a tile says where it begins, and its row's page table says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import triton
import triton.language as tl

from mstar_core.engine.attention.block import Block
from mstar_core.engine.attention.kernels.append import append
from mstar_core.engine.attention.kernels.split_kv import BLOCK, attend_shared, blocks_of, shares_of
from mstar_core.engine.attention.passes import LOG2E, NOTHING, written
from mstar_core.engine.attention.static import Staging
from mstar_core.layers.kernels.gluon import gluon_kernels

if TYPE_CHECKING:
    from torch import Tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    from mstar_core.engine.attention.block import Fields, Values
    from mstar_core.engine.attention.passes import PassShape
    from mstar_core.engine.attention.segments import PackedPrompts

KEYS: Final = 64
"""Keys of one pass of the inner loop."""

SHORT: Final = 256
"""Buckets up to so many tokens take small tiles: there are too few large ones to fill the chip."""


@triton.jit
def _prompt_kernel(
    query, pool, out, tile_row, tile_start, tile_count, tile_cached, tables, scale, query_stride, out_stride,
    max_pages, kv_heads, groups, page: tl.constexpr, width: tl.constexpr, block: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(tile_count + tile)
    if count > 0:
        row = tl.load(tile_row + tile)
        first = tl.load(tile_start + tile).to(tl.int64)
        cached = tl.load(tile_cached + tile)
        token = tl.arange(0, block)
        at = tl.arange(0, width)
        inside = token < count
        store = out + (first + token[:, None]) * out_stride + head * width + at[None, :]
        if row < 0:
            tl.store(store, tl.zeros((block, width), out.dtype.element_ty), mask=inside[:, None])
        else:
            load = query + (first + token[:, None]) * query_stride + head * width + at[None, :]
            q = tl.load(load, mask=inside[:, None], other=0.0)
            top = tl.full((block,), -1.0e30, tl.float32)
            total = tl.zeros((block,), tl.float32)
            mixed = tl.zeros((block, width), tl.float32)
            end = cached + count
            line = kv_heads * width
            own = pool + (head // groups) * width
            for start in range(0, end, keys):
                place = start + tl.arange(0, keys)
                known = place < end
                number = tl.load(tables + row * max_pages + place // page, mask=known, other=0).to(tl.int64)
                offset = (number * (2 * page) + place % page) * line
                k = tl.load(own + offset[None, :] + at[:, None], mask=known[None, :], other=0.0)
                score = tl.dot(q, k) * scale
                score = tl.where(place[None, :] <= (cached + token)[:, None], score, -1.0e30)
                higher = tl.maximum(top, tl.max(score, axis=1))
                share = tl.exp2(score - higher[:, None])
                shrink = tl.exp2(top - higher)
                total = total * shrink + tl.sum(share, axis=1)
                v = tl.load(own + offset[:, None] + page * line + at[None, :], mask=known[:, None], other=0.0)
                mixed = mixed * shrink[:, None] + tl.dot(share.to(v.dtype), v)
                top = higher
            tl.store(store, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


class PagedFixedSegments:
    """Prompt attention of one bucket: persistent buffers, one append and one attention kernel per layer."""

    def __init__(self, pools: list[Tensor], page_size: int, tokens: int, rows: int, max_pages: int) -> None:
        self._pools = pools
        self._page_size = page_size
        self._tokens = tokens
        self._rows = rows
        self._max_pages = max_pages
        self._block = 32 if tokens <= SHORT else 64
        # Each piece, and what is left of the bucket after them, may end in a tile that is not full.
        self._tiles = -(-tokens // self._block) + rows
        fields = {
            "places": (torch.int64, tokens),
            "row": (torch.int32, self._tiles),
            "start": (torch.int32, self._tiles),
            "count": (torch.int32, self._tiles),
            "cached": (torch.int32, self._tiles),
            "tables": (torch.int32, rows * max_pages),
        }
        self._staging = Staging(fields, pools[0].device)

    @property
    def view(self) -> PagedFixedSegments:
        """See FixedSegments: this object."""
        return self

    def prepare(self, prompts: PackedPrompts) -> None:
        """See FixedSegments."""
        host, pieces, block, starts = self._staging.next(), len(prompts.rows), self._block, prompts.starts
        host["places"][:] = prompts.places(self._page_size, self._tokens, -1)
        counts = np.append(prompts.counts, self._tokens - starts[-1])
        tiles = -(-counts // block)
        of = np.repeat(np.arange(pieces + 1), tiles)
        used = len(of)
        # Token of its piece at which each tile begins.
        within = (np.arange(used) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * block
        host["row"][:used] = np.where(of < pieces, of, -1)
        host["start"][:used] = starts[of] + within
        host["count"][:used] = np.minimum(counts[of] - within, block)
        host["count"][used:] = 0
        host["cached"][:used] = np.append(prompts.cached, 0)[of] + within
        widest = int((-(-(prompts.cached + prompts.counts) // self._page_size)).max(initial=0))
        tables = host["tables"].reshape(self._rows, self._max_pages)
        tables[:pieces, :widest] = prompts.tables[prompts.rows, :widest]
        self._staging.send("tables", self._staging.start_of("tables") + 4 * pieces * self._max_pages)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        pool, fields = self._pools[layer], self._staging.device
        append(pool, self._page_size, fields["places"], key, value)
        heads, width = query.shape[1:]
        out = torch.empty((self._tokens, heads, width), dtype=query.dtype, device=query.device)
        factor = (width**-0.5 if scale is None else scale) * LOG2E
        _prompt_kernel[(self._tiles, heads)](
            query, pool, out, fields["row"], fields["start"], fields["count"], fields["cached"], fields["tables"],
            factor, query.stride(0), out.stride(0), self._max_pages, pool.shape[3], heads // pool.shape[3],
            page=self._page_size, width=width, block=self._block, keys=KEYS, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out


class PagedFixedPasses:
    """Attention of one bucket of passes that append: every token of a row sees all of the row.

    Two kernels, or three where the tiles are too few to fill the chip. shares: by how many programs each tile's keys
    are taken; None: by as many as fill the chip.
    """

    def __init__(
        self, pools: list[Tensor], page_size: int, shape: PassShape, shares: int | None = None,
        beside: Fields = NOTHING,
    ) -> None:  # fmt: skip
        self._pools = pools
        self._page_size = page_size
        self._shape = shape
        self._shares = shares
        self._tiles = -(-shape.tokens // BLOCK)
        tiles = shape.rows * self._tiles
        fields = {
            "places": (torch.int64, shape.rows * shape.tokens),
            "row": (torch.int32, tiles),
            "start": (torch.int32, tiles),
            "count": (torch.int32, tiles),
            "cached": (torch.int32, tiles),
            "tables": (torch.int32, shape.rows * shape.pages),
        }
        self._block = Block({**fields, **beside}, pools[0].device)
        self._blocks: dict[int, TensorDescriptor] = {}
        self._frames: dict[int, object] = {}

    @property
    def device(self) -> Mapping[str, Tensor]:
        """See FixedPasses."""
        return self._block.device

    @property
    def view(self) -> PagedFixedPasses:
        """See FixedPasses: this object."""
        return self

    def forget(self) -> None:
        """See FixedPasses: nothing is kept."""

    def prepare(self, rows: np.ndarray, cached: np.ndarray, tables: np.ndarray, beside: Values = NOTHING) -> None:
        """See FixedPasses."""
        shape, count = self._shape, len(rows)
        within = np.arange(self._tiles) * BLOCK
        sizes = np.minimum(shape.tokens - within, BLOCK)
        known = np.full(shape.rows, -1)
        known[:count] = np.arange(count)
        # The kernel sees up to `cached + count` of a tile: the whole row, whichever of its tiles.
        held = np.zeros(shape.rows, dtype=np.int64)
        held[:count] = cached + shape.tokens
        own = np.zeros((shape.rows, shape.pages), dtype=np.int32)
        own[:count] = tables[rows, : shape.pages]
        self._block.send({
            **beside,
            "places": written(rows, cached, tables, self._page_size, shape, -1),
            "row": np.repeat(known, self._tiles),
            "start": (np.arange(shape.rows)[:, None] * shape.tokens + within).reshape(-1),
            "count": np.tile(sizes, shape.rows),
            "cached": (held[:, None] - sizes).reshape(-1),
            "tables": own.reshape(-1),
        })  # fmt: skip

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        append(self._pools[layer], self._page_size, self._block.device["places"], key, value)
        return self.attend_placed(layer, query, scale)

    def places(self, layer: int) -> tuple[Tensor, Tensor]:
        """See PlacedView."""
        return self._pools[layer], self._block.device["places"]

    def attend_placed(self, layer: int, query: Tensor, scale: float | None = None) -> Tensor:
        """See PlacedView."""
        pool, shape = self._pools[layer], self._shape
        heads, width = query.shape[1:]
        factor = (width**-0.5 if scale is None else scale) * LOG2E
        frames = gluon_kernels("mstar_core.engine.attention.kernels.dense", "frames") if query.is_cuda else None
        if frames and frames.takes(query, pool, shape.tokens):
            if layer not in self._frames:
                self._frames[layer] = frames.blocks_of(pool)
            whole: Tensor = frames.attend(
                query, pool, self._frames[layer], self._block.device, factor, tokens=shape.tokens,
                max_pages=shape.pages, shares=self._shares or frames.shares_of(shape.rows, shape.tokens, heads),
            )  # fmt: skip
            return whole
        if layer not in self._blocks:
            self._blocks[layer] = blocks_of(pool)
        return attend_shared(
            query, pool, self._blocks[layer], self._block.device, factor, max_pages=shape.pages,
            shares=self._shares or shares_of(shape.rows * self._tiles, heads),
        )  # fmt: skip
