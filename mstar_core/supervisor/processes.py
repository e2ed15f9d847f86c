"""The processes of a deployment in the order of their start, the pace of their supervision, and the spec they read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.host.run_dir import RunDirectory
from mstar_core.supervisor.child import ChildKind

FETCH: Final = ChildKind(name="weights", module="mstar_core.weights.fetch")
FETCHED: Final = "weights.folder"
"""File in the run directory to which the fetching child writes the weights folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Intervals and limits of the supervisor in seconds.

    ping_s: between pings; ten missed ones end a child. watch_s: between checks of progress. publish_s: between updates
    of the hub. stop_s: for children to end by themselves. backoff_s: before the first, second ... restart. A deployment
    is unhealthy after restarts_max of one child within window_s. Even the first restart waits, because a driver needs
    time to free the memory of a killed process. stacks_s: for a stuck child to write its stacks. cause_s: for other
    children to die of the same cause.
    """

    ping_s: float = 1.0
    watch_s: float = 0.5
    publish_s: float = 0.1
    stop_s: float = 10.0
    backoff_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    window_s: float = 600.0
    restarts_max: int = 5
    stacks_s: float = 1.0
    cause_s: float = 0.3


DEFAULT_PACE: Final = Pace()

Kinds = Callable[[DeploymentSpec], Sequence[ChildKind]]


def child_kinds(spec: DeploymentSpec) -> list[ChildKind]:
    """Return the child that fetches the weights and ends, then those that stay."""
    workers = [
        ChildKind(name=f"worker-{r.rank}", module="mstar_core.worker", arguments=("--rank", str(r.rank)))
        for r in spec.plan.ranks
    ]
    return [
        FETCH,
        ChildKind(name="conductor", module="mstar_core.conductor"),
        *workers,
        ChildKind(name="api", module="mstar_core.api"),
    ]


def plan_facts(spec: DeploymentSpec) -> dict[str, Any]:
    """Return the facts of the plan event: ranks (`0 cpu: LLM, snac_decoder`), bytes needed and free."""
    ranks = [f"{rank.rank} {rank.device}: {', '.join(rank.nodes)}" for rank in spec.plan.ranks]
    sizes = {"needed_bytes": spec.needed_bytes, "free_bytes": spec.free_bytes}
    return {"ranks": ranks, **{name: size for name, size in sizes.items() if size}}


def write_spec(run: RunDirectory, spec: DeploymentSpec) -> None:
    """Write spec.json, readable by the owner alone because it may contain API keys."""
    part = run.spec.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(spec.encode())
    part.replace(run.spec)
