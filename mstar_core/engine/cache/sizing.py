"""How many pages a node's cache gets: from the config or from its budget, checked before anything is allocated.

Called when a worker starts, after the weights are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_core.engine.cache.budget import mib
from mstar_core.errors import ConfigError, StartError

if TYPE_CHECKING:
    import torch

    from mstar_core.graph.spec.nodes import KVSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """What the config says: pages or tokens fix the size, else the node takes what it is given."""

    page_size: int = 16
    pages: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool that fits. size_bytes: of all layers; why: where the number comes from, and why_free the limit of it."""

    pages: int
    page_size: int
    size_bytes: int
    why: str
    why_free: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.pages * self.page_size

    @property
    def text(self) -> str:
        """`KV pool 22,873 MiB: 209,104 tokens in 13,069 pages (kv_cache.tokens = 209100)`."""
        return f"KV pool {mib(self.size_bytes)}: {self.tokens:,} tokens in {self.pages:,} pages ({self.why})"


def plan_pool(
    spec: KVSpec, request: PoolRequest, *, node: str, dtype: torch.dtype, free_bytes: int, longest: int,
    most_tokens: int | None = None, why_free: str = "",
) -> PoolPlan:  # fmt: skip
    """Size the pool of one node.

    free_bytes: what this node may take at most; why_free: where that comes from, for errors. longest: tokens of the
    longest sequence to be served. most_tokens: more is never needed (all slots at full length), and not taken.
    Raises ConfigError for contradicting settings and StartError, with the numbers, when it cannot fit.
    """
    page_size = spec.page or request.page_size
    if page_size < 1:
        raise ConfigError(f"a page of {page_size} tokens holds nothing", key="kv_cache.page_size")
    if request.pages is not None and request.tokens is not None:
        raise ConfigError("kv_cache sets both pages and tokens", hint="keep one of them", key="kv_cache.tokens")
    page_bytes = spec.bytes_per_token(dtype.itemsize) * page_size
    pages, why = _wanted(request, page_size, page_bytes, free_bytes, most_tokens)
    if pages * page_bytes > free_bytes:
        raise StartError(
            f"the cache of node {node} does not fit",
            f"{pages} pages of {page_size} tokens need {mib(pages * page_bytes)}, it may take {mib(free_bytes)}"
            + (f" ({why_free})" if why_free else ""),
            f"lower kv_cache to {free_bytes // page_bytes} pages or fewer, or raise kv_cache.memory_fraction",
            phase="kv",
        )
    if pages * page_size < longest:
        raise StartError(
            f"the cache of node {node} is smaller than one sequence",
            f"{pages} pages of {page_size} tokens hold {pages * page_size} tokens ({why}"
            + (f": {why_free}" if why_free else "")
            + f"); max_seq_len is {longest}",
            "raise kv_cache.pages, kv_cache.memory_fraction or the node's kv_cache.share, or lower max_seq_len",
            phase="kv",
        )
    return PoolPlan(pages=pages, page_size=page_size, size_bytes=pages * page_bytes, why=why, why_free=why_free)


def _wanted(
    request: PoolRequest, page_size: int, page_bytes: int, free_bytes: int, most_tokens: int | None
) -> tuple[int, str]:
    if request.pages is not None:
        if request.pages < 1:
            raise ConfigError(f"kv_cache.pages is {request.pages}", hint="at least 1", key="kv_cache.pages")
        return request.pages, f"kv_cache.pages = {request.pages}"
    if request.tokens is not None:
        if request.tokens < 1:
            raise ConfigError(f"kv_cache.tokens is {request.tokens}", hint="at least 1", key="kv_cache.tokens")
        return -(-request.tokens // page_size), f"kv_cache.tokens = {request.tokens}"
    pages = free_bytes // page_bytes
    if most_tokens is not None and pages * page_size > most_tokens:
        return -(-most_tokens // page_size), f"{most_tokens} tokens fill every slot"
    return pages, f"all of its {mib(free_bytes)}"
