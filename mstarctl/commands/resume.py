"""`mstarctl resume`: let a drained deployment take requests again."""

from __future__ import annotations

from typing import Annotated

import typer

from mstar_core.errors import Unavailable
from mstarctl.client.reach import reached
from mstarctl.complete import deployment_names
from mstarctl.output import Printer


def resume(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="may be left out when only one runs", autocompletion=deployment_names),
    ] = None,
) -> None:
    """Take new requests again after a drain."""
    printer = Printer.of(ctx)
    with reached(printer.options, name) as found:
        state = found.admin.act("resume")["state"]
    if state not in ("ready", "degraded"):
        raise Unavailable(f"{found.name} is {state} and cannot be resumed", hint=f"mstarctl ps {found.name}")
    printer.say(f"{found.name} is {state} and takes requests")
