"""Page tables of all slots as flat arrays: which page holds which tokens. Owned by the KV engine.

The decode loop tests `length < capacity` for all rows at once and calls `ensure` only where that fails.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mstar_core.engine.cache.page_pool import PagePool
from mstar_core.errors import TooLarge


class PageCopy(NamedTuple):
    """A page whose contents must be copied on the device before the next write."""

    source: int
    target: int


class PageTables:
    """One table per slot.

    ids: int32 [rows, max_pages], page numbers in token order. count: int32 [rows], pages held.
    length: int64 [rows], tokens in the cache. capacity: int64 [rows], tokens up to which the row may write as it is.
    """

    def __init__(self, pool: PagePool, rows: int, max_tokens: int) -> None:
        self.pool = pool
        self.max_tokens = max_tokens
        self.ids = np.zeros((rows, pool.pages_for(max_tokens)), dtype=np.int32)
        self.count = np.zeros(rows, dtype=np.int32)
        self.length = np.zeros(rows, dtype=np.int64)
        self.capacity = np.zeros(rows, dtype=np.int64)

    def pages(self, row: int) -> list[int]:
        """The pages of a row, first token first."""
        found: list[int] = self.ids[row, : self.count[row]].tolist()
        return found

    def missing(self, row: int, tokens: int) -> int:
        """Pages that `ensure` would allocate to make `tokens` more tokens writable."""
        wanted = self.pool.pages_for(int(self.length[row]) + tokens)
        return max(0, wanted - int(self.count[row])) + (self._shared_tail(row) is not None)

    def ensure(self, row: int, tokens: int) -> list[PageCopy]:
        """Make room for `tokens` more tokens and give the page copies to do first.

        All or nothing: OutOfPages leaves the row as it was. TooLarge when the row would outgrow its table.
        """
        length = int(self.length[row])
        wanted = self.pool.pages_for(length + tokens)
        if length + tokens > self.max_tokens:
            raise TooLarge(
                "the sequence outgrows the cache",
                f"{length} tokens are cached and {tokens} more exceed {self.max_tokens}",
                "shorten the input or raise max_seq_len",
            )
        if length + tokens <= self.capacity[row]:
            return []
        tail = self._shared_tail(row)
        held = int(self.count[row])
        extra = max(0, wanted - held)
        fresh = self.pool.allocate(extra + (tail is not None)) if extra or tail is not None else []
        copies = []
        if tail is not None:
            target = fresh.pop()
            source = int(self.ids[row, tail])
            self.ids[row, tail] = target
            self.pool.release([source])
            copies.append(PageCopy(source, target))
        if extra:
            self.ids[row, held : held + extra] = fresh
            self.count[row] = held + extra
        self._pad(row)
        self.capacity[row] = int(self.count[row]) * self.pool.page_size
        return copies

    def adopt(self, row: int, pages: list[int]) -> None:
        """Begin an empty row with full pages that are already cached. Shares them."""
        assert self.count[row] == 0, "only an empty row can adopt pages"
        self.pool.share(pages)
        self.ids[row, : len(pages)] = pages
        self.count[row] = len(pages)
        self._pad(row)
        self.length[row] = self.capacity[row] = len(pages) * self.pool.page_size

    def fork(self, source: int, into: int) -> None:
        """Make `into` refer to the pages of `source`; the first to write a shared page copies it."""
        self.release(into)
        pages = self.pages(source)[: self.pool.pages_for(int(self.length[source]))]
        self.pool.share(pages)
        self.ids[into, : len(pages)] = pages
        self.count[into] = len(pages)
        self._pad(into)
        self.length[into] = self.length[source]
        # Neither may write into the shared tail, nor past it, before `ensure` has looked.
        self.capacity[into] = self.length[into]
        self.capacity[source] = self.length[source]

    def truncate(self, row: int, tokens: int) -> None:
        """Forget the last `tokens` tokens and give back the pages that only they filled."""
        self.length[row] -= tokens
        kept = self.pool.pages_for(int(self.length[row]))
        self.pool.release(self.ids[row, kept : self.count[row]].tolist())
        self.count[row] = kept
        self._pad(row)
        # The tail may be shared by now: `ensure` has to look before the next write.
        self.capacity[row] = self.length[row]

    def release(self, row: int) -> None:
        """Give back every page of a row."""
        self.pool.release(self.pages(row))
        self.count[row] = self.length[row] = self.capacity[row] = 0

    def _pad(self, row: int) -> None:
        # Batched reads run past a row's last page: they must meet this row's own values, not a stranger's.
        self.ids[row, self.count[row] :] = self.ids[row, 0]

    def _shared_tail(self, row: int) -> int | None:
        """Index of the partly filled page when other tables refer to it too."""
        length = int(self.length[row])
        index = length // self.pool.page_size
        if length % self.pool.page_size == 0 or index >= self.count[row]:
            return None
        return index if self.pool.refs[self.ids[row, index]] > 1 else None
