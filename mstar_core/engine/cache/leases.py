"""Leases of sessions on cached pages, which are evicted after all others. Owned by the prefix cache of a KV node."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mstar_core.engine.cache.page_pool import PagePool

SHARE: Final = 0.3
"""Share of the pool that leases may keep."""


class Lease(NamedTuple):
    """Pages of one session, in token order. until: on the clock of the leases."""

    pages: Sequence[int]
    until: float


class Leases:
    """One lease per session, the oldest first. Allocations release the oldest before they fail."""

    def __init__(self, pool: PagePool, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._clock = clock
        self._most = int(SHARE * pool.total)
        self._held: OrderedDict[str, Lease] = OrderedDict()
        pool.on_shortage(self._release_oldest)

    def renew(self, session: str, pages: Sequence[int], seconds: float) -> None:
        """Replace the lease of a session. Of pages beyond the share, those at the start of the prefix are kept."""
        self.expire()
        self.release(session)
        kept = pages[: self._most]
        if not kept or seconds <= 0:
            return
        self._pool.lease(kept)
        self._held[session] = Lease(kept, self._clock() + seconds)
        while self._pool.leased > self._most:
            self._release_oldest()

    def release(self, session: str) -> None:
        """End the lease of a session, if it has one. Its pages stay cached."""
        lease = self._held.pop(session, None)
        if lease is not None:
            self._pool.end_lease(lease.pages)

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self._clock()
        for session in [session for session, lease in self._held.items() if lease.until <= now]:
            self.release(session)

    def end_all(self) -> None:
        """End all leases. Their pages stay cached."""
        while self._held:
            self._release_oldest()

    def _release_oldest(self) -> None:
        self.release(next(iter(self._held)))
