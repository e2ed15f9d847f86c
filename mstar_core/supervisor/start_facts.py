"""What events tell of a start: the plan when it begins, the time of each phase when it is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.observe.phases import longest_phases
from mstar_core.supervisor.child import Child


def plan_facts(spec: DeploymentSpec) -> dict[str, Any]:
    """The plan as an event tells it: ranks in a few words (`0 cpu: LLM, snac_decoder`), bytes needed and free."""
    ranks = [f"{rank.rank} {rank.device}: {', '.join(rank.nodes)}" for rank in spec.plan.ranks]
    sizes = {"needed_bytes": spec.needed_bytes, "free_bytes": spec.free_bytes}
    return {"ranks": ranks, **{name: size for name, size in sizes.items() if size}}


def ready_facts(ready_s: float, fetch_s: float, children: Iterable[Child]) -> dict[str, Any]:
    """What the event of becoming ready tells: how long the start took, in all and by phase."""
    return {"ready_s": round(ready_s, 2), "phases_s": longest_phases(fetch_s, children)}
