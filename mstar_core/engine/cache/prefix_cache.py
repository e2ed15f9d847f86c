"""Prefix cache: finds full pages by a hash of their content, so that equal prefixes are computed once.

A page's key hashes its ids, their segment's seed (kind, media) and the key of the page before. The branch is not part
of the key, because equal content is equal on every branch. Owned by the scheduler of a KV node.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from mstar_core.engine.cache.leases import Leases
from mstar_core.engine.cache.page_pool import PagePool

DIGEST_BYTES = 16


class ContentChain:
    """Running page keys of one branch, extended by every segment in order up to one that may not be cached.

    Ids that follow ids of the same seed continue their segment, so the key of a page does not depend on which of its
    ids were read as a prompt and which were generated.
    """

    def __init__(self, page_size: int) -> None:
        self.keys: list[bytes] = []
        self.is_open = True
        self._ids = np.empty(page_size, dtype="<i4")
        self._filled = 0
        self._segments = b""
        self._seed: bytes | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all segments so far."""
        return len(self.keys) * len(self._ids) + self._filled

    def extend(self, ids: np.ndarray, seed: bytes | None, *, continues: bool = True) -> None:
        """Add a segment. ids: int32 [n]; seed: what else determines its content, None = end of the cacheable prefix.

        continues: whether it may continue a segment of the same seed, as ids do and media do not.
        """
        if seed is None or not self.is_open:
            self.is_open = False
            return
        if not continues:
            self._seed = None
        at = 0
        while at < len(ids):
            if seed != self._seed or not self._filled:
                self._segments += len(seed).to_bytes(4, "little") + seed + self._filled.to_bytes(4, "little")
                self._seed = seed
            part = ids[at : at + len(self._ids) - self._filled]
            self._ids[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            at += len(part)
            if self._filled == len(self._ids):
                self._turn_page()

    def copy(self) -> ContentChain:
        """Return a copy for a forked branch."""
        twin = ContentChain(len(self._ids))
        twin.keys, twin.is_open, twin._filled = list(self.keys), self.is_open, self._filled
        twin._ids[:] = self._ids
        twin._segments, twin._seed = self._segments, self._seed
        return twin

    def _turn_page(self) -> None:
        before = self.keys[-1] if self.keys else b""
        content = before + len(self._segments).to_bytes(4, "little") + self._segments + self._ids.tobytes()
        self.keys.append(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest())
        self._segments, self._filled = b"", 0


class PrefixCache:
    """Map from keys to full pages, which the pool keeps until it needs them. leases: of sessions on these pages."""

    def __init__(self, pool: PagePool, clock: Callable[[], float] = time.monotonic) -> None:
        self.leases = Leases(pool, clock)
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict(self._forget)

    def match(self, keys: Sequence[bytes], tokens: int) -> list[int]:
        """Return the pages of the longest cached prefix that leaves at least one of `tokens` to compute."""
        return self.find(keys[: (tokens - 1) // self._pool.page_size])

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Add full pages in use. A known key keeps its first page."""
        for key, page in zip(keys, pages, strict=False):
            if key in self._page_of or page in self._key_of:
                continue
            self._page_of[key] = page
            self._key_of[page] = key
            self._pool.keep(page)

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
