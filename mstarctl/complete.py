"""Words that shells complete: from package metadata and the socket, within 150 ms; never an error, nothing imported."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

LIMIT_S: Final = 0.15
"""A deployment that does not answer within this has no names to offer."""

PATHS: Final = (
    "/v1/", "/v1/snapshot", "/v1/requests", "/v1/graph", "/v1/config", "/v1/events", "/v1/logs", "/v1/metrics",
    "/v1/health", "/v1/ready", "/v1/clock", "/v1/openapi.json",
)  # fmt: skip
KINDS: Final = ("deployment", "rank", "node", "gpu", "request", "model", "plugin")


def _quiet(names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Whatever goes wrong, there is simply nothing to offer: an error would land in the middle of a typed line."""

    @functools.wraps(names)
    def offer(incomplete: str) -> list[str]:
        try:
            return sorted(dict.fromkeys(name for name in names(incomplete) if name.startswith(incomplete)))
        except Exception:  # noqa: BLE001  the isolation boundary of one keystroke
            return []

    return offer


@_quiet
def plugin_names(incomplete: str) -> list[str]:
    """Installed plugins; a plugin is called as its main model is."""
    from importlib import metadata

    return [point.name for point in metadata.entry_points(group="mstar.plugins")]


@_quiet
def key_names(incomplete: str) -> list[str]:
    """Keys of deployment files."""
    from mstar_core.config import SETTINGS

    return [item.key for item in SETTINGS]


@_quiet
def context_names(incomplete: str) -> list[str]:
    """Contexts of this user."""
    from mstarctl.client.contexts import Contexts

    return [item.name for item in Contexts.load().all()]


@_quiet
def deployment_names(incomplete: str) -> list[str]:
    """Running deployments of this host."""
    return [run.name for run in _running()]


@_quiet
def configured_names(incomplete: str) -> list[str]:
    """What has a configuration: models by name, and running deployments."""
    return [*plugin_names(""), *(f"deployment/{run.name}" for run in _running())]


@_quiet
def request_ids(incomplete: str) -> list[str]:
    """Requests of the running deployments."""
    return [str(item["id"]) for admin in _admins() for item in admin.get("/v1/requests", limit=200)["items"]]


@_quiet
def process_names(incomplete: str) -> list[str]:
    """Processes that write logs, as `logs --from` takes them."""
    ranks = _parts(("ranks",)).get("ranks", {})
    return ["supervisor", "api", "conductor", "weights", *(f"worker/{rank}" for rank in ranks)]


@_quiet
def api_paths(incomplete: str) -> list[str]:
    """Paths of the admin socket."""
    return list(PATHS)


@_quiet
def described(incomplete: str) -> list[str]:
    """KIND/NAME for describe: kinds until the slash is typed, then names of that kind."""
    kind, slash, rest = incomplete.partition("/")
    if not slash:
        return [f"{kind}/" for kind in KINDS]
    match kind:
        case "deployment":
            names = deployment_names("")
        case "model" | "plugin":
            names = plugin_names("")
        case "request":
            names = request_ids(rest)
        case "rank" | "gpu":
            names = list(_parts((f"{kind}s",)).get(f"{kind}s", {}))
        case "node":
            names = [str(node["name"]) for node in _parts(("nodes",)).get("nodes", {}).values()]
        case _:
            names = []
    return [f"{kind}/{name}" for name in names]


def _running() -> list[Any]:
    from mstar_core.host.run_dir import deployments

    return [run for run in deployments() if run.holder() is not None]


def _admins() -> Iterator[Any]:
    from mstarctl.client.admin import AdminClient

    until = time.monotonic() + LIMIT_S
    for run in _running():
        left = until - time.monotonic()
        if left > 0:
            yield AdminClient.of(run, left)


def _parts(parts: tuple[str, ...]) -> dict[str, Any]:
    admins = list(_admins())
    found: dict[str, Any] = admins[0].get("/v1/snapshot", parts=",".join(parts)) if len(admins) == 1 else {}
    return found
