"""Page tables of all slots, as flat arrays. Owned by the node's scheduler.

The decode loop tests `length < capacity` for all slots at once and calls `ensure` only where that fails.
"""

from __future__ import annotations

import numpy as np

from mstar_core.engine.cache.page_pool import PagePool
from mstar_core.engine.steps.updates import PageCopy
from mstar_core.errors import TooLarge


class PageTables:
    """One page table per slot.

    ids: int32 [slots, max_pages], page numbers in token order. count: int32 [slots], pages held.
    length: int64 [slots], tokens in the cache. capacity: int64 [slots], tokens that fit without another `ensure`.
    """

    def __init__(self, pool: PagePool, slots: int, max_tokens: int) -> None:
        self.pool = pool
        self.max_tokens = max_tokens
        self.ids = np.zeros((slots, pool.pages_for(max_tokens)), dtype=np.int32)
        self.count = np.zeros(slots, dtype=np.int32)
        self.length = np.zeros(slots, dtype=np.int64)
        self.capacity = np.zeros(slots, dtype=np.int64)

    def pages(self, slot: int) -> list[int]:
        """Return the pages of a slot, in token order."""
        pages: list[int] = self.ids[slot, : self.count[slot]].tolist()
        return pages

    def missing(self, slot: int, tokens: int) -> int:
        """Return the pages that `ensure` would allocate for `tokens` more tokens."""
        needed = self.pool.pages_for(int(self.length[slot]) + tokens)
        return max(0, needed - int(self.count[slot])) + (self._shared_tail(slot) is not None)

    def ensure(self, slot: int, tokens: int) -> list[PageCopy]:
        """Allocate pages for `tokens` more tokens. Returns the page copies that must be done first.

        Raises OutOfPages, which changes nothing, and TooLarge if the slot would outgrow its table.
        """
        length = int(self.length[slot])
        needed = self.pool.pages_for(length + tokens)
        if length + tokens > self.max_tokens:
            raise TooLarge(
                "the sequence outgrows the cache",
                f"{length} tokens are cached and {tokens} more exceed {self.max_tokens}",
                "shorten the input or raise max_seq_len",
            )
        if length + tokens <= self.capacity[slot]:
            return []
        tail = self._shared_tail(slot)
        held = int(self.count[slot])
        extra = max(0, needed - held)
        fresh = self.pool.allocate(extra + (tail is not None)) if extra or tail is not None else []
        copies = []
        if tail is not None:
            target = fresh.pop()
            source = int(self.ids[slot, tail])
            self.ids[slot, tail] = target
            self.pool.release([source])
            copies.append(PageCopy(source, target))
        if extra:
            self.ids[slot, held : held + extra] = fresh
            self.count[slot] = held + extra
        self._pad(slot)
        self.capacity[slot] = int(self.count[slot]) * self.pool.page_size
        return copies

    def adopt(self, slot: int, pages: list[int], tokens: int | None = None) -> None:
        """Append pages that are already cached behind the slot's own full pages, and share them.

        The first replaces a partly filled page of the slot: it starts with the same tokens. tokens: length of the slot
        afterwards, which may end within the last page; None: all pages are full.
        """
        full = int(self.length[slot]) // self.pool.page_size
        self.pool.share(pages)
        self.pool.release(self.ids[slot, full : self.count[slot]].tolist())
        self.ids[slot, full : full + len(pages)] = pages
        self.count[slot] = full + len(pages)
        self._pad(slot)
        whole = int(self.count[slot]) * self.pool.page_size
        self.length[slot] = self.capacity[slot] = whole if tokens is None else tokens

    def fork(self, source: int, into: int) -> None:
        """Make slot `into` share the pages of slot `source`, copy-on-write."""
        self.release(into)
        pages = self.pages(source)[: self.pool.pages_for(int(self.length[source]))]
        self.pool.share(pages)
        self.ids[into, : len(pages)] = pages
        self.count[into] = len(pages)
        self._pad(into)
        self.length[into] = self.length[source]
        # Both must call `ensure` before they write into the shared tail, or past it.
        self.capacity[into] = self.length[into]
        self.capacity[source] = self.length[source]

    def truncate(self, slot: int, tokens: int) -> None:
        """Remove the last `tokens` tokens and release the pages that only they filled."""
        self.length[slot] -= tokens
        kept = self.pool.pages_for(int(self.length[slot]))
        self.pool.release(self.ids[slot, kept : self.count[slot]].tolist())
        self.count[slot] = kept
        self._pad(slot)
        # The tail may be shared: the next write must call `ensure` first.
        self.capacity[slot] = self.length[slot]

    def release(self, slot: int) -> None:
        """Release every page of a slot."""
        self.pool.release(self.pages(slot))
        self.count[slot] = self.length[slot] = self.capacity[slot] = 0

    def _pad(self, slot: int) -> None:
        # Batched reads go past the last page of a slot, and must not read pages of other requests there.
        self.ids[slot, self.count[slot] :] = self.ids[slot, 0]

    def _shared_tail(self, slot: int) -> int | None:
        """Return the index of the partly filled page if others read it, now or from the prefix cache; else None."""
        length = int(self.length[slot])
        index = length // self.pool.page_size
        if length % self.pool.page_size == 0 or index >= self.count[slot]:
            return None
        page = int(self.ids[slot, index])
        return index if self.pool.refs[page] > 1 or self.pool.is_known(page) else None
