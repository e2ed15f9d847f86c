"""What the admin socket shows besides the hub: plain dictionaries made from the supervisor's state. No client text."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.observe.frames import API, MIN_API, PARTS, SnapshotFrame
from mstar_core.observe.phases import longest_phases

if TYPE_CHECKING:
    from mstar_core.observe.hub import TelemetryHub

FEATURES = ("watch", "trace", "filter", "recordings", "log-level", "cancel", "metrics")
"""What a client may count on besides the version; names are only added."""

HIDDEN = "[hidden]"


class ChildView(Protocol):
    """What is read of a child."""

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
    hub: TelemetryHub

    @property
    def children(self) -> Any: ...

    @property
    def is_drained(self) -> bool: ...


def head(view: DeploymentView) -> dict[str, Any]:
    """The first thing that a client reads."""
    return {
        "api": API,
        "min_api": MIN_API,
        "boot": view.hub.boot,
        "features": list(FEATURES),
        **deployment(view),
    }


def deployment(view: DeploymentView) -> dict[str, Any]:
    """The head of the deployment: who, where, in what state, and why; and the sums that the hub has of it."""
    spec = view.spec
    return {
        **plain(view.hub.store.deployment),
        "name": spec.name,
        "pid": os.getpid(),
        "weights": spec.weights_source,
        "state": view.state,
        "reason": view.reason,
        "host": spec.api.host,
        "port": spec.api.port,
        "age_s": round(time.monotonic() - view.started, 3),
        "phases_s": longest_phases(view.fetch_s, view.children.values()),
        "restarts": view.restarts,
        "is_drained": view.is_drained,
        "last_event": view.events.number,
        "config": spec.config_file,
        "cause": view.last_cause,
        "versions": spec.versions,
        "transport": spec.transport,
        "unused": list(spec.unused),
        "cautions": list(spec.cautions),
    }


def children(view: DeploymentView) -> list[dict[str, Any]]:
    """Every process with its state and start-up phase; the supervisor itself is in the head."""
    return [plain(child) for name, child in view.hub.store.children.items() if name in view.children]


def snapshot(view: DeploymentView, frame: SnapshotFrame) -> dict[str, Any]:
    """A snapshot with every field of every object, the whole head, and the flat readings of all processes."""
    return {
        "rev": frame.rev,
        "t": frame.t,
        "boot": view.hub.boot,
        "deployment": deployment(view),
        "graph": msgspec.to_builtins(frame.graph),
        **{part: {key: plain(item) for key, item in getattr(frame, part).items()} for part in PARTS},
        "events": frame.events,
        "values": dict(sorted(view.values.items())),
        "truncated": frame.truncated,
    }


def config(view: DeploymentView) -> dict[str, Any]:
    """The resolved configuration. Keys of clients are hidden."""
    spec = view.spec
    resolved: dict[str, Any] = msgspec.to_builtins(spec)
    settings, sources = resolved.pop("settings", {}), resolved.pop("sources", {})
    resolved.pop("graph", None)  # /v1/graph has it, with its placement
    if spec.api.api_keys:
        resolved["api"]["api_keys"] = [HIDDEN] * len(spec.api.api_keys)
    resolved["argv"] = _without_keys(list(spec.argv))
    return {
        "file": spec.config_file,
        "settings": {key: {"value": value, "source": sources.get(key, "default")} for key, value in settings.items()},
        "spec": resolved,
    }


def plain(item: msgspec.Struct) -> dict[str, Any]:
    """Every field of an object, those at their defaults too."""
    return {name: getattr(item, name) for name in item.__struct_fields__}


def _without_keys(argv: list[str]) -> list[str]:
    shown: list[str] = []
    for word in argv:
        follows = bool(shown) and shown[-1] == "--api-key"
        shown.append(HIDDEN if follows else f"--api-key={HIDDEN}" if word.startswith("--api-key=") else word)
    return shown
