"""Deployments of this host by the name of their model, their specification and the URL of their api."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import ConfigError, NotFound, UsageError
from mstar_core.host.run_dir import RunDirectory, deployments
from mstarctl.client.gateways import gateway_of_model, running_gateways
from mstarctl.client.reach import context_of
from mstarctl.output.options import GlobalOptions


def name_here(options: GlobalOptions, name: str | None) -> str | None:
    """Return the deployment of this host that serves the named model, if none has this name. Raises NotFound."""
    if name is None or options.socket is not None or not context_of(options).is_local:
        return name
    running = {run.name: run for run in deployments() if run.holder() is not None}
    if name in running:
        return name
    serving = [run.name for run in running.values() if _model_of(run) == name]
    if len(serving) > 1:
        raise NotFound(
            f"{len(serving)} deployments serve {name!r}",
            hint=f"name one of: {', '.join(serving)}",
            kind="deployment",
            name=name,
        )
    return serving[0] if serving else name


def gateway_for(options: GlobalOptions, name: str | None, model: str | None) -> tuple[RunDirectory, str | None] | None:
    """Return the gateway of this host through which a name is reached, and the model to choose, None for its only one.

    The name is that of a gateway, or of a model of one that no deployment serves under this name. Without a name it is
    the only gateway, if no deployment runs. Returns None for a deployment. Raises NotFound if several gateways fit.
    """
    if options.socket is not None or not context_of(options).is_local:
        return None
    gateways = running_gateways()
    running = {run.name for run in deployments() if run.holder() is not None}
    if name is None:
        return (next(iter(gateways.values())), model) if len(gateways) == 1 and not running else None
    if not gateways or name_here(options, name) in running:
        return None
    if name in gateways:
        return gateways[name], model
    found = gateway_of_model(name)
    return None if found is None else (found, model or name)


def _model_of(run: RunDirectory) -> str:
    try:
        return DeploymentSpec.load(run.spec).model
    except (OSError, ValueError):
        return ""


def spec_of(run: RunDirectory) -> DeploymentSpec:
    """Return the specification of a running deployment.

    Raises NotFound if it has just ended, ConfigError if a version with other keys started it.
    """
    try:
        return DeploymentSpec.load(run.spec)
    except OSError as error:
        raise NotFound(
            f"deployment {run.name!r} has just ended", hint="mstarctl ps", kind="deployment", name=run.name
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"deployment {run.name!r} was started by another version",
            f"{run.spec}: {error}",
            f"stop it by mstarctl down {run.name} and start it again",
            key=run.name,
        ) from error


def endpoint_of(spec: DeploymentSpec) -> str:
    """Return the URL of the api of a deployment of this host."""
    return spec.api.url


def url_of(text: str) -> SplitResult:
    """Return the parts of `--url`, whose scheme may be missing. Raises UsageError."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--url is {text!r}", hint="--url http://127.0.0.1:8000")
    return parts
