"""Number of requests that a deployment runs at once, from its devices, where the configuration does not name one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.config.deployment import Plan, RankPlan
from mstar_core.config.resolved import GPU_RESERVE_BYTES, ResolvedConfig
from mstar_core.host.hardware.gpus import Gpu
from mstar_core.plugin import ModelSpec
from mstarctl.output import size_text
from mstarctl.output.units import counted

CLASSES: Final = ((120 << 30, 128), (75 << 30, 64))
"""Requests at once by GPU memory in bytes, measured in real time (docs/performance.md)."""

FEW: Final = 32
"""Requests at once on other devices."""

HALF_PRECISION_BYTES: Final = 2
FULL_PRECISION_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Requests that run at once, and the reason for the number."""

    max_concurrent_requests: int
    why: str


def admission(
    model: ModelSpec, config: ResolvedConfig, plan: Plan, keys: Mapping[str, str], gpus: Sequence[Gpu], weights: int
) -> Admission:
    """Return the configured number of requests, or the number that the devices of a plan carry.

    The smallest GPU sets the number. A rank whose caches hold fewer usual requests (`KVSpec.request_tokens`) beside its
    weights lowers it: more requests would only evict each other's pages. A GPU of unknown size counts as a small one.

    keys: lock key by `RankPlan.place`, empty on the CPU. weights: bytes of all weights, as of `weights_on_devices`.
    """
    if config.max_concurrent_requests is not None:
        return Admission(
            max_concurrent_requests=config.max_concurrent_requests, why=config.source("max_concurrent_requests")
        )
    if not keys:
        return Admission(max_concurrent_requests=FEW, why="the default on the CPU")
    totals = {gpu.uuid: gpu.total for gpu in gpus if gpu.uuid}
    memory = {device: totals.get(key, 0) for device, key in keys.items()}
    smallest = min(memory.values())
    by_device = next((count for size, count in CLASSES if smallest >= size), FEW)
    why = f"a GPU of {size_text(smallest)}" if smallest else "a GPU of unknown size"
    share = weight_shares(model, plan, config.quantization)
    if not weights or not smallest or not share:
        return Admission(max_concurrent_requests=by_device, why=why)
    held = [
        _usual_requests(model, config, rank, memory.get(rank.place, 0), weights * share[rank.rank])
        for rank in plan.ranks
    ]
    fits = min((count for count in held if count is not None), default=by_device)
    if fits >= by_device:
        return Admission(max_concurrent_requests=by_device, why=why)
    return Admission(max_concurrent_requests=_bucket(fits), why=f"{why}: caches for {counted(fits, 'usual request')}")


def _bucket(count: int) -> int:
    """Return the largest power of two, or 3/2 of one, up to a count: the sizes that CUDA graphs are captured for."""
    power = 1 << max(count, 1).bit_length() - 1
    return power * 3 // 2 if power * 3 // 2 <= count else power


def weights_on_devices(model: ModelSpec, plan: Plan, config: ResolvedConfig) -> int:
    """Return the declared bytes of the official weights of all ranks; 0 for another checkpoint or if one is unknown."""
    if config.variant or config.weights or not weight_shares(model, plan):
        return 0
    return int(sum(_declared(model, plan, rank, config.quantization) for rank in plan.ranks))


def quantized_share(model: ModelSpec, plan: Plan, quantization: str) -> float:
    """Return the bytes of all weights under a quantization as a share of those in half precision.

    From the declared sizes; one half, the least, if a node declares none.
    """
    whole = sum(_declared(model, plan, rank) for rank in plan.ranks)
    if quantization == "none":
        return 1.0
    if not whole or not weight_shares(model, plan):
        return 0.5
    return sum(_declared(model, plan, rank, quantization) for rank in plan.ranks) / whole


def weight_shares(model: ModelSpec, plan: Plan, quantization: str = "none") -> dict[int, float]:
    """Return the share of all loaded weights by rank, from the declared sizes; empty if a node declares none."""
    if any(node.kv is not None and not node.owner.weight_bytes for node in model.nodes):
        return {}
    sizes = {rank.rank: _declared(model, plan, rank, quantization) for rank in plan.ranks}
    total = sum(sizes.values())
    return {rank: size / total for rank, size in sizes.items()} if total else {}


def _declared(model: ModelSpec, plan: Plan, rank: RankPlan, quantization: str = "none") -> float:
    """Return the declared bytes of the weights that a rank loads. Ranks of a group divide those of their nodes."""
    parts = {name: len(group.ranks) for group in plan.groups if rank.rank in group.ranks for name in group.nodes}
    owners = {model.node(name).owner.name: name for name in rank.held}
    return sum(
        model.node(owner).weight_bytes_under(quantization) / parts.get(name, 1) for owner, name in owners.items()
    )


def _usual_requests(model: ModelSpec, config: ResolvedConfig, rank: RankPlan, total: int, weights: float) -> int | None:
    """Return how many usual requests fit the caches of a rank; None for a rank without a cache.

    total: bytes of the rank's device. The rank divides its caches as the engine does: by `kv_cache.share`, else evenly.
    """
    caches = caches_of(model, config, rank)
    if not caches:
        return None
    fraction = config.kv_cache.memory_fraction if rank.memory_fraction is None else rank.memory_fraction
    reserve = GPU_RESERVE_BYTES if config.kv_cache.reserve_bytes is None else config.kv_cache.reserve_bytes
    room = total * fraction if rank.memory_bytes is None else rank.memory_bytes
    pool = max(0.0, room - reserve - weights)
    declared = config.kv_cache.share
    even = (1 - sum(declared.values())) / max(1, sum(name not in declared for name in caches))
    return min(int(pool * declared.get(name, even) // size) for name, size in caches.items())


def caches_of(model: ModelSpec, config: ResolvedConfig, rank: RankPlan) -> dict[str, int]:
    """Return the bytes of one usual request in each cache of a rank, by node."""
    nodes = dict.fromkeys(model.node(name).owner for name in rank.held)
    is_wide = config.dtype == "float32" or (config.dtype is None and rank.device == "cpu")
    width = FULL_PRECISION_BYTES if is_wide else HALF_PRECISION_BYTES
    return {
        node.name: min(kv.request_tokens, config.max_seq_len * len(kv.branches)) * kv.bytes_per_token(width)
        for node in nodes
        if (kv := node.kv) is not None
    }
