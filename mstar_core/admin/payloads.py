"""Payloads of the admin socket: plain dictionaries made from the supervisor's state. No client text."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import msgspec

from mstar_core.config.schema import values_of
from mstar_core.observe.frames import API, MIN_API, PARTS, SnapshotFrame

if TYPE_CHECKING:
    from mstar_core.supervisor.supervisor import Supervisor

FEATURES = (
    "watch",
    "trace",
    "filter",
    "recordings",
    "log-level",
    "cancel",
    "metrics",
    "cordon",
    "rolling-restart",
    "sleep",
)
"""Features that a client can rely on besides the version. Names are only added."""

HIDDEN = "[hidden]"


def head(target: Supervisor) -> dict[str, Any]:
    """Return versions, features and the head of the deployment."""
    return {
        "api": API,
        "min_api": MIN_API,
        "boot": target.hub.store.boot,
        "features": list(FEATURES),
        **deployment(target),
    }


def deployment(target: Supervisor) -> dict[str, Any]:
    """Return the head of the deployment: name, place, state, cause, and the hub's totals."""
    spec = target.spec
    return {
        **plain(target.hub.store.deployment),
        "name": spec.name,
        "pid": os.getpid(),
        "weights": spec.weights_source,
        "state": target.state,
        "reason": target.reason,
        "host": spec.api.host,
        "port": spec.api.port,
        "age_s": round(time.monotonic() - target.started, 3),
        "phases_s": target.phases_s,
        "restarts": target.restarts,
        "is_drained": target.is_drained,
        "drained_ranks": sorted(target.operations.cordons.idle),
        "operation": None if (latest := target.operations.latest) is None else latest.facts(),
        "sleep": target.sleep.facts(),
        "owner": spec.owner,
        "sleep_copies": spec.sleep_copies,
        "weights_bytes": sum(rank.weights_bytes or 0 for rank in target.hub.store.ranks.values()),
        "last_event": target.events.number,
        "config": spec.config_file,
        "cause": target.cause,
        "last_failure": target.failures[-1] if target.failures else None,
        "failures": target.failures,
        "versions": spec.versions,
        "transport": spec.transport.protocol,
        "unused": list(spec.unused),
        "cautions": list(spec.cautions),
    }


def children(target: Supervisor) -> list[dict[str, Any]]:
    """Return every child with its state and start-up phase. The supervisor itself is in the head."""
    shown = {*target.children, "standby"}
    return [plain(child) for name, child in target.hub.store.children.items() if name in shown]


def snapshot(target: Supervisor, frame: SnapshotFrame) -> dict[str, Any]:
    """Return a snapshot with all fields, the whole head, and the flat readings of all processes."""
    return {
        "rev": frame.rev,
        "t": frame.t,
        "boot": target.hub.store.boot,
        "deployment": deployment(target),
        "graph": msgspec.to_builtins(frame.graph),
        **{part: {key: plain(item) for key, item in getattr(frame, part).items()} for part in PARTS},
        "events": frame.events,
        "values": dict(sorted(target.values.items())),
        "truncated": frame.truncated,
    }


def config(target: Supervisor) -> dict[str, Any]:
    """Return the resolved configuration. API keys are hidden."""
    spec = target.spec
    resolved: dict[str, Any] = msgspec.to_builtins(spec)
    for name in ("graph", "provenance"):  # /v1/graph returns the graph with its placement, `settings` the sources
        resolved.pop(name)
    for name in ("api_keys", "metrics_keys", "ice_secrets"):
        resolved["api"][name] = [HIDDEN] * len(getattr(spec.api, name))
    resolved["argv"] = _without_keys(list(spec.argv))
    return {
        "file": spec.config_file,
        "settings": {key: {"value": value, "source": spec.source(key)} for key, value in values_of(spec).items()},
        "spec": resolved,
    }


def plain(item: msgspec.Struct) -> dict[str, Any]:
    """Return all fields of an object, defaults included."""
    return {name: getattr(item, name) for name in item.__struct_fields__}


def _without_keys(argv: list[str]) -> list[str]:
    shown: list[str] = []
    for word in argv:
        follows = bool(shown) and shown[-1] == "--api-key"
        shown.append(HIDDEN if follows else f"--api-key={HIDDEN}" if word.startswith("--api-key=") else word)
    return shown
