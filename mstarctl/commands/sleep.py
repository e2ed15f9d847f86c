"""`mstarctl sleep` and `wake`: give the device memory of a deployment, or of some nodes, back, and take it again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mstar_core.errors import MstarError, StartError, StateConflict
from mstarctl.client.reach import Reached, reached
from mstarctl.complete import DeploymentName
from mstarctl.output import Printer
from mstarctl.output.units import size_text
from mstarctl.start.operation import follow

Nodes = Annotated[
    str | None,
    typer.Option("--nodes", metavar="NODE,NODE", help="only these nodes, such as talker,codec; default: all"),
]


def sleep(
    ctx: typer.Context,
    name: DeploymentName = None,
    *,
    level: Annotated[
        int, typer.Option("--level", metavar="1|2", help="1: keep the weights in host memory; 2: drop them")
    ] = 1,
    nodes: Nodes = None,
    is_waiting: Annotated[
        bool, typer.Option("--wait", help="wait for requests in flight, at most the drain limit")
    ] = False,
) -> None:
    """Give the device memory of a deployment back; a request or `wake` takes it again."""
    printer = Printer.of(ctx)
    with reached(printer.options, name) as target:
        body = {"level": level, "nodes": named(nodes), "wait": int(is_waiting)}
        head = _carried_out(target, "/v1/deployment/sleep", body, printer)
        facts = head["sleep"]
        freed, kept = sum(facts["freed"].values()), sum(facts["kept"].values())
        what = target.name if facts["is_whole"] else f"{', '.join(facts['nodes'])} of {target.name}"
        printer.say(f"{what} sleeps at level {facts['level']}: {size_text(freed)} of its devices are free")
        if kept:
            printer.say(f"  {size_text(kept)} of host memory keep its weights")
        printer.say(f"  mstarctl wake {target.name} takes the memory again")
    _data(printer, target.name, head)


def wake(ctx: typer.Context, name: DeploymentName = None, *, nodes: Nodes = None) -> None:
    """Take the device memory of a sleeping deployment, or of some nodes, again."""
    printer = Printer.of(ctx)
    with reached(printer.options, name) as target:
        head = _carried_out(target, "/v1/deployment/wake", {"nodes": named(nodes)}, printer)
        left = head["sleep"]["nodes"]
        printer.say(f"{target.name} is {head['state']}{'; asleep: ' + ', '.join(left) if left else ''}")
    _data(printer, target.name, head)


def named(words: str | None) -> list[str]:
    """Return the nodes of `--nodes`."""
    return [word.strip() for word in (words or "").split(",") if word.strip()]


def _carried_out(target: Reached, path: str, body: dict[str, Any], printer: Printer) -> dict[str, Any]:
    """Carry out an operation and return the head. Raises StateConflict for one that was refused on the way."""
    operation = target.admin.send(path, body)["operation"]
    try:
        return follow(target.admin, operation, printer.say)
    except StartError as error:
        refused: MstarError = StateConflict(error.title, hint=error.hint)
        raise refused from error


def _data(printer: Printer, name: str, head: dict[str, Any]) -> None:
    if printer.is_machine:
        printer.item("deployment", {"name": name, "state": head["state"], "sleep": head["sleep"]}, "")
