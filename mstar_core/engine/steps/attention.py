"""Attention metadata: the sequences of one forward, and the static shape of a bucket of captured forwards.

Captured and uncaptured forwards use the same record and the same code for places and page lists. Decode is its case of
one token per sequence. Cost model: a decode step has no Python loop over its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Static shape of a bucket. pages: the most pages of a sequence. writes: whether the tokens are appended.

    tokens: query tokens of each sequence; with is_ragged, of all sequences together. causal: whether a token sees only
    those before it in its sequence. is_fresh: whether the sequences have empty caches.
    """

    sequences: int
    tokens: int
    pages: int
    writes: bool = True
    causal: bool = False
    is_ragged: bool = False
    is_fresh: bool = False

    @property
    def packed_tokens(self) -> int:
        """Tokens of the whole bucket."""
        return self.tokens if self.is_ragged else self.sequences * self.tokens


_NO_MEMORY: Final = np.zeros((2, 0), dtype=np.int64)


class PageLists(NamedTuple):
    """Pages in use. starts: int32 [n + 1]; pages: int32 [starts[n]]; last: int32 [n], tokens of the last page."""

    starts: np.ndarray
    pages: np.ndarray
    last: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Sequences of one forward, packed one after the other. Each has at least one token.

    query_starts: int64 [n + 1], first packed token of each sequence, then the number of tokens (cu_seqlens).
    page_rows: int64 [n], the row of each sequence in `tables`. lengths: int64 [n], tokens in the cache before.
    causal: bool [n], whether a token sees only those before it. writes: bool [n], whether the tokens are appended.
    tables: int32 [slots, max_pages], the page tables of all slots, not a copy.
    memory: int64 [2, n], the row in `tables` and the tokens of the memory of each sequence; None without memories.
    """

    query_starts: np.ndarray
    page_rows: np.ndarray
    lengths: np.ndarray
    causal: np.ndarray
    writes: np.ndarray
    tables: np.ndarray
    memory: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        page_rows: np.ndarray,
        lengths: np.ndarray,
        tables: np.ndarray,
        counts: int | np.ndarray = 1,
        *,
        causal: bool = True,
        writes: bool = True,
        memory: np.ndarray | None = None,
    ) -> AttentionMetadata:
        """Return the metadata of sequences with one mask. counts: tokens of each sequence, or int64 [n]."""
        count = len(page_rows)
        return cls(
            query_starts=_equal_starts(count, counts) if isinstance(counts, int) else starts_of(counts),
            page_rows=page_rows,
            lengths=lengths,
            causal=_flags(count, causal),
            writes=_flags(count, writes),
            tables=tables,
            memory=memory,
        )

    @classmethod
    def empty(cls, tables: np.ndarray) -> AttentionMetadata:
        """Return the metadata of no sequences. A replay with it touches the spare page only."""
        none = np.zeros(0, dtype=np.int64)
        return cls.of(none, none, tables)

    @property
    def tokens(self) -> int:
        """Packed tokens of all sequences."""
        return int(self.query_starts[-1])

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one token."""
        return self.tokens == len(self.page_rows)

    @property
    def counts(self) -> np.ndarray:
        """Tokens of each sequence, int64 [n]."""
        counts: np.ndarray = self.query_starts[1:] - self.query_starts[:-1]
        return counts

    @property
    def lengths_after(self) -> np.ndarray:
        """Tokens of each sequence with its own of this forward, int64 [n]."""
        ends: np.ndarray = self.lengths + (1 if self.is_decode else self.counts)
        return ends

    @property
    def leading_decodes(self) -> int:
        """Leading sequences that append one token each: the decode batch of a mixed forward."""
        appends_one = self.causal & self.writes
        if not self.is_decode:
            appends_one &= self.counts == 1
        count = len(appends_one)
        return count if np.count_nonzero(appends_one) == count else int(appends_one.argmin())

    def select(self, chosen: slice | np.ndarray) -> AttentionMetadata:
        """Return some of the sequences, packed anew. chosen: a slice, indices or bool [n]."""
        return AttentionMetadata(
            query_starts=starts_of(self.counts[chosen]),
            page_rows=self.page_rows[chosen],
            lengths=self.lengths[chosen],
            causal=self.causal[chosen],
            writes=self.writes[chosen],
            tables=self.tables,
            memory=None if self.memory is None else self.memory[:, chosen],
        )

    def of_memory(self) -> AttentionMetadata:
        """Return the memories as sequences whose last token is the one that attends. Nothing is appended."""
        rows, lengths = _NO_MEMORY if self.memory is None else self.memory
        return AttentionMetadata.of(rows, lengths - 1, self.tables, writes=False)

    def tokens_of(self, chosen: np.ndarray) -> np.ndarray:
        """Return the packed tokens of some of the sequences, int64. chosen: bool [n]."""
        tokens: np.ndarray = np.nonzero(np.repeat(chosen, self.counts))[0]
        return tokens

    def places(self, page_size: int, size: int, elsewhere: int) -> np.ndarray:
        """Return where a flat pool keeps the key of each packed token, int64 [size]. Its value is one page later.

        Tokens that are not appended, and padding beyond the packed tokens, have the place `elsewhere`.
        """
        all_written = np.count_nonzero(self.writes) == len(self.writes)
        if all_written and self.tokens == size:
            return self._places(page_size)
        padded = np.full(size, elsewhere, dtype=np.int64)
        if all_written:
            padded[: self.tokens] = self._places(page_size)
        else:  # the pages of a sequence that only reads may end before its tokens
            padded[self.tokens_of(self.writes)] = self.select(self.writes)._places(page_size)
        return padded

    def page_lists(self, page_size: int) -> PageLists:
        """Return the pages of each sequence with its tokens of this forward."""
        ends = self.lengths_after
        counts = -(-ends // page_size)
        starts = np.zeros(len(ends) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        widest = int(counts.max(initial=0))
        inside = np.arange(widest)[None] < counts[:, None]
        pages: np.ndarray = self.tables[self.page_rows, :widest][inside]
        last: np.ndarray = (ends - (counts - 1) * page_size).astype(np.int32)
        return PageLists(starts, pages, last)

    def _places(self, page_size: int) -> np.ndarray:
        """Return the place of each packed token, int64 [tokens]. All are appended."""
        total, starts, lengths = self.tokens, self.query_starts, self.lengths
        first = lengths // page_size
        within = lengths - first * page_size
        fits = 1 < len(lengths) and total <= page_size * len(lengths)
        if total == len(lengths) or (fits and int((within + self.counts).max()) <= page_size):
            # Each sequence has one page here, as in decode and for frames: one look-up per sequence, no Python loop.
            heads: np.ndarray = self.tables[self.page_rows, first] * np.int64(2 * page_size) + within
            if total == len(lengths):
                return heads
            return np.repeat(heads - starts[:-1], self.counts) + np.arange(total)
        places = np.empty(total, dtype=np.int64)
        inside = np.arange(page_size)
        # Page by page: a division per token takes several times as long.
        bounds = zip(self.page_rows.tolist(), starts.tolist(), starts[1:].tolist(), lengths.tolist(), strict=False)
        for row, start, end, length in bounds:
            pages = self.tables[row, length // page_size : -(-(length + end - start) // page_size)].astype(np.int64)
            whole = (pages[:, None] * (2 * page_size) + inside).reshape(-1)
            places[start:end] = whole[length % page_size :][: end - start]
        return places


def starts_of(counts: np.ndarray) -> np.ndarray:
    """Return the first packed token of each of several sequences, then the number of tokens: int64 [n + 1]."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


# A decode batch keeps its size for many steps.
@lru_cache(maxsize=1024)
def _equal_starts(count: int, tokens: int) -> np.ndarray:
    starts = np.arange(count + 1, dtype=np.int64) * tokens
    starts.flags.writeable = False
    return starts


@lru_cache(maxsize=1024)
def _flags(count: int, value: bool) -> np.ndarray:
    flags = np.full(count, value)
    flags.flags.writeable = False
    return flags
