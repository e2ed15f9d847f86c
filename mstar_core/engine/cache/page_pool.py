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

    An allocation evicts cached pages, the oldest first, when free ones do not suffice. Leased pages are known to the
    prefix cache and are never evicted: the owner of the leases ends one when no other cached page is left.
    leased: pages with a lease, used or cached. stale: see `take_stale`.
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
        self._leases = [0] * total
        self._idle: set[int] = set()  # leased pages that no table refers to
        self.leased = 0
        self._written = bytearray(total)
        self.stale: list[int] = []
        self._forget: Callable[[int], None] = _ignore
        self._end_a_lease: Callable[[], None] = _fail

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that only the prefix cache keeps."""
        return len(self._aged) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages that at least one table refers to."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Pages that an allocation can get: free and cached ones."""
        return len(self._free) + self.cached

    def pages_for(self, tokens: int) -> int:
        """Return the pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def on_evict(self, forget: Callable[[int], None]) -> None:
        """Set the function that is called when a cached page is evicted."""
        self._forget = forget

    def on_shortage(self, end_a_lease: Callable[[], None]) -> None:
        """Set the function that ends a lease, called when all cached pages are leased and one must be evicted."""
        self._end_a_lease = end_a_lease

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
                assert self._known[page], f"page {page} is free and cannot be shared"
                self._idle.discard(page)
                self._aged.pop(page, None)
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
                self._keep_idle(page)
            else:
                self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep a used page as cached once its last table releases it."""
        assert self.refs[page] > 0, f"page {page} is not in use"
        self._known[page] = 1

    def is_known(self, page: int) -> bool:
        """Return whether the prefix cache knows a page, whose content must not change then."""
        return bool(self._known[page])

    def lease(self, pages: Sequence[int]) -> None:
        """Add one lease to each page, which the prefix cache must know."""
        for page in pages:
            assert self._known[page], f"page {page} is not cached"
            self._leases[page] += 1
            self.leased += self._leases[page] == 1
            if page in self._aged:
                del self._aged[page]
                self._idle.add(page)

    def end_lease(self, pages: Sequence[int]) -> None:
        """Drop one lease of each page. Pages without another one age from now on, the deepest first."""
        for page in reversed(pages):
            self._leases[page] -= 1
            self.leased -= self._leases[page] == 0
            if page in self._idle:
                self._idle.remove(page)
                self._keep_idle(page)

    def _keep_idle(self, page: int) -> None:
        if self._leases[page]:
            self._idle.add(page)
        else:
            self._aged[page] = None

    def evict_cached(self) -> None:
        """Evict all cached pages, leased ones too."""
        while self.cached:
            self._evict()

    def _evict(self) -> None:
        while not self._aged:
            self._end_a_lease()
        page, _ = self._aged.popitem(last=False)
        self._known[page] = 0
        self._forget(page)
        self._free.append(page)


def _ignore(page: int) -> None:
    """Ignore an eviction, without a prefix cache."""


def _fail() -> None:
    raise AssertionError("a page is leased and nothing owns the leases")
