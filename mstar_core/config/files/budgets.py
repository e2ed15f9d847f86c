"""Memory budgets: divides each device's memory among its ranks and refuses shares that exceed it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from mstar_core.config.deployment import Plan, RankPlan
from mstar_core.config.resolved import ResolvedConfig
from mstar_core.plugin import ModelSpec

SLACK = 1e-9
"""Tolerance of sums of decimal fractions."""


def with_budgets(spec: ModelSpec, config: ResolvedConfig, plan: Plan) -> Plan:
    """Return the plan with each rank's share of its device's memory. Declared shares are kept.

    Raises ConfigError with the numbers if shares exceed a device or a rank's cache, and for a quantization that the
    devices cannot run.
    """
    _check_quantization(config, plan)
    by_device: defaultdict[str, list[RankPlan]] = defaultdict(list)
    for rank in plan.ranks:
        _check_shares(spec, config, rank)
        by_device[rank.place].append(rank)
    share_of: dict[int, float] = {}
    for device, ranks in by_device.items():
        share_of |= _divided(config, device, ranks)
    divided = tuple(msgspec.structs.replace(rank, memory_fraction=share_of[rank.rank]) for rank in plan.ranks)
    return msgspec.structs.replace(plan, ranks=divided)


def _divided(config: ResolvedConfig, device: str, ranks: Sequence[RankPlan]) -> dict[int, float]:
    planned = {rank.rank: rank.memory_fraction for rank in ranks}  # set by a plugin's own plan
    named = {rank: share or _declared(config, rank) for rank, share in planned.items()}
    declared = {rank: share for rank, share in named.items() if share is not None}
    others = [rank.rank for rank in ranks if rank.rank not in declared]
    total, fraction = sum(declared.values()), config.kv_cache.memory_fraction
    parts = " + ".join(f"rank {rank} {share:g}" for rank, share in declared.items())
    group = next((g for g in config.node_groups if g.memory_fraction is not None), config.node_groups[0])
    if total > 1 + SLACK:
        hint = "the sum is at most 1; without memory_fraction the device is divided evenly"
        raise config.group_error(
            group, "memory_fraction", f"ranks on {device} take {total:g} of its memory", parts, hint
        )
    if others and total >= fraction - SLACK:
        left = ", ".join(f"rank {rank}" for rank in others)
        detail = f"{parts} of kv_cache.memory_fraction {fraction:g}"
        hint = "lower them, raise kv_cache.memory_fraction, or declare one for every group"
        raise config.group_error(group, "memory_fraction", f"no memory of {device} is left for {left}", detail, hint)
    return {**declared, **{rank: (fraction - total) / len(others) for rank in others}}


def _declared(config: ResolvedConfig, rank: int) -> float | None:
    """Return the share that groups declare for a rank. Raises ConfigError if two groups disagree."""
    naming = [group for group in config.node_groups if rank in group.ranks and group.memory_fraction is not None]
    for group in naming[1:]:
        if group.memory_fraction != naming[0].memory_fraction:
            raise config.group_error(
                group,
                "memory_fraction",
                f"rank {rank} has two different memory shares",
                f"{naming[0].memory_fraction:g} by {naming[0].key}, {group.memory_fraction:g} by {group.key}",
                "declare it in one of them",
            )
    return naming[0].memory_fraction if naming else None


def _check_shares(spec: ModelSpec, config: ResolvedConfig, rank: RankPlan) -> None:
    """Check that the shares of a rank's nodes leave memory for each."""
    share = config.kv_cache.share
    nodes = [node for node in rank.held if spec.node(node).kv is not None and spec.node(node).of is None]
    declared = {node: share[node] for node in nodes if node in share}
    total, others = sum(declared.values()), [node for node in nodes if node not in declared]
    if total > 1 + SLACK or (others and total > 1 - SLACK):
        parts = " + ".join(f"{node} {part:g}" for node, part in declared.items())
        rest = f", and nothing is left for {', '.join(others)}" if others else ""
        raise config.error(
            "kv_cache.share",
            f"kv_cache.share assigns {total:g} of rank {rank.rank}'s cache{rest}",
            parts,
            "the sum is at most 1; nodes without a share divide the rest",
        )


def _check_quantization(config: ResolvedConfig, plan: Plan) -> None:
    if config.quantization == "none":
        return
    if config.dtype == "float32" and any(rank.device.startswith("cuda") for rank in plan.ranks):
        raise config.error(
            "quantization",
            f"quantization {config.quantization} needs bfloat16 or float16 on a GPU",
            f"dtype is float32 ({config.source('dtype')})",
            "remove quantization",
        )
