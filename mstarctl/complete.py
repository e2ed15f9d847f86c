"""Shell completion of names, from package metadata and admin sockets, within 150 ms and without errors."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

LIMIT_S: Final = 0.15
"""Time limit for the answers of deployments."""

PATHS: Final = (
    "/v1/",
    "/v1/snapshot",
    "/v1/requests",
    "/v1/graph",
    "/v1/config",
    "/v1/events",
    "/v1/logs",
    "/v1/metrics",
    "/v1/health",
    "/v1/ready",
    "/v1/clock",
    "/v1/openapi.json",
)
GROUP: Final = "mstar.plugins"
"""Entry points of plugins."""

CONFIGS: Final = "configs"
"""Folder of deployment files in a plugin's package."""

KINDS: Final = ("deployment", "rank", "node", "gpu", "host", "request", "session", "model", "plugin")


def bare(value: Any) -> Any:
    """Return a name, or each of a list, without the kind that `-o name` prints before it: `request/ID` is `ID`."""
    if isinstance(value, str):
        kind, slash, name = value.partition("/")
        return name if slash and kind in ("deployment", "request") else value
    return value if value is None else [bare(item) for item in value]


def _quiet(names: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """Wrap a completer: filter its names, and return none on any error, which would disturb the typed line."""

    @functools.wraps(names)
    def offer(incomplete: str) -> list[str]:
        try:
            return sorted(dict.fromkeys(name for name in names(incomplete) if name.startswith(incomplete)))
        except Exception:  # noqa: BLE001  isolation boundary of one completion
            return []

    return offer


@_quiet
def plugin_names(incomplete: str) -> list[str]:
    """Complete installed plugins, which have the names of their main models."""
    from importlib import metadata

    return [point.name for point in metadata.entry_points(group=GROUP)]


@_quiet
def target_names(incomplete: str) -> list[str]:
    """Complete models and the deployment files that they ship. A path is completed by the shell."""
    return [*plugin_names(""), *config_names("")]


@_quiet
def config_names(incomplete: str) -> list[str]:
    """Complete the names of shipped deployment files, which are found without importing a plugin."""
    from importlib import metadata
    from importlib.util import find_spec

    packages = {point.value.partition(":")[0].partition(".")[0] for point in metadata.entry_points(group=GROUP)}
    specs = (find_spec(package) for package in sorted(packages))
    folders = [Path(place) / CONFIGS for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return [path.stem for folder in folders for path in folder.glob("*.y*ml")]


@_quiet
def voice_names(incomplete: str) -> list[str]:
    """Complete the speakers of the running models; of all installed models if none runs."""
    from mstar_core.config.deployment import DeploymentSpec
    from mstar_core.plugin import param_specs
    from mstarctl.plugins import Plugins

    plugins = Plugins.discover()
    served = [DeploymentSpec.load(run.spec).model for run in _running()]
    models = [plugins.model(name) for name in served] if served else list(plugins.models())
    specs = [spec for model in models for spec in param_specs(model.params)]
    return [str(choice) for spec in specs if spec.name == "voice" for choice in spec.choices or ()]


def turn_names(incomplete: str) -> list[str]:
    """Complete the detections of the end of a turn."""
    from mstarctl.talk.settings import TURNS

    return [name for name in TURNS if name.startswith(incomplete)]


@_quiet
def workload_names(incomplete: str) -> list[str]:
    """Complete workloads of the running models; of all installed models if none runs."""
    from mstar_core.config.deployment import DeploymentSpec
    from mstarctl.bench.load.workloads import MIXED
    from mstarctl.plugins import Plugins

    plugins = Plugins.discover()
    served = [DeploymentSpec.load(run.spec).model for run in _running()]
    models = [plugins.model(name) for name in served] if served else list(plugins.models())
    return [MIXED, *(spec.name for model in models for spec in plugins.workloads(model))]


@_quiet
def screen_names(incomplete: str) -> list[str]:
    """Complete the screens of `top`."""
    from mstarctl.top.layout.state import MODELS, PAGES

    return [*PAGES, MODELS]


@_quiet
def key_names(incomplete: str) -> list[str]:
    """Complete keys of deployment files."""
    from mstar_core.config.schema import SETTINGS

    return [item.key for item in SETTINGS]


@_quiet
def set_words(incomplete: str) -> list[str]:
    """Complete the keys of `--set KEY=VALUE`, and the values of keys that have few."""
    from mstar_core.config.schema import SETTINGS

    plain = [item for item in SETTINGS if "section" not in item.kind and "[]" not in item.key]
    values = [f"{item.key}={value}" for item in plain for value in _choices(item)]
    return values if "=" in incomplete else [f"{item.key}=" for item in plain]


@_quiet
def live_words(incomplete: str) -> list[str]:
    """Complete deployments, and the keys of `[NAME] KEY=VALUE` that change while one runs."""
    from mstar_core.config.live import LIVE_SETTINGS

    return [*deployment_names(""), *(f"{key}=" for key in LIVE_SETTINGS)]


def _choices(item: Any) -> tuple[str, ...]:
    return ("true", "false") if item.kind == "boolean" else item.choices


@_quiet
def context_names(incomplete: str) -> list[str]:
    """Complete contexts of this user."""
    from mstar_core.host.other_hosts.contexts import Contexts

    return [item.name for item in Contexts.load().all()]


@_quiet
def deployment_names(incomplete: str) -> list[str]:
    """Complete running deployments of this host."""
    return [run.name for run in _running()]


@_quiet
def gateway_names(incomplete: str) -> list[str]:
    """Complete running gateways of this host."""
    from mstar_core.host.run_dir import gateways

    return [run.name for run in gateways() if run.holder() is not None]


@_quiet
def served_names(incomplete: str) -> list[str]:
    """Complete running deployments and gateways of this host."""
    return [*deployment_names(""), *gateway_names("")]


DeploymentName = Annotated[
    str | None,
    typer.Argument(metavar="[NAME]", help="optional if only one runs", autocompletion=deployment_names, callback=bare),
]
"""The NAME argument of commands for running deployments."""

DeploymentNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...", help="optional if only one runs", autocompletion=deployment_names, callback=bare
    ),
]
"""The NAME arguments of commands for several running deployments."""

ServedName = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="deployment, model or gateway; optional if only one runs",
        autocompletion=served_names,
        callback=bare,
    ),
]
"""The NAME argument of commands that send requests."""

HolderName = Annotated[
    str | None,
    typer.Option(
        "--deployment",
        metavar="NAME",
        help="needed if several know the request",
        autocompletion=deployment_names,
        callback=bare,
    ),
]
"""The --deployment option of commands for requests."""

PastDeploymentName = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="optional if only one runs; may be a deployment that has ended",
        autocompletion=deployment_names,
        callback=bare,
    ),
]
"""The NAME argument of commands that also read what an ended deployment has left."""


@_quiet
def configured_names(incomplete: str) -> list[str]:
    """Complete models and running deployments."""
    return [*plugin_names(""), *(f"deployment/{run.name}" for run in _running())]


@_quiet
def request_ids(incomplete: str) -> list[str]:
    """Complete requests of running deployments."""
    return [str(item["id"]) for admin in _admins() for item in admin.get("/v1/requests", limit=200)["items"]]


@_quiet
def rank_words(incomplete: str) -> list[str]:
    """Complete deployments and their ranks, for arguments `[NAME] RANK`."""
    return [*deployment_names(""), *_parts(("ranks",)).get("ranks", {})]


@_quiet
def process_names(incomplete: str) -> list[str]:
    """Complete processes for `logs --from`."""
    ranks = _parts(("ranks",)).get("ranks", {})
    return ["supervisor", "api", "conductor", "weights", *(f"worker/{rank}" for rank in ranks)]


@_quiet
def host_names(incomplete: str) -> list[str]:
    """Complete the hosts of a deployment."""
    return list(_parts(("hosts",)).get("hosts", {}))


@_quiet
def api_paths(incomplete: str) -> list[str]:
    """Complete paths of the admin socket."""
    return list(PATHS)


@_quiet
def described(incomplete: str) -> list[str]:
    """Complete KIND/NAME for describe: kinds before the slash, then names of that kind."""
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
        case "rank" | "gpu" | "host":
            names = list(_parts((f"{kind}s",)).get(f"{kind}s", {}))
        case "node":
            names = [str(node["name"]) for node in _parts(("nodes",)).get("nodes", {}).values()]
        case "session":
            names = [str(session["id"]) for session in _parts(("sessions",)).get("sessions", {}).values()]
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
    snapshot: dict[str, Any] = admins[0].get("/v1/snapshot", parts=",".join(parts)) if len(admins) == 1 else {}
    return snapshot
