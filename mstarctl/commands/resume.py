"""`mstarctl resume`: makes a drained deployment accept requests again."""

from __future__ import annotations

import typer

from mstar_core.errors import Unavailable
from mstarctl.client.reach import reached
from mstarctl.complete import DeploymentName
from mstarctl.output import Printer


def resume(
    ctx: typer.Context,
    name: DeploymentName = None,
) -> None:
    """Accept new requests again after a drain."""
    printer = Printer.of(ctx)
    with reached(printer.options, name) as target:
        state = target.admin.act("resume")["state"]
    if state not in ("ready", "degraded"):
        raise Unavailable(f"{target.name} is {state} and cannot be resumed", hint=f"mstarctl ps {target.name}")
    printer.say(f"{target.name} is {state} and accepts requests")
    if printer.is_machine:
        printer.item("deployment", {"name": target.name, "state": state}, "")
