"""`mstarctl restart`: restarts every process of a deployment under the same supervisor and specification."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from mstar_core.errors import StartError, Unreachable
from mstarctl.client.reach import reached
from mstarctl.complete import DeploymentName
from mstarctl.output import Printer
from mstarctl.start.operation import follow
from mstarctl.start.progress import view_of

POLL_S = 0.2


def restart(
    ctx: typer.Context,
    name: DeploymentName = None,
    is_rolling: Annotated[
        bool, typer.Option("--rolling", help="one process after the other, while the others serve")
    ] = False,
    is_waiting: Annotated[bool, typer.Option("--wait/--no-wait", help="return when it is ready again")] = True,
) -> None:
    """Restart a deployment's processes."""
    printer = Printer.of(ctx)
    with reached(printer.options, name, serve=("restart",)) as target:
        admin, who = target.admin, target.name
        if is_rolling:
            operation = admin.act("restart", rolling=1)["operation"]
            printer.say(f"{who}: restarting one process after the other; requests go on")
            head = follow(admin, operation, printer.say) if is_waiting else admin.head()
            printer.say(f"{who} is {head['state']}")
            _data(head, who, printer)
            return
        before = admin.head()["restarts"]
        admin.act("restart")
        printer.say(f"{who}: draining, then restarting")
        if not is_waiting:
            _data(admin.head(), who, printer)
            return
        view = view_of(printer.options)
        while True:
            snapshot = admin.snapshot()
            head = snapshot["deployment"]
            if head["restarts"] > before:
                view.show(snapshot)
            if head["state"] == "ready" and head["restarts"] > before:
                printer.say(f"{who} is ready")
                _data(head, who, printer)
                return
            if head["state"] in ("unhealthy", "failed"):
                raise StartError(f"{who} did not restart", head["reason"], f"mstarctl logs {who}")
            if head["state"] == "stopping":
                raise Unreachable(f"{who} was stopped during the restart", head["reason"])
            time.sleep(POLL_S)


def _data(head: dict[str, Any], name: str, printer: Printer) -> None:
    if printer.is_machine:
        item = {"name": name, "state": head["state"], "restarts": head["restarts"], "ready_s": head.get("ready_s")}
        printer.item("deployment", item, "")
