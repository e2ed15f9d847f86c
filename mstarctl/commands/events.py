"""`mstarctl events`: the life-cycle feed of a deployment."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from mstar_core.errors import Unreachable
from mstarctl.client import AdminClient
from mstarctl.commands.logs import folder_of
from mstarctl.output import Printer
from mstarctl.output.table import escape

FILE = "events.ndjson"


def events(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="may be left out when only one runs; works after its end")
    ] = None,
    is_following: Annotated[bool, typer.Option("-f", "--follow", help="go on with what comes, until it ends")] = False,
    kind: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="only these, such as child.died or 'child.*'")
    ] = "*",
) -> None:
    """Show what happened to a deployment."""
    printer = Printer.of(ctx)
    run, folder = folder_of(name)
    found = (
        _live(AdminClient.of(run))
        if is_following and run.holder() is not None
        else _written((folder / FILE).read_text(encoding="utf-8") if (folder / FILE).exists() else "")
    )
    for event in found:
        if fnmatchcase(str(event["type"]), kind):
            show(event, printer)


def _written(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # the last line of a supervisor that was killed while it wrote
            continue
        yield event


def _live(admin: AdminClient) -> Iterator[dict[str, Any]]:
    with admin:
        try:
            yield from (event for event in admin.lines("/v1/events", follow=1, since=0) if event is not None)
        except Unreachable:
            return  # the deployment has ended, and its last event was shown


def show(event: dict[str, Any], printer: Printer) -> None:
    """One event."""
    if printer.is_machine:
        printer.line({"kind": "event", **event})
        return
    clock = datetime.fromtimestamp(float(event["time"])).astimezone().strftime("%H:%M:%S")
    facts = " ".join(
        f"{key}={escape(str(value))}"
        for key, value in event.items()
        if key not in ("n", "time", "type") and value != ""
    )
    printer.text(f"{clock}  {event['type']:<20}  {facts}".rstrip(), is_flushed=True)
