"""`mstarctl drain`: let a deployment finish what it has and take nothing new."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from mstar_core.config.run_dir import find
from mstar_core.errors import Unavailable
from mstarctl.client import AdminClient
from mstarctl.output import Printer

POLL_S = 0.2


def drain(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="may be left out when only one runs")] = None,
    is_waiting: Annotated[bool, typer.Option("--wait", help="return when no request is left")] = False,
) -> None:
    """Stop taking new requests; those in flight go on."""
    printer = Printer.of(ctx)
    run = find(name)
    with AdminClient.of(run) as admin:
        state = admin.act("drain")["state"]
        if state != "draining":
            raise Unavailable(f"{run.name} is {state} and cannot be drained", hint=f"mstarctl ps {run.name}")
        printer.say(f"{run.name} takes no new requests; mstarctl resume {run.name} undoes it")
        while is_waiting and _left(admin.snapshot()):
            time.sleep(POLL_S)
    if is_waiting:
        printer.say("no request is left")


def _left(snapshot: dict[str, Any]) -> bool:
    return snapshot["deployment"]["state"] == "draining" and not snapshot["deployment"]["is_drained"]
