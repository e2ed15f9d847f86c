"""Attention of decode rows in fixed shapes, as captured steps need it: the host fills buffers, a graph reads them.

`FixedRows` is what the engine's graphs talk to; this module holds the plain torch form and what all forms share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView

RING: Final = 4
"""Host buffers that take turns: a copy may still wait on the device while the next two steps are prepared."""


class FixedRows(Protocol):
    """Decode attention for one bucket of rows. Made once per captured graph. plans: those made after the first."""

    plans: int

    @property
    def view(self) -> KVView:
        """What the module attends with inside the graph; always the same buffers."""

    def prepare(self, rows: np.ndarray, cached: np.ndarray, tables: np.ndarray) -> None:
        """Fill the buffers for the next replay. rows, cached: int64 [n], n up to the bucket; tables as PackedRows."""


class Staging:
    """One block of memory on the device and its copies in pinned host memory. fields: name -> (dtype, length)."""

    def __init__(self, fields: dict[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        offsets, size = {}, 0
        for name, (dtype, length) in fields.items():
            offsets[name] = size
            size += -(-dtype.itemsize * length // 16) * 16
        self._ends = {name: offsets[name] + dtype.itemsize * length for name, (dtype, length) in fields.items()}
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(RING)]
        self.device = {
            name: self._block[offsets[name] : self._ends[name]].view(dtype) for name, (dtype, _) in fields.items()
        }
        self._views: list[dict[str, np.ndarray]] = [
            {name: host[offsets[name] : self._ends[name]].view(dtype).numpy() for name, (dtype, _) in fields.items()}
            for host in self._hosts
        ]
        self._turn = 0

    def next(self) -> dict[str, np.ndarray]:
        """The host arrays to fill now. They hold what was in them four steps ago."""
        self._turn = (self._turn + 1) % RING
        return self._views[self._turn]

    def send(self, last: str, tail: int | None = None) -> None:
        """Copy the block up to the field `last`, or to `tail` bytes into the block, to the device."""
        end = self._ends[last] if tail is None else tail
        self._block[:end].copy_(self._hosts[self._turn][:end], non_blocking=True)

    def start_of(self, name: str) -> int:
        """Byte at which a field begins."""
        values = self.device[name]
        return self._ends[name] - values.numel() * values.element_size()


def places_of(rows: np.ndarray, cached: np.ndarray, tables: np.ndarray, page_size: int) -> np.ndarray:
    """Where a flat pool keeps the next key of each row: int64 [n]."""
    at = tables[rows, cached // page_size].astype(np.int64)
    places: np.ndarray = at * (2 * page_size) + cached % page_size
    return places


class TorchFixedRows:
    """The torch form: gathers every page that a row could have. Exact and slow; for float32 and for tests."""

    def __init__(self, pools: list[Tensor], page_size: int, rows: int, max_pages: int) -> None:
        self._pools = pools
        self._page_size = page_size
        self.plans = 0
        self._rows = rows
        self._max_pages = max_pages
        self._spare = pools[0].shape[0] - 1 if pools else 0
        fields = {
            "places": (torch.int64, rows),
            "cached": (torch.int64, rows),
            "halves": (torch.int64, rows * max_pages),
        }
        self._staging = Staging(fields, pools[0].device if pools else torch.device("cpu"))

    @property
    def view(self) -> TorchFixedRows:
        """See FixedRows: this object."""
        return self

    def prepare(self, rows: np.ndarray, cached: np.ndarray, tables: np.ndarray) -> None:
        """See FixedRows."""
        count = len(rows)
        host = self._staging.next()
        host["places"][:count] = places_of(rows, cached, tables, self._page_size)
        host["places"][count:] = self._spare * 2 * self._page_size
        host["cached"][:count] = cached
        host["cached"][count:] = 0
        halves = host["halves"].reshape(self._rows, self._max_pages)
        halves[:count] = tables[rows].astype(np.int64) * 2
        halves[count:] = self._spare * 2
        self._staging.send("halves")

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """See KVView."""
        pool, page = self._pools[layer], self._page_size
        heads, width = query.shape[1:]
        kv_heads = pool.shape[3]
        fields = self._staging.device
        flat = pool.view(-1, kv_heads, width)
        flat.index_copy_(0, fields["places"], key.to(pool.dtype))
        flat.index_copy_(0, fields["places"] + page, value.to(pool.dtype))
        halves = pool.view(-1, page, kv_heads, width)
        shape = (self._rows, -1, kv_heads, width)
        keys = halves.index_select(0, fields["halves"]).view(shape).transpose(1, 2)
        values = halves.index_select(0, fields["halves"] + 1).view(shape).transpose(1, 2)
        visible = torch.arange(keys.shape[2], device=pool.device)[None] <= fields["cached"][:, None]
        # Unused places may hold anything, and zero times NaN is NaN.
        values = values.masked_fill(~visible[:, None, :, None], 0)
        folded = query.view(self._rows, kv_heads, heads // kv_heads, width).to(pool.dtype)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=visible[:, None, None], scale=scale)
        return out.reshape(self._rows, heads, width).to(query.dtype)
