"""Sizes of KV pools: the memory budget of a rank, its division among nodes, and the pages of each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.config.resolved import GPU_RESERVE_BYTES
from mstar_core.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from mstar_core.graph.declare.nodes import KVSpec

CPU_POOL_BYTES: Final = 2 << 30
"""Most host memory that the pools of a CPU rank may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One rank's memory in bytes. fraction: the rank's share of total_bytes, weights, reserve and working included.

    A rank counts from its share of the whole device, because other ranks and processes may use it too.
    free_bytes: free now, whichever process uses the rest. working_bytes: memory of the largest steps.
    """

    device: str
    total_bytes: int
    free_bytes: int
    fraction: float
    weights_bytes: int = 0
    reserve_bytes: int = 0
    working_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes for all pools of the rank; negative if the rest alone exceeds the share."""
        share = int(self.total_bytes * self.fraction)
        return share - self.weights_bytes - self.reserve_bytes - self.working_bytes

    @property
    def sum_text(self) -> str:
        """The sum as text: `0.85 of 81,079 MiB on cuda:0, less 7,814 MiB of weights and 2,048 MiB of reserve`."""
        text = f"{self.fraction:.4g} of {mib(self.total_bytes)} on {self.device}"
        sizes = {"weights": self.weights_bytes, "reserve": self.reserve_bytes, "largest steps": self.working_bytes}
        less = [f"{mib(size)} of {word}" for word, size in sizes.items() if size]
        *first, last = less or [""]
        return f"{text}, less {' and '.join(filter(None, [', '.join(first), last]))}" if less else text

    def check(self) -> Budget:
        """Return itself. Raises StartError, with the sizes, if nothing is left for pools."""
        if self.pool_bytes <= 0:
            raise StartError(
                f"no memory is left for a cache on {self.device}",
                f"{self.sum_text}, leaves nothing",
                "raise kv_cache.memory_fraction, the group's memory_fraction or memory_budget, lower "
                "kv_cache.reserve_bytes, or place fewer nodes on this device",
                phase="kv",
            )
        return self

    def check_free(self, pools_bytes: int) -> None:
        """Raise StartError, with the sizes, if pools of this size do not fit the free memory."""
        if pools_bytes > self.free_bytes:
            fits = max(0.0, (self.free_bytes + self.weights_bytes) / self.total_bytes)
            raise StartError(
                f"other processes use memory of {self.device} that the caches need",
                f"caches of {mib(pools_bytes)} fit the share ({self.sum_text}), and {mib(self.free_bytes)} are free",
                f"free the device, or let the rank count on {int(fits * 100) / 100:.2f} of it "
                "(kv_cache.memory_fraction, or the group's memory_fraction), or fix kv_cache.tokens",
                phase="kv",
            )


def rank_budget(
    device: torch.device,
    fraction: float,
    reserve_bytes: int | None = None,
    working_bytes: int = 0,
    *,
    size_bytes: int | None = None,
) -> Budget:
    """Return the budget of a rank whose weights are loaded. reserve_bytes None: the device's default.

    size_bytes: the rank's part of a memory budget, which takes the place of the fraction.
    working_bytes: counted on a GPU only; the pools of a CPU rank are small beside the host's memory.
    """
    if device.type == "cuda":
        # Memory that only torch's allocator holds is not reported as free.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return Budget(
            device=str(device),
            total_bytes=int(total),
            free_bytes=int(free),
            fraction=fraction if size_bytes is None else size_bytes / total,
            weights_bytes=torch.cuda.memory_reserved(device),
            reserve_bytes=GPU_RESERVE_BYTES if reserve_bytes is None else reserve_bytes,
            working_bytes=working_bytes,
        )
    free = min(_host_free(), CPU_POOL_BYTES)
    if size_bytes is not None:
        free, fraction = min(free, size_bytes), 1.0
    return Budget(
        device="the host", total_bytes=free, free_bytes=free, fraction=fraction, reserve_bytes=reserve_bytes or 0
    )


def node_shares(nodes: Sequence[str], declared: Mapping[str, float]) -> dict[str, float]:
    """Return each KV node's share of its rank's pools. Nodes without a declared share divide the rest evenly.

    Raises ConfigError, with the numbers, if the declared shares exceed 1 or leave nothing for the others.
    """
    given = {node: declared[node] for node in nodes if node in declared}
    others = [node for node in nodes if node not in declared]
    total = sum(given.values())
    parts = " + ".join(f"{node} {share:g}" for node, share in given.items())
    if total > 1 + 1e-9:
        raise ConfigError(
            f"kv_cache.share gives away {total:g} of a rank's cache", parts, "at most 1 together", key="kv_cache.share"
        )
    if others and total > 1 - 1e-9:
        raise ConfigError(
            f"kv_cache.share leaves nothing for {', '.join(others)}",
            parts,
            "lower the shares, or declare one for each node of the rank",
            key="kv_cache.share",
        )
    return {**given, **{node: (1 - total) / len(others) for node in others}}


def mib(size: int) -> str:
    """Return a size as text in MiB."""
    return f"{size / (1 << 20):,.0f} MiB"


def _host_free() -> int:
    return next(_available(), CPU_POOL_BYTES)


def _available() -> Iterator[int]:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRequest:
    """Pool size from the config: pages or tokens fix it, else the node takes its whole share."""

    page_size: int = 16
    pages: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A pool that fits. size_bytes: of all layers; why: the origin of its size; why_free: that of its limit."""

    pages: int
    page_size: int
    size_bytes: int
    why: str
    why_free: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that fit the pool."""
        return self.pages * self.page_size

    @property
    def text(self) -> str:
        """`KV pool 22,873 MiB: 209,104 tokens in 13,069 pages (kv_cache.tokens = 209100)`."""
        return f"KV pool {mib(self.size_bytes)}: {self.tokens:,} tokens in {self.pages:,} pages ({self.why})"


def plan_pool(
    spec: KVSpec,
    request: PoolRequest,
    *,
    node: str,
    dtype: torch.dtype,
    free_bytes: int,
    longest: int,
    most_tokens: int | None = None,
    why_free: str = "",
) -> PoolPlan:
    """Return the size of one node's pool.

    free_bytes: its limit; why_free: the origin of the limit, for errors. longest: tokens of the longest sequence.
    most_tokens: tokens of all slots at full length; a larger pool is never needed.
    Raises ConfigError for contradicting settings and StartError, with the numbers, if it cannot fit.
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
