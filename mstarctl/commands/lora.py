"""`mstarctl lora`: loads and unloads LoRA adapters of a running deployment, and lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mstar_core.errors import UsageError
from mstar_core.weights.adapter_config import AdapterConfig
from mstarctl.client.reach import Reached, only_here, reached
from mstarctl.complete import DeploymentName, bare
from mstarctl.output import Column, Printer
from mstarctl.start.hardware.adapters import named_folders
from mstarctl.start.operation import follow

COLUMNS = (
    Column("NAME", "name"),
    Column("RANK", "rank"),
    Column("BASE", "base"),
    Column("FOLDER", "folder"),
)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Load, unload and list LoRA adapters.",
)


@app.command("load")
def load(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME] ADAPTER=FOLDER",
            help="the adapter's name and folder; NAME is optional if only one deployment runs",
            callback=bare,
        ),
    ],
) -> None:
    """Load a LoRA adapter while a deployment serves; requests choose it by its name."""
    printer = Printer.of(ctx)
    only_here(printer.options, "lora load")
    *names, text = words
    ((adapter, folder),) = (named_folders([text], "ADAPTER=FOLDER") or {}).items()
    config = AdapterConfig.read(Path(folder))
    with reached(printer.options, _only(names)) as target:
        body = {"name": adapter, "folder": folder, "rank": config.rank, "base": config.base}
        follow(target.admin, target.admin.send("/v1/adapters", body)["operation"], printer.say)
        printer.say(f"{target.name}: model {adapter} is loaded")
        _data(printer, target)


@app.command("unload")
def unload(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME] ADAPTER",
            help="the adapter's name; NAME is optional if only one deployment runs",
            callback=bare,
        ),
    ],
) -> None:
    """Unload a LoRA adapter when its requests have ended; new ones are refused at once."""
    printer = Printer.of(ctx)
    *names, adapter = words
    with reached(printer.options, _only(names)) as target:
        follow(target.admin, target.admin.delete(f"/v1/adapters/{adapter}")["operation"], printer.say)
        printer.say(f"{target.name}: model {adapter} is unloaded")
        _data(printer, target)


@app.command("list")
def list_adapters(ctx: typer.Context, name: DeploymentName = None) -> None:
    """List the LoRA adapters that a deployment has loaded."""
    printer = Printer.of(ctx)
    with reached(printer.options, name) as target:
        facts = target.admin.get("/v1/adapters")
    printer.say(f"{len(facts['items'])} of at most {facts['room']} adapters, of rank {facts['max_rank']} or less")
    printer.items("adapter", facts["items"], COLUMNS)


def _only(names: list[str]) -> str | None:
    """Return the deployment's name, None without one. Raises UsageError for several."""
    if len(names) > 1:
        raise UsageError(f"{' '.join(names)!r} is not one deployment", hint="for example: mstarctl lora list")
    return names[0] if names else None


def _data(printer: Printer, target: Reached) -> None:
    if printer.is_machine:
        items: list[dict[str, Any]] = target.admin.get("/v1/adapters")["items"]
        printer.items("adapter", items, COLUMNS)
