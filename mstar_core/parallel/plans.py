"""Plans that the leader of a tensor-parallel group sends to its followers, before it launches the same work itself.

Each plan concerns one KV node and names what its followers do to their device state: slots, pages, forwards, captured
steps. Arrays travel as bytes. A frame holds the plans up to and including one launch, in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from mstar_core.graph.declare.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class WireArray(msgspec.Struct, frozen=True, array_like=True):
    """A numpy array, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: np.ndarray) -> WireArray:
        """Encode an array."""
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        """Return the array, writable."""
        return np.frombuffer(bytearray(self.data), dtype=np.dtype(self.dtype)).reshape(self.shape)


class WireTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: with its bytes, or without (None) if it follows as a broadcast on the devices."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | None

    @classmethod
    def of(cls, value: Tensor) -> WireTensor:
        """Encode a tensor, with its bytes if it is on the host."""
        data = bytes(value.contiguous().view(-1).view(torch.uint8).numpy().data) if value.is_cpu else None
        return cls(str(value.dtype).removeprefix("torch."), tuple(value.shape), data)

    def tensor(self, device: torch.device) -> Tensor:
        """Return the tensor; without bytes an uninitialized one on the device, for the broadcast."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.data is None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(dtype).view(self.shape)


class SlotState(msgspec.Struct, frozen=True, tag="state", kw_only=True):
    """Page tables and sampling parameters by slot that changed since the last plan. tables: page ids, int32."""

    node: str
    tables: dict[int, bytes] = {}
    draws: dict[int, SamplingParams] = {}


class SlotsChanged(msgspec.Struct, frozen=True, tag="slots", kw_only=True):
    """Changes of `Slots.flush`: last ids, stop ids, slots whose seen ids are cleared, seen ids by flat index."""

    node: str
    moved: WireArray | None = None
    armed: WireArray | None = None
    blank: WireArray | None = None
    met: WireArray | None = None


class SlotCopied(msgspec.Struct, frozen=True, tag="slot_copy", kw_only=True):
    """Device state of slot `source` copied to slot `into`."""

    node: str
    source: int
    into: int


class RowsChanged(msgspec.Struct, frozen=True, tag="rows", kw_only=True):
    """New values of a port of the resident loop in these slots (int64)."""

    node: str
    port: str
    slots: WireArray
    values: WireTensor


class PagesCleared(msgspec.Struct, frozen=True, tag="clear", kw_only=True):
    """Pages to zero."""

    node: str
    pages: list[int]


class PagesCopied(msgspec.Struct, frozen=True, tag="copy", kw_only=True):
    """Pages to copy: (source, target)."""

    node: str
    pairs: list[tuple[int, int]]


class PagesSaved(msgspec.Struct, frozen=True, tag="save", kw_only=True):
    """Pages to copy to the host, under a number."""

    node: str
    number: int
    pages: list[int]


class PagesRestored(msgspec.Struct, frozen=True, tag="restore", kw_only=True):
    """Saved pages to write back into these pages."""

    node: str
    number: int
    pages: list[int]


class PagesDropped(msgspec.Struct, frozen=True, tag="drop", kw_only=True):
    """Saved pages that nothing refers to any more."""

    node: str
    numbers: list[int]


class WireAttention(msgspec.Struct, frozen=True, array_like=True):
    """Attention metadata; the fields are those of `AttentionMetadata`, except the page tables, which each rank holds.

    The last three are None if each sequence appends one causal token, as in decode.
    """

    page_rows: WireArray
    lengths: WireArray
    query_starts: WireArray | None = None
    causal: WireArray | None = None
    writes: WireArray | None = None


class WireDraws(msgspec.Struct, frozen=True, array_like=True):
    """Ids to draw. slots, counters: int64 [n]. ends: rows of the hidden states, None for all. tracked: first slots
    whose stop state is kept on the device."""

    slots: WireArray
    counters: WireArray
    ends: WireArray | None
    tracked: int


class Forward(msgspec.Struct, frozen=True, tag="forward", kw_only=True):
    """An uncaptured forward. decodes: its first sequences that are the decode batch. lists: ports that are lists of
    tensors."""

    node: str
    attention: WireAttention
    decodes: int
    positions: WireTensor
    ports: dict[str, WireTensor]
    lists: dict[str, list[WireTensor]] = {}
    wants_logits: bool = False
    stores_rows: bool = False
    draws: WireDraws | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Host values of one buffer of a captured step. buffer: its number in the step. attention: None for a buffer
    without attention."""

    buffer: int
    values: dict[str, WireArray]
    attention: WireAttention | None = None


class Late(msgspec.Struct, frozen=True, array_like=True):
    """A port of a captured step that is filled after its host buffers. part: of the step; value: the part in use."""

    part: int
    port: str
    value: WireTensor


class Replay(msgspec.Struct, frozen=True, tag="replay", kw_only=True):
    """A captured step. kind, size: its bucket. loads: what its buffers are filled with."""

    node: str
    kind: bytes
    size: tuple[int, ...]
    loads: list[Load]
    late: list[Late] = []


class Capture(msgspec.Struct, frozen=True, tag="capture", kw_only=True):
    """A step to capture."""

    node: str
    kind: bytes
    size: tuple[int, ...]


class Compare(msgspec.Struct, frozen=True, tag="compare", kw_only=True):
    """Request for a checksum of the last ids, which the follower answers by `Checksum`."""

    node: str
    number: int


class StopPlans(msgspec.Struct, frozen=True, tag="stop", kw_only=True):
    """The end of the group."""

    reason: str = ""


Plan = (
    SlotState
    | SlotsChanged
    | SlotCopied
    | RowsChanged
    | PagesCleared
    | PagesCopied
    | PagesSaved
    | PagesRestored
    | PagesDropped
    | Forward
    | Replay
    | Capture
    | Compare
    | StopPlans
)


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Plans in order. sequence: number of the frame, from 1."""

    sequence: int
    plans: list[Plan]


class Checksum(msgspec.Struct, frozen=True, array_like=True):
    """A follower's answer to `Compare`. index: its place in the group."""

    index: int
    node: str
    number: int
    value: int


def wire_tensors(
    ports: Mapping[str, Tensor | list[Tensor]],
) -> tuple[dict[str, WireTensor], dict[str, list[WireTensor]]]:
    """Encode a module's ports: single tensors and lists of tensors."""
    single = {name: WireTensor.of(value) for name, value in ports.items() if not isinstance(value, list)}
    lists = {name: [WireTensor.of(each) for each in value] for name, value in ports.items() if isinstance(value, list)}
    return single, lists
