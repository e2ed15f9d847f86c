"""Prefix cache: finds full pages by a hash of their content, so that equal prefixes are computed once.

A page's key hashes its ids, their segment's seed (kind, media) and the key of the page before. The branch is not part
of the key, because equal content is equal on every branch. Owned by the scheduler of a KV node.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mstar_core.engine.cache.page_pool import PagePool

DIGEST_BYTES = 16


class ContentChain:
    """Running page keys of one branch, extended by every segment in order up to one that may not be cached."""

    def __init__(self, page_size: int) -> None:
        self.keys: list[bytes] = []
        self.is_open = True
        self._page_size = page_size
        self._filled = 0
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)

    def extend(self, ids: np.ndarray, seed: bytes | None) -> None:
        """Add a segment. ids: int32 [n]; seed: what else determines its content, None = end of the cacheable prefix."""
        if seed is None or not self.is_open:
            self.is_open = False
            return
        marker = len(seed).to_bytes(4, "little") + seed
        at = 0
        while at < len(ids):
            part = ids[at : at + self._page_size - self._filled]
            self._hash.update(
                marker + self._filled.to_bytes(4, "little") + np.ascontiguousarray(part, dtype="<i4").tobytes()
            )
            self._filled += len(part)
            at += len(part)
            if self._filled == self._page_size:
                self._turn_page()

    def copy(self) -> ContentChain:
        """Return a copy for a forked branch."""
        twin = ContentChain(self._page_size)
        twin.keys, twin.is_open, twin._filled = list(self.keys), self.is_open, self._filled
        twin._hash = self._hash.copy()
        return twin

    def _turn_page(self) -> None:
        key = self._hash.digest()
        self.keys.append(key)
        self._hash = hashlib.blake2b(key, digest_size=DIGEST_BYTES)
        self._filled = 0


class PrefixCache:
    """Map from keys to full pages, which the pool keeps until it needs them."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        pool.on_evict(self._forget)

    def match(self, keys: Sequence[bytes], tokens: int) -> list[int]:
        """Return the pages of the longest cached prefix that leaves at least one of `tokens` to compute."""
        most = (tokens - 1) // self._pool.page_size
        pages = []
        for key in keys[:most]:
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
