"""`mstarctl drain`: stops new requests while requests in flight finish."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from mstar_core.errors import Unavailable
from mstarctl.client.reach import reached
from mstarctl.complete import DeploymentName
from mstarctl.output import Printer

POLL_S = 0.2


def drain(
    ctx: typer.Context,
    name: DeploymentName = None,
    is_waiting: Annotated[bool, typer.Option("--wait", help="return when no request is in flight")] = False,
) -> None:
    """Refuse new requests; those in flight finish."""
    printer = Printer.of(ctx)
    with reached(printer.options, name, serve=("down",)) as target:
        admin, who = target.admin, target.name
        state = admin.act("drain")["state"]
        if state != "draining":
            raise Unavailable(f"{who} is {state} and cannot be drained", hint=f"mstarctl ps {who}")
        printer.say(f"{who} refuses new requests; mstarctl resume {who} accepts them again")
        head = admin.head()
        while is_waiting and _left(head):
            time.sleep(POLL_S)
            head = admin.head()
    if is_waiting:
        printer.say("no request is in flight")
    if printer.is_machine:
        printer.item("deployment", {"name": who, "state": head["state"], "is_drained": head["is_drained"]}, "")


def _left(head: dict[str, Any]) -> bool:
    return head["state"] == "draining" and not head["is_drained"]
