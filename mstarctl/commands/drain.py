"""`mstarctl drain`: let a deployment finish what it has and take nothing new."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from mstar_core.errors import Unavailable
from mstarctl.client.reach import reached
from mstarctl.complete import deployment_names
from mstarctl.output import Printer

POLL_S = 0.2


def drain(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="may be left out when only one runs", autocompletion=deployment_names),
    ] = None,
    is_waiting: Annotated[bool, typer.Option("--wait", help="return when no request is left")] = False,
) -> None:
    """Stop taking new requests; those in flight go on."""
    printer = Printer.of(ctx)
    with reached(printer.options, name) as found:
        admin, who = found.admin, found.name
        state = admin.act("drain")["state"]
        if state != "draining":
            raise Unavailable(f"{who} is {state} and cannot be drained", hint=f"mstarctl ps {who}")
        printer.say(f"{who} takes no new requests; mstarctl resume {who} undoes it")
        while is_waiting and _left(admin.head()):
            time.sleep(POLL_S)
    if is_waiting:
        printer.say("no request is left")


def _left(head: dict[str, Any]) -> bool:
    return head["state"] == "draining" and not head["is_drained"]
