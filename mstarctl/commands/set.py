"""`mstarctl set`: changes limits of a running deployment."""

from __future__ import annotations

from typing import Annotated

import typer

from mstar_core.errors import UsageError
from mstarctl.client.reach import reached
from mstarctl.complete import bare, live_words
from mstarctl.output import Column, Printer
from mstarctl.start.target import parse_set

COLUMNS = (Column("KEY", "name"), Column("VALUE", "value"), Column("BEFORE", "before"))


def set_values(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME] KEY=VALUE...",
            help="keys of a deployment file; NAME is optional if only one deployment runs",
            autocompletion=live_words,
            callback=bare,
        ),
    ],
) -> None:
    """Change limits while a deployment runs."""
    printer = Printer.of(ctx)
    names = [word for word in words if "=" not in word]
    if len(names) > 1 or len(names) == len(words):
        raise UsageError(f"{' '.join(words)!r} sets no key", hint="for example: mstarctl set max_queue=64")
    values = {override.key: override.value for override in map(parse_set, (word for word in words if "=" in word))}
    with reached(printer.options, names[0] if names else None, serve=("reload",)) as target:
        changed = target.admin.send("/v1/config", {"values": values})["values"]
        printer.say(f"{target.name}: set until it ends; a start takes the values of its file again")
    printer.items("setting", [{"name": key, **change} for key, change in changed.items()], COLUMNS)
