"""How many pages a node's cache gets: from the config or from free memory, checked before anything is allocated.

Called when a worker starts, after the weights are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.errors import ConfigError, StartError

if TYPE_CHECKING:
    from mstar_core.graph.nodes import KVSpec

CPU_POOL_BYTES: Final = 2 << 30
"""Most that a fraction of host memory may become: pools share the host with everything else on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """What the config says: pages or tokens fix the size, else a fraction of what is free."""

    page_size: int = 16
    pages: int | None = None
    tokens: int | None = None
    memory_fraction: float = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool that fits. size_bytes: of all layers; why: where the number comes from, for the operator."""

    pages: int
    page_size: int
    size_bytes: int
    why: str

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.pages * self.page_size


def plan_pool(
    spec: KVSpec, request: PoolRequest, *, node: str, dtype: torch.dtype, free_bytes: int, longest: int,
    most_tokens: int | None = None,
) -> PoolPlan:  # fmt: skip
    """Size the pool of one node.

    free_bytes: what this node may take at most. longest: tokens of the longest sequence to be served.
    most_tokens: more than this is never needed (all slots at full length); a fraction is not stretched beyond it.
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
            f"{pages} pages of {page_size} tokens need {_mib(pages * page_bytes)}, {_mib(free_bytes)} are free",
            f"lower kv_cache to {free_bytes // page_bytes} pages or fewer",
            phase="kv",
        )
    if pages * page_size < longest:
        raise StartError(
            f"the cache of node {node} is smaller than one sequence",
            f"{pages} pages of {page_size} tokens hold {pages * page_size} tokens ({why}); max_seq_len is {longest}",
            "raise kv_cache.pages or kv_cache.memory_fraction, or lower max_seq_len",
            phase="kv",
        )
    return PoolPlan(pages=pages, page_size=page_size, size_bytes=pages * page_bytes, why=why)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device now; on the CPU, of the host, as far as pools may use it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return min(_host_free(), CPU_POOL_BYTES)


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
    fraction = request.memory_fraction
    if not 0 < fraction <= 1:
        raise ConfigError(
            f"kv_cache.memory_fraction is {fraction}", hint="over 0, at most 1", key="kv_cache.memory_fraction"
        )
    pages = int(free_bytes * fraction) // page_bytes
    why = f"{fraction:.0%} of {_mib(free_bytes)} free"
    if most_tokens is not None and pages * page_size > most_tokens:
        return -(-most_tokens // page_size), f"{most_tokens} tokens fill every slot"
    return pages, why


def _host_free() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return CPU_POOL_BYTES


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
