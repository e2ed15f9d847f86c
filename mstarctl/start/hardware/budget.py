"""Memory budgets of a deployment: the bytes that it takes of each device, so that others can share it. Used by `up`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mstar_core.config.deployment import DeploymentSpec, Plan, RankPlan
from mstar_core.config.resolved import GPU_RESERVE_BYTES, ResolvedConfig
from mstar_core.config.sizes import BUDGET_HINT, parse_budget
from mstar_core.errors import StartError
from mstar_core.host.gpu_locks import (
    Holder,
    MemoryClaim,
    check_claim,
    gpu_holders,
    is_exclusive,
    short_error,
    taken_error,
)
from mstar_core.host.hardware.fake_memory import fake_key, fake_memory, ledger_device
from mstar_core.host.hardware.gpus import Gpu, gpus
from mstar_core.plugin import ModelSpec
from mstarctl.output import size_text
from mstarctl.start.hardware.admission import caches_of, weight_shares

AUTO_REQUESTS: Final = 16
"""Usual requests that an automatic budget has caches for, where the configuration does not name a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerDevices:
    """Devices of a plan on this host. keys: lock key by device. totals: bytes by key. fakes: devices of CPU ranks."""

    keys: Mapping[str, str]
    totals: Mapping[str, int]
    fakes: Sequence[str] = ()

    def key_of(self, rank: RankPlan) -> str | None:
        """Return the key of the device whose memory a rank uses, None if no ledger counts it."""
        return self.keys.get(ledger_device(rank, self.fakes))


def with_budget(
    model: ModelSpec, config: ResolvedConfig, plan: Plan, devices: LedgerDevices, weights: int
) -> tuple[Plan, dict[str, MemoryClaim]]:
    """Return the plan with the bytes of each rank, and the claims on the ledger by key; no claims without a budget.

    The ranks of a device divide its budget as they divide its memory. weights: bytes of all weights; 0 if unknown.
    Raises ConfigError for a budget that cannot be read or planned, StartError for one that can never fit.
    """
    if config.memory_budget is None:
        if config.memory_limit:
            hint = "add one, such as memory_budget: 48GB, or remove memory_limit"
            raise config.error("memory_limit", "memory_limit has no memory_budget to hold", hint=hint)
        return plan, {}
    on = {rank.rank: devices.key_of(rank) for rank in plan.ranks}
    by_key: dict[str | None, list[RankPlan]] = {}
    for rank in plan.ranks:
        by_key.setdefault(on[rank.rank], []).append(rank)
    names = {key: device for device, key in devices.keys.items()}
    sizes: dict[int, int] = {}
    claims: dict[str, MemoryClaim] = {}
    for key, ranks in by_key.items():
        total = 0 if key is None else devices.totals.get(key, 0)
        need = budget_bytes(model, config, plan, ranks, total, weights)
        whole = sum(rank.memory_fraction or 1.0 for rank in ranks)
        sizes |= {rank.rank: int(need * (rank.memory_fraction or 1.0) / whole) for rank in ranks}
        if key is not None:
            if not total:
                title = f"the memory of {names[key]} is unknown, so that no budget of it can be kept"
                raise config.error("memory_budget", title, "the driver reports no size", "remove memory_budget")
            claims[key] = MemoryClaim(device=names[key], need_bytes=need, total_bytes=total)
            if need > total:
                raise short_error(claims[key], config.name, (), need - total)
    sized = tuple(msgspec.structs.replace(rank, memory_bytes=sizes[rank.rank]) for rank in plan.ranks)
    _check_weights(model, config, plan, sizes, weights)
    return msgspec.structs.replace(plan, ranks=sized), claims


def budget_bytes(
    model: ModelSpec, config: ResolvedConfig, plan: Plan, ranks: Sequence[RankPlan], total: int, weights: int
) -> int:
    """Return the budget of the ranks on one device in bytes. total: of the device, 0 if unknown. Raises ConfigError."""
    text = config.memory_budget or ""
    try:
        asked = parse_budget(text)
    except ValueError:
        raise config.error("memory_budget", f"memory_budget is {text!r}", hint=BUDGET_HINT) from None
    if asked.share is not None and not total:
        hint = "name bytes, such as 20GiB"
        raise config.error("memory_budget", f"memory_budget is {text}, and the device has no known size", hint=hint)
    named = asked.of(total)
    return planned_bytes(model, config, plan, ranks, weights) if named is None else named


def planned_bytes(model: ModelSpec, config: ResolvedConfig, plan: Plan, ranks: Sequence[RankPlan], weights: int) -> int:
    """Return the bytes that ranks need: weights, caches of the usual requests, and the reserve for graphs and steps."""
    share = weight_shares(model, plan)
    if not weights or not share:
        hint = "name bytes, such as memory_budget: 20GiB"
        raise config.error(
            "memory_budget", "memory_budget cannot be planned: the weights have no known size", hint=hint
        )
    requests = config.max_concurrent_requests or AUTO_REQUESTS
    need = 0.0
    for rank in ranks:
        is_cpu = rank.device == "cpu"
        reserve = (0 if is_cpu else GPU_RESERVE_BYTES) if config.kv_cache.reserve_bytes is None else None
        need += weights * share[rank.rank] + (config.kv_cache.reserve_bytes or 0 if reserve is None else reserve)
        need += sum(size * requests for size in caches_of(model, config, rank).values())
    return int(need)


def check_room(claims: Mapping[str, MemoryClaim], name: str, *, own: frozenset[str] = frozenset()) -> None:
    """Raise StartError, with the holders and the bytes that are missing, if a claim does not fit beside the others now.

    own: keys of GPUs that a replaced deployment hands over.
    """
    for key, claim in sorted(claims.items()):
        if key in own:
            continue
        if is_exclusive(key):
            raise taken_error(claim.device, next(iter(gpu_holders(key)), Holder()))
        check_claim(key, claim, name)


def whole_claims(locks: Mapping[str, str], present: Sequence[Gpu]) -> dict[str, MemoryClaim]:
    """Return the claims of a deployment that takes whole GPUs. locks: key by device."""
    totals = {gpu.uuid: gpu.total for gpu in present} | {
        fake_key(device): size for device, size in fake_memory().items()
    }
    return {
        key: MemoryClaim(device=device, need_bytes=totals.get(key, 0), total_bytes=totals.get(key, 0))
        for device, key in locks.items()
    }


def planned_memory(spec: DeploymentSpec) -> list[dict[str, Any]]:
    """Return `memory_items` of a planned deployment, with or without a budget."""
    return memory_items(spec.claims or whole_claims(spec.gpus, gpus() if spec.gpus else ()))


def memory_items(claims: Mapping[str, MemoryClaim]) -> list[dict[str, Any]]:
    """Return for each device: the holders with their bytes, what the claim takes, and what is left then. Bytes."""
    items = []
    for key, claim in sorted(claims.items(), key=lambda pair: pair[1].device):
        holders = gpu_holders(key)
        held = sum(claim.total_bytes if each.held_bytes is None else each.held_bytes for each in holders)
        items.append(
            {
                "device": claim.device,
                "key": key,
                "total_bytes": claim.total_bytes,
                "held": [
                    {
                        "deployment": each.name,
                        "pid": each.pid,
                        "bytes": claim.total_bytes if each.held_bytes is None else each.held_bytes,
                    }
                    for each in holders
                ],
                "takes_bytes": claim.need_bytes,
                "left_bytes": claim.total_bytes - held - claim.need_bytes,
            }
        )
    return items


def memory_lines(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the items of `memory_items` as lines of text."""
    lines = []
    for item in items:
        held = [
            f"{each['deployment'] or 'another deployment'} holds {size_text(each['bytes'])}" for each in item["held"]
        ]
        left = int(item["left_bytes"])
        rest = f"{size_text(left)} left" if left >= 0 else f"{-left:,} bytes too few now"
        takes = f"takes {size_text(item['takes_bytes'])} of {size_text(item['total_bytes'])}"
        lines.append(f"memory  {item['device']}  {', '.join([takes, *held, rest])}")
    return lines


def _check_weights(
    model: ModelSpec, config: ResolvedConfig, plan: Plan, sizes: Mapping[int, int], weights: int
) -> None:
    """Raise StartError if the weights of a rank alone exceed its budget, before anything starts."""
    share = weight_shares(model, plan)
    for rank in plan.ranks if weights and share else ():
        need, size = int(weights * share[rank.rank]), sizes[rank.rank]
        if need > size:
            raise StartError(
                f"{config.name} can never fit its memory budget",
                f"the weights of rank {rank.rank} need {size_text(need)} and its budget is {size_text(size)}: "
                f"{need - size:,} bytes too few",
                f"raise memory_budget ({config.source('memory_budget')})",
                phase="plan",
                code="gpu_memory_never",
                short_bytes=need - size,
            )
