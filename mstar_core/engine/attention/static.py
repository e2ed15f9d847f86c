"""Attention in static shapes, as captured steps need it: metadata, the contract of its kernels, and its buffers.

The host fills arrays, and a captured graph reads them. Decode, prefill, loop passes and prefixes are shapes of one
contract.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np

from mstar_core.engine.attention.staging import Staging

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from mstar_core.engine.attention.staging import Fields, Values

LOG2E: Final = 1.4426950408889634
"""Factor of a scale in kernels that use powers of two instead of powers of e."""

_EACH: Final = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Static shape of a bucket. pages: the most pages of a sequence. writes: whether the tokens are appended.

    tokens: query tokens of each sequence; with is_ragged, of all sequences together. is_causal: whether a token sees
    only those before it in its sequence. is_fresh: whether the sequences have empty caches.
    """

    rows: int
    tokens: int
    pages: int
    writes: bool = True
    is_causal: bool = False
    is_ragged: bool = False
    is_fresh: bool = False

    @property
    def packed_tokens(self) -> int:
        """Tokens of the whole bucket."""
        return self.tokens if self.is_ragged else self.rows * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Sequences of one replay, packed one after the other.

    rows, cached: int64 [n], the page table of each and its tokens in the cache before. counts: int64 [n], its query
    tokens; empty: those of the shape. tables: int32 [slots, max_pages].
    """

    rows: np.ndarray
    cached: np.ndarray
    tables: np.ndarray
    counts: np.ndarray = field(default_factory=lambda: _EACH)

    @property
    def starts(self) -> np.ndarray:
        """First packed token of each sequence, then their sum (cu_seqlens): int64 [n + 1]."""
        starts = np.zeros(len(self.counts) + 1, dtype=np.int64)
        np.cumsum(self.counts, out=starts[1:])
        return starts

    def places(self, page_size: int, shape: AttentionShape, elsewhere: int) -> np.ndarray:
        """Return where a flat pool keeps the key of each packed token: int64 [packed tokens], `elsewhere` for padding.

        The value of a token is one page later. Empty if nothing is appended.
        """
        if not shape.writes:
            return _EACH
        if shape.is_ragged:
            return self._ragged_places(page_size, shape.tokens, elsewhere)
        places = np.full((shape.rows, shape.tokens), elsewhere, dtype=np.int64)
        inside, count = np.arange(shape.tokens), len(self.rows)
        if count and int((self.cached % page_size).max()) + shape.tokens <= page_size:
            # All tokens of a pass share one page, as those of a frame: one lookup per sequence instead of per token.
            places[:count] = places_of(self.rows, self.cached, self.tables, page_size)[:, None] + inside
        elif count:
            at = self.cached[:, None] + inside
            places[:count] = places_of(np.broadcast_to(self.rows[:, None], at.shape), at, self.tables, page_size)
        return places.reshape(-1)

    def _ragged_places(self, page_size: int, size: int, elsewhere: int) -> np.ndarray:
        places = np.full(size, elsewhere, dtype=np.int64)
        inside, start = np.arange(page_size), 0
        # Page by page: a division per token takes several times as long.
        for row, count, cached in zip(self.rows.tolist(), self.counts.tolist(), self.cached.tolist(), strict=True):
            end, skipped = start + count, cached % page_size
            pages = self.tables[row, cached // page_size : -(-(cached + count) // page_size)].astype(np.int64)
            whole = (pages[:, None] * (2 * page_size) + inside).reshape(-1)
            places[start:end] = whole[skipped : skipped + count]
            start = end
        return places


def empty_batch(tables: np.ndarray) -> AttentionBatch:
    """Return a batch of no sequences, whose replay touches the spare page only."""
    return AttentionBatch(rows=_EACH, cached=_EACH, tables=tables)


class StaticAttention(Protocol):
    """Kernels of one bucket. Made once per captured graph by `AttentionBackend.static`.

    The sequences of a pass may be one sequence at several lengths, such as consecutive frames. In each layer all append
    before any attends, and no kernel may read cache pages before that, even pages with earlier tokens. A kernel may
    read them as it starts if nothing is appended, and in a bucket of one sequence: between two passes of one replay the
    module has a kernel that starts after all earlier ones have ended.
    """

    plans: int
    """Plans made after the first one."""

    @property
    def fields(self) -> Fields:
        """Arrays that the kernels read on the device. The last one may be filled in part."""

    def view(self, device: Mapping[str, Tensor]) -> Any:
        """Return the KVView that the module attends with. device: the fields, always in the same memory."""

    def values(self, batch: AttentionBatch) -> Values:
        """Return the fields for the next replay. Fields that did not change may be left out from the end."""

    def plan(self) -> None:
        """Plan the kernels for the values sent last, if they need a plan."""

    def reset(self) -> None:
        """Drop what is kept between the layers of a step. Called around a step, within its capture."""


class PagedKernels:
    """Base of attention over pages; a subclass is also the view that modules attend with. Most need no plan."""

    plans: int = 0

    def __init__(self, pools: list[Tensor], page_size: int, shape: AttentionShape) -> None:
        self._pools = pools
        self._page_size = page_size
        self._shape = shape
        self._device: Mapping[str, Tensor] = {}

    def view(self, device: Mapping[str, Tensor]) -> Self:
        """See StaticAttention: this object."""
        self._device = device
        return self

    def plan(self) -> None:
        """See StaticAttention: nothing is planned."""

    def reset(self) -> None:
        """See StaticAttention: nothing is kept."""


class AttentionBuffers:
    """Static buffers of one attention and of everything else that its step reads of the host; one copy per replay.

    on_prepare: called with each batch and the values beside it, for the followers of a tensor-parallel group.
    """

    def __init__(self, attention: StaticAttention, device: torch.device, beside: Fields | None = None) -> None:
        """beside: fields of the step."""
        self.attention = attention
        self.on_prepare: Callable[[AttentionBatch, Values], None] | None = None
        self._staging = Staging({**(beside or {}), **attention.fields}, device)
        self.device = self._staging.device
        self.view: Any = attention.view(self.device)

    def reset(self) -> None:
        """Drop what the attention keeps between the layers of a step. Called before and after a step."""
        self.attention.reset()

    def prepare(self, batch: AttentionBatch, beside: Values | None = None) -> None:
        """Fill the buffers for the next replay. Earlier replays may still wait on the device."""
        if self.on_prepare is not None:
            self.on_prepare(batch, beside or {})
        self._staging.put({**(beside or {}), **self.attention.values(batch)})
        self.attention.plan()


def places_of(rows: np.ndarray, cached: np.ndarray, tables: np.ndarray, page_size: int) -> np.ndarray:
    """Return where a flat pool keeps the key after `cached` tokens of each sequence, int64 [n].

    Its value is one page later.
    """
    at = tables[rows, cached // page_size].astype(np.int64)
    places: np.ndarray = at * (2 * page_size) + cached % page_size
    return places
