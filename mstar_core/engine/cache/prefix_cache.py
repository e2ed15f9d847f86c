"""Prefix cache: finds full pages by a hash of their content, so that equal prefixes are computed once.

A page's key hashes its ids, their segment's seed (kind, media) and the key of the page before. The branch is not part
of the key, because equal content is equal on every branch. Where a segment ends within a page, the tokens up to there
have a key of their own, so that a segment of equal content is found as a whole. Owned by the scheduler of a KV node.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from mstar_core.engine.cache.leases import Leases
from mstar_core.engine.cache.page_pool import PagePool

DIGEST_BYTES = 16
NO_ENDS: Final[Mapping[int, bytes]] = {}


class ContentChain:
    """Running page keys of one branch, extended by every segment in order up to one that may not be cached.

    Ids that follow ids of the same seed continue their segment, so the key of a page does not depend on which of its
    ids were read as a prompt and which were generated.

    keys: of full pages. ends: tokens up to the end of a segment that ends within a page -> their key.
    """

    def __init__(self, page_size: int) -> None:
        self.keys: list[bytes] = []
        self.ends: dict[int, bytes] = {}
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
                self.keys.append(self._digest())
                self._segments, self._filled = b"", 0
        if self._filled and len(ids):
            self.ends[self.tokens] = self._digest()

    def copy(self) -> ContentChain:
        """Return a copy for a forked branch."""
        twin = ContentChain(len(self._ids))
        twin.keys, twin.ends = list(self.keys), dict(self.ends)
        twin.is_open, twin._filled = self.is_open, self._filled
        twin._ids[:] = self._ids
        twin._segments, twin._seed = self._segments, self._seed
        return twin

    def _digest(self) -> bytes:
        """Return the key of the present page as far as it is filled."""
        before = self.keys[-1] if self.keys else b""
        ids = self._ids[: self._filled].tobytes()  # the length of the ids tells a part from a full page
        content = before + len(self._segments).to_bytes(4, "little") + self._segments + ids
        return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


class PrefixCache:
    """Map from keys to pages, which the pool keeps until it needs them. leases: of sessions on these pages.

    A page has the key of its whole content, once it is full, and keys of segment ends within it.
    """

    def __init__(self, pool: PagePool, clock: Callable[[], float] = time.monotonic) -> None:
        self.leases = Leases(pool, clock)
        self._pool = pool
        self._page_of: dict[bytes, int] = {}
        self._keys_of: dict[int, list[bytes]] = {}
        pool.on_evict(self._forget)

    def match(self, keys: Sequence[bytes], tokens: int) -> list[int]:
        """Return the pages of the longest cached prefix that leaves at least one of `tokens` to compute."""
        return self.find(keys[: (tokens - 1) // self._pool.page_size])

    def whole(self, chain: ContentChain, tokens: int) -> list[int] | None:
        """Return the pages of the first `tokens`, where a segment ends; None if one of them is not cached."""
        pages = self.find(chain.keys[: tokens // self._pool.page_size])
        if tokens % self._pool.page_size:
            last = self._page_of.get(chain.ends.get(tokens, b""))
            pages += [] if last is None else [last]
        return pages if len(pages) == self._pool.pages_for(tokens) else None

    def pages_of(self, chain: ContentChain) -> list[int]:
        """Return the pages of the longest cached prefix of a chain, and the one behind it that ends with a segment."""
        pages = self.find(chain.keys)
        last = max((tokens for tokens in chain.ends if tokens // self._pool.page_size == len(pages)), default=0)
        page = self._page_of.get(chain.ends[last]) if last else None
        return pages if page is None else [*pages, page]

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest cached prefix."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, keys: Sequence[bytes], pages: Sequence[int], ends: Mapping[int, bytes] = NO_ENDS) -> None:
        """Add pages in use: full ones, and one behind them that ends with a segment. A known key keeps its first page.

        ends: as in `ContentChain`. Those of pages that are not among these are ignored.
        """
        for key, page in zip(keys, pages, strict=False):
            if key not in self._page_of and page not in self._keys_of:
                self._add(key, page)
        for tokens, key in ends.items():
            place = tokens // self._pool.page_size
            if key in self._page_of or place >= len(pages):
                continue
            # An equal page may be known already, in place of this one.
            page = self._page_of.get(keys[place], pages[place]) if place < len(keys) else pages[place]
            self._add(key, page)

    def _add(self, key: bytes, page: int) -> None:
        self._page_of[key] = page
        if page not in self._keys_of:
            self._keys_of[page] = []
            self._pool.keep(page)
        self._keys_of[page].append(key)

    def _forget(self, page: int) -> None:
        for key in self._keys_of.pop(page):
            del self._page_of[key]
