"""Reference-counted allocator of one node's KV-cache pages: knows counts, not contents. Owned by the scheduler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from mstar_core.errors import EngineError


class OutOfPages(EngineError):
    """Fewer pages are available than requested; none was taken. Facts: wanted, available."""

    code = "out_of_pages"


class PagePool:
    """Pages in three states: used while a table refers to them, cached while only the prefix cache does, else free.

    An allocation evicts cached pages, the oldest first, when free ones do not suffice. stale: see `take_stale`.
    """

    def __init__(self, total: int, page_size: int) -> None:
        if total < 1 or page_size < 1:
            raise EngineError(f"a pool of {total} pages of {page_size} tokens cannot hold anything")
        self.total = total
        self.page_size = page_size
        self.refs = [0] * total  # a list: numpy takes five times as long for access page by page
        self._known = bytearray(total)
        self._free: list[int] = list(range(total - 1, -1, -1))
        self._aged: OrderedDict[int, None] = OrderedDict()
        self._written = bytearray(total)
        self.stale: list[int] = []
        self._forget: Callable[[int], None] = _ignore

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only the prefix cache keeps."""
        return len(self._aged)

    @property
    def used(self) -> int:
        """Pages that at least one table refers to."""
        return self.total - len(self._free) - len(self._aged)

    @property
    def available(self) -> int:
        """Pages that an allocation can get: free and cached ones."""
        return len(self._free) + len(self._aged)

    def pages_for(self, tokens: int) -> int:
        """Return the pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def on_evict(self, forget: Callable[[int], None]) -> None:
        """Set the function that is called when a cached page is evicted."""
        self._forget = forget

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages with one reference each. Raises OutOfPages, without taking any, if too few exist."""
        if count > self.available:
            raise OutOfPages(
                "the cache has no page left",
                f"{count} pages wanted, {self.available} of {self.total} available",
                wanted=count,
                available=self.available,
            )
        while len(self._free) < count:
            self._evict()
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self.refs[page] = 1
            if self._written[page]:
                self.stale.append(page)
            self._written[page] = 1
        return pages

    def take_stale(self) -> list[int]:
        """Return the pages allocated since the last call that hold values of an earlier owner.

        They must be cleared before use: a stale NaN would reach the new owner through masked positions.
        """
        stale, self.stale = self.stale, []
        return stale

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each page. A cached page becomes used."""
        for page in pages:
            if self.refs[page] == 0:
                assert page in self._aged, f"page {page} is free and cannot be shared"
                del self._aged[page]
            self.refs[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page.

        The deepest page of a chain ages first, so that eviction shortens prefixes from their end.
        """
        refs, known = self.refs, self._known
        for page in reversed(pages):
            assert refs[page] > 0, f"page {page} is released twice"
            refs[page] -= 1
            if refs[page]:
                continue
            if known[page]:
                self._aged[page] = None
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep a used page as cached once its last table releases it."""
        assert self.refs[page] > 0, f"page {page} is not in use"
        self._known[page] = 1

    def evict_cached(self) -> None:
        """Evict all cached pages."""
        while self._aged:
            self._evict()

    def _evict(self) -> None:
        page, _ = self._aged.popitem(last=False)
        self._known[page] = 0
        self._forget(page)
        self._free.append(page)


def _ignore(page: int) -> None:
    """Ignore an eviction, without a prefix cache."""
