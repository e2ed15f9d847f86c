"""`mstarctl describe`: shows everything known about one object."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from mstar_core.errors import NotFound, UsageError, did_you_mean
from mstar_core.host.run_dir import RunDirectory, deployments
from mstarctl.client import Known, find_known, known_deployments
from mstarctl.client.gateways import known_gateways, running_gateways
from mstarctl.client.holders import holder_of, request_path
from mstarctl.client.reach import context_of, known_at
from mstarctl.complete import KINDS, deployment_names, described, plugin_names
from mstarctl.objects.deployment import deployment_item, deployment_lines
from mstarctl.objects.gateway import gateway_item, gateway_lines
from mstarctl.objects.hosts import host_item, host_lines
from mstarctl.objects.parts import gpu_item, node_item, part_lines, rank_item, request_lines, session_item
from mstarctl.output import Printer
from mstarctl.output.moments import dated, epoch_of
from mstarctl.output.options import GlobalOptions
from mstarctl.plugins import Plugins

PARTS: Final = ("rank", "node", "gpu", "host", "request", "session")
"""Kinds of objects that belong to a deployment, which a second argument names."""


def describe(
    ctx: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            metavar="[KIND/]NAME",
            help="deployment/NAME rank/N node/NODE gpu/N host/NAME request/ID session/ID model/X plugin/X; or NAME",
            autocompletion=described,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[DEPLOYMENT]",
            help="deployment of the rank, node, GPU, host, request or session; optional if only one runs",
            autocompletion=deployment_names,
        ),
    ] = None,
) -> None:
    """Show everything known about one object."""
    printer = Printer.of(ctx)
    kind, of = kind_and_name(what, printer)
    if name is not None:
        name = name.removeprefix("deployment/")
        check_second(kind, of, name)
    match kind:
        case "deployment":
            if (gateway := _gateway(printer.options, of)) is not None:
                printer.item("gateway", gateway_item(gateway), list(gateway_lines(gateway)))
                return
            known = _deployment(printer.options, of)
            printer.item(kind, deployment_item(known), list(deployment_lines(known)))
        case "model":
            _model(of, printer)
        case "plugin":
            _plugin(of, printer)
        case "request":
            item = _request(printer.options, of, name)
            printer.item(kind, item, list(request_lines(item)))
        case "gpu":
            item = gpu_item(_any(printer.options, name), of)
            printer.item(kind, item, list(part_lines(f"gpu {of}", item)))
        case "host":
            item = host_item(known_at(printer.options, name), of)
            printer.item(kind, item, list(host_lines(item)))
        case "session":
            known = known_at(printer.options, name)
            item = session_item(known, of)
            printer.item(kind, item, list(part_lines(f"session {of} of {known.name}", item)))
        case _:
            known = known_at(printer.options, name)
            item = rank_item(known, of) if kind == "rank" else node_item(known, of)
            is_wide = printer.format == "wide"
            printer.item(kind, item, list(part_lines(f"{kind} {of} of {known.name}", item, is_wide=is_wide)))


def kind_and_name(what: str, printer: Printer) -> tuple[str, str]:
    """Split KIND/NAME, or look a NAME up. Raises UsageError for an unknown kind, NotFound for an unknown name."""
    kind, slash, of = what.partition("/")
    if slash and kind in KINDS and of:
        return kind, of
    if kind in KINDS and not of:
        example = {
            "rank": "0",
            "gpu": "0",
            "node": "LLM",
            "host": "local",
            "request": "r-7f3a",
            "session": "sess_1f",
        }.get(kind, "orpheus")
        raise UsageError(f"{what!r} names no {kind}", hint=f"write, for example, {kind}/{example}")
    if slash:
        raise UsageError(f"cannot describe {kind!r}", hint=did_you_mean(kind, KINDS))
    kinds = kinds_of(what)
    if not kinds:
        hint = f"write KIND/{what}, with one of: {', '.join(KINDS)}"
        raise NotFound(f"no object is called {what!r}", hint=hint, kind="object", name=what)
    if len(kinds) > 1:
        printer.say(f"{kinds[0]}/{what}; also: {', '.join(f'{other}/{what}' for other in kinds[1:])}")
    return kinds[0], what


def check_second(kind: str, of: str, name: str) -> None:
    """Raise UsageError for a second name that is not the deployment of the first object."""
    if "/" in name:
        place = f" {of}" if kind == "deployment" else ""
        raise UsageError("describe shows one object at a time", hint=f"mstarctl describe {name}{place}")
    if kind not in PARTS:
        raise UsageError(f"{kind}/{of} takes no second name", hint=f"omit {name!r}: mstarctl describe {kind}/{of}")


def kinds_of(name: str) -> list[str]:
    """Return the kinds of objects of this host that have a name, in the order in which `describe` prefers them."""
    named = {
        "deployment": {*(item.name for item in known_deployments()), *running_gateways()},
        "node": {key.partition("/")[2] for key in described("node/")},
        "request": {key.partition("/")[2] for key in described("request/")},
        "model": {name for model in Plugins.discover().models() for name in (model.name, *model.aliases)},
        "plugin": set(plugin_names("")),
    }
    return [kind for kind, names in named.items() if name in names]


def _deployment(options: GlobalOptions, name: str) -> Known:
    is_here = options.socket is None and context_of(options).is_local
    return find_known(name) if is_here else known_at(options, name)


def _gateway(options: GlobalOptions, name: str) -> Known | None:
    """Return the running gateway of this host that is called `name`, unless a deployment has the name."""
    is_here = options.socket is None and context_of(options).is_local
    if not is_here or name not in running_gateways() or RunDirectory.of(name).spec.is_file():
        return None
    return next(iter(known_gateways(lambda each: each == name)), None)


def _any(options: GlobalOptions, name: str | None) -> Known | None:
    """Return the deployment whose GPUs are shown: the named one, else the first that runs here, else None."""
    is_here = options.socket is None and context_of(options).is_local
    if name is None and is_here:
        name = next((run.name for run in deployments() if run.holder() is not None), None)
        if name is None:
            return None
    return known_at(options, name)


def _request(options: GlobalOptions, request_id: str, deployment: str | None) -> dict[str, Any]:
    with holder_of(options, request_id, deployment) as holder:
        item = dated(holder.admin.get(request_path(request_id)), epoch_of(holder.admin.head()))
        return {"name": request_id, "deployment": holder.name, **item}


def _model(name: str, printer: Printer) -> None:
    from mstarctl.commands.models import describe_model

    describe_model(name, printer)


def _plugin(name: str, printer: Printer) -> None:
    from mstarctl.commands.plugins import describe_plugin

    describe_plugin(name, printer)
