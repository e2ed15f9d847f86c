"""`mstarctl sample`: writes inputs that fit a model, and prints the calls that send them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mstar_core.client.results import ModelSample
from mstar_core.config.files.load import split_name
from mstar_core.errors import UsageError
from mstar_core.host.run_dir import deployments
from mstar_core.workloads.samples import samples_of
from mstarctl.call.samples import chosen, client_form, command, write
from mstarctl.client.endpoints import name_here
from mstarctl.client.reach import context_of
from mstarctl.commands.call import KEY_VARIABLE, served
from mstarctl.complete import target_names
from mstarctl.output import GlobalOptions, Printer
from mstarctl.plugins import Plugins
from mstarctl.start.target import find, resolve_target

OFFICIAL = "official"


def sample(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL[:tiny|:mini]]", help="a model, or a deployment", autocompletion=target_names),
    ] = None,
    only: Annotated[str | None, typer.Option("--only", metavar="NAME", help="write this sample alone")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="folder of the files")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help=f"API key for a deployment of another host; also {KEY_VARIABLE}")
    ] = None,
) -> None:
    """Write inputs that fit a model, and print the calls that send them."""
    printer = Printer.of(ctx)
    name, samples = offered_samples(printer, model, api_key)
    if only is not None:
        samples = [chosen(name, samples, only)]
    folder = Path(f"{name}-samples") if out is None else out
    items: list[dict[str, Any]] = []
    for request in samples:
        files = write(request, folder)
        line = command(name, request, folder)
        items.append(
            {"name": request.name, "title": request.title, "files": [str(file) for file in files], "call": line}
        )
    if printer.is_machine:
        printer.items("sample", items, ())
        return
    if not items:
        printer.say(f"{name} has no samples")
    for item in items:
        printer.say(f"{item['name']}: {item['title']}" + "".join(f"\n  wrote {file}" for file in item["files"]))
        printer.text(item["call"])


def offered_samples(printer: Printer, model: str | None, api_key: str | None) -> tuple[str, Sequence[ModelSample]]:
    """Return the name for `mstarctl call` and the samples: of a running deployment, else of the installed plugin.

    Raises UsageError if nothing is named and nothing runs, NotFound for an unknown name.
    """
    name, variant = split_name(model) if model is not None and not model.endswith((".yaml", ".yml")) else (model, "")
    if not variant and _is_running(printer.options, name):
        with served(printer.options, name, api_key or os.environ.get(KEY_VARIABLE), printer) as server:
            return server.name, server.client.samples()
    if model is None:
        raise UsageError("no model is named, and no single deployment runs", hint="mstarctl sample pi05:mini")
    target = find(model, Plugins.discover())
    spec = target.spec.bound(None, resolve_target(target).model_kwargs)
    return target.spec.name, [client_form(sample) for sample in samples_of(spec, target.variant or OFFICIAL)]


def _is_running(options: GlobalOptions, name: str | None) -> bool:
    if options.socket is not None or not context_of(options).is_local:
        return True
    running = [run.name for run in deployments() if run.holder() is not None]
    return len(running) == 1 if name is None else name_here(options, name) in running
