"""Spec of a deployment with one rank on the CPU, for supervisors with fake children."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_core.config.deployment import DeploymentSpec, NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import ApiConfig
from mstar_core.host.run_dir import RunDirectory


def one_rank_spec(name: str, port: int, **fields: Any) -> DeploymentSpec:
    """Return the spec. fields: replace those of the spec."""
    spec = DeploymentSpec(
        name=name,
        model="orpheus",
        plugin="orpheus",
        run_dir=str(RunDirectory.of(name).path),
        log_dir="",
        plan=Plan(
            ranks=(RankPlan(rank=0, device="cpu", nodes=("LLM",)),),
            placements=(NodePlacement(node="LLM", replicas=((0,),)),),
        ),
        api=ApiConfig(host="127.0.0.1", port=port),
    )
    return msgspec.structs.replace(spec, **fields)
