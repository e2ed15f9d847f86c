"""The memory that the pools of one rank may take of its device, and how the rank's nodes divide it.

Made when a worker starts, after the weights are loaded. Several ranks of one deployment, and other processes, may use
the same device: a rank therefore counts from its share of the whole, never from what happens to be free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import torch

from mstar_core.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CPU_POOL_BYTES: Final = 2 << 30
"""Most of the host's memory that counts as a CPU rank's device: pools share the host with everything else on it."""

CUDA_RESERVE_BYTES: Final = 2 << 30
"""Kept free of pools by default on a GPU: its context, captured graphs, workspaces and activations."""


@runtime_checkable
class NeedsMemory(Protocol):
    """A module whose largest step takes more memory than the reserve has for all of them."""

    def working_bytes(self, tokens: int) -> int:
        """Memory of the largest step that a request may ask for, beside weights and cache: what it computes with, and
        what it gives. tokens: of one step of a node with a cache, at most.
        """
        ...


def working_bytes(modules: Iterable[object], tokens: int) -> int:
    """What the nodes of a rank say that they need, together: their steps run side by side."""
    return sum(module.working_bytes(tokens) for module in modules if isinstance(module, NeedsMemory))


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One rank's memory in bytes. fraction: the rank's share of total_bytes, weights, reserve and working included.

    free_bytes: what the device has left now, whoever uses the rest. working_bytes: what the largest steps take.
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
        """What all pools of the rank may take together; negative when the rest alone exceeds the share."""
        share = int(self.total_bytes * self.fraction)
        return share - self.weights_bytes - self.reserve_bytes - self.working_bytes

    @property
    def sum_text(self) -> str:
        """The sum in words: `0.85 of 81,079 MiB on cuda:0, less 7,814 MiB of weights and 2,048 MiB of reserve`."""
        text = f"{self.fraction:.4g} of {mib(self.total_bytes)} on {self.device}"
        sizes = {"weights": self.weights_bytes, "reserve": self.reserve_bytes, "largest steps": self.working_bytes}
        less = [f"{mib(size)} of {word}" for word, size in sizes.items() if size]
        *first, last = less or [""]
        return f"{text}, less {' and '.join(filter(None, [', '.join(first), last]))}" if less else text

    def check(self) -> Budget:
        """Return itself. Raises StartError with the sizes when weights and reserve leave nothing of the share."""
        if self.pool_bytes <= 0:
            raise StartError(
                f"no memory is left for a cache on {self.device}",
                f"{self.sum_text}, leaves nothing",
                "raise kv_cache.memory_fraction or the group's memory_fraction, lower kv_cache.reserve_bytes, or place "
                "fewer nodes on this device",
                phase="kv",
            )
        return self

    def check_free(self, pools_bytes: int) -> None:
        """Raises StartError, with the sizes, when others use what pools of this many bytes count on."""
        if pools_bytes > self.free_bytes:
            fits = max(0.0, (self.free_bytes + self.weights_bytes) / self.total_bytes)
            raise StartError(
                f"the memory counted on is in use on {self.device}",
                f"caches of {mib(pools_bytes)} fit the share ({self.sum_text}), and {mib(self.free_bytes)} are free",
                f"free the device, or let the rank count on {int(fits * 100) / 100:.2f} of it "
                "(kv_cache.memory_fraction, or the group's memory_fraction), or fix kv_cache.tokens",
                phase="kv",
            )


def rank_budget(
    device: torch.device, fraction: float, reserve_bytes: int | None = None, working_bytes: int = 0
) -> Budget:
    """The budget of a rank whose weights are on `device` now. reserve_bytes None: the device's default.

    working_bytes: counted on a GPU; a CPU's pools are small beside what the host has for steps.
    """
    if device.type == "cuda":
        # What loading left over counts as free only once it is given back.
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return Budget(
            device=str(device), total_bytes=int(total), free_bytes=int(free), fraction=fraction,
            weights_bytes=torch.cuda.memory_reserved(device),
            reserve_bytes=CUDA_RESERVE_BYTES if reserve_bytes is None else reserve_bytes,
            working_bytes=working_bytes,
        )  # fmt: skip
    free = min(_host_free(), CPU_POOL_BYTES)
    return Budget(
        device="the host", total_bytes=free, free_bytes=free, fraction=fraction, reserve_bytes=reserve_bytes or 0
    )


def node_shares(nodes: Sequence[str], declared: Mapping[str, float]) -> dict[str, float]:
    """Each KV node's share of its rank's pools. Nodes that declare none divide evenly what is left.

    Raises ConfigError, with the numbers, when the declared ones exceed 1 or leave nothing for the others.
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
            f"kv_cache.share leaves nothing for {', '.join(others)}", parts,
            "lower the shares, or declare one for each node of the rank", key="kv_cache.share",
        )  # fmt: skip
    return {**given, **{node: (1 - total) / len(others) for node in others}}


def mib(size: int) -> str:
    """Bytes as people compare them."""
    return f"{size / (1 << 20):,.0f} MiB"


def _host_free() -> int:
    return next(_available(), CPU_POOL_BYTES)


def _available() -> Iterator[int]:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
