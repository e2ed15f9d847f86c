"""What the admin socket shows: plain dictionaries made from the supervisor's state. Base units, no client text."""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

from mstar_core.config.deployment import DeploymentSpec


class ChildView(Protocol):
    """What is read of a child."""

    name: str
    state: str
    incarnation: int
    pid: int | None
    phase: str
    phase_done: int
    phase_total: int
    detail: str
    facts: dict[str, Any]
    phases_s: dict[str, float]


class DeploymentView(Protocol):
    """What is read of the supervisor."""

    spec: DeploymentSpec
    state: str
    reason: str
    started: float
    started_at: float
    ready_s: float | None
    restarts: int
    fetch_s: float
    last_cause: dict[str, Any] | None
    values: dict[str, float]
    events: Any

    @property
    def children(self) -> Any: ...

    @property
    def is_drained(self) -> bool: ...


def deployment(view: DeploymentView) -> dict[str, Any]:
    """The head of the deployment: who, where, in what state, and why."""
    spec = view.spec
    return {
        "name": spec.name,
        "pid": os.getpid(),
        "model": spec.model,
        "plugin": spec.plugin,
        "weights": spec.weights_source,
        "state": view.state,
        "reason": view.reason,
        "endpoint": f"http://{_reachable(spec.api.host)}:{spec.api.port}",
        "host": spec.api.host,
        "port": spec.api.port,
        "started_at": view.started_at,
        "age_s": round(time.monotonic() - view.started, 3),
        "ready_s": view.ready_s,
        "phases_s": phases(view),
        "ranks": len(spec.plan.ranks),
        "restarts": view.restarts,
        "is_drained": view.is_drained,
        "last_event": view.events.number,
        "log_dir": spec.log_dir,
        "config": spec.config_file,
        "cause": view.last_cause,
        "versions": spec.versions,
    }


def phases(view: DeploymentView) -> dict[str, float]:
    """Seconds of each start-up phase: of the process that took longest in it."""
    longest = {"fetch": view.fetch_s} if view.fetch_s else {}
    for child in view.children.values():
        for name, seconds in child.phases_s.items():
            longest[name] = max(longest.get(name, 0.0), seconds)
    return {name: round(seconds, 3) for name, seconds in longest.items()}


def children(view: DeploymentView) -> list[dict[str, Any]]:
    """Every process with its state and start-up phase."""
    return [_child(child) for child in view.children.values()]


def _child(child: ChildView) -> dict[str, Any]:
    return {
        "name": child.name,
        "state": child.state,
        "pid": child.pid,
        "incarnation": child.incarnation,
        "phase": child.phase,
        "done": child.phase_done,
        "total": child.phase_total,
        "detail": child.detail,
        "facts": child.facts,
        "phases_s": {name: round(s, 3) for name, s in child.phases_s.items()},
    }


def snapshot(view: DeploymentView) -> dict[str, Any]:
    """One consistent view of everything."""
    return {
        "deployment": deployment(view),
        "children": children(view),
        "ranks": [{"rank": r.rank, "device": r.device, "nodes": list(r.nodes)} for r in view.spec.plan.ranks],
        "values": dict(sorted(view.values.items())),
    }


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host
