"""What a deployment consists of, in the order of its start, and at which pace it is watched."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.host.run_dir import RunDirectory
from mstar_core.supervisor.child import ChildKind

FETCH: Final = ChildKind(name="weights", module="mstar_core.weights.fetch")
FETCHED: Final = "weights.folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times of the supervisor in seconds. ping: ten missed ones end a child. watch: between looks at progress.
    show: between two pictures of what goes on.

    stop: for children to end by themselves. backoff: before the first, second ... restart; restarts_max of them within
    `window`. Even the first waits: a driver needs time to free the memory of a killed process.

    stacks: for a stuck child to write its stacks. cause: for others to die of the same cause.
    """

    ping_s: float = 1.0
    watch_s: float = 0.5
    show_s: float = 0.1
    stop_s: float = 10.0
    backoff_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    window_s: float = 600.0
    restarts_max: int = 5
    stacks_s: float = 1.0
    cause_s: float = 0.3


DEFAULT_PACE: Final = Pace()


Kinds = Callable[[DeploymentSpec], Sequence[ChildKind]]


def child_kinds(spec: DeploymentSpec) -> list[ChildKind]:
    """The processes of a deployment: first the one that finds the weights and ends, then those that stay."""
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


def write_spec(run: RunDirectory, spec: DeploymentSpec) -> None:
    """Write spec.json for the owner alone: it may hold API keys."""
    part = run.spec.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(spec.encode())
    part.replace(run.spec)
