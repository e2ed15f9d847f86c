"""`mstarctl events`: the life-cycle feed of a deployment."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from mstar_core.errors import Unreachable
from mstarctl.client import AdminClient
from mstarctl.client.reach import context_of, reached
from mstarctl.commands.logs import folder_of
from mstarctl.complete import deployment_names
from mstarctl.output import Printer
from mstarctl.output.durations import parse_duration
from mstarctl.output.facts import facts_text
from mstarctl.output.options import GlobalOptions

FILE = "events.ndjson"


def events(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="may be left out when only one runs; works after its end",
            autocompletion=deployment_names,
        ),
    ] = None,
    is_following: Annotated[bool, typer.Option("-f", "--follow", help="go on with what comes, until it ends")] = False,
    kind: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="only these, such as child.died or 'child.*'")
    ] = "*",
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="only the last TIME, such as 10m")] = "",
) -> None:
    """Show what happened to a deployment."""
    printer = Printer.of(ctx)
    oldest = time.time() - parse_duration(since, "--since") if since else 0.0
    for event in found_events(printer.options, name, is_following=is_following):
        if fnmatchcase(str(event["type"]), kind) and float(event["time"]) >= oldest:
            show(event, printer)


def found_events(options: GlobalOptions, name: str | None, *, is_following: bool) -> Iterator[dict[str, Any]]:
    """Events of a deployment: from its file, which outlives it; from its socket to follow it, or on another host."""
    if options.socket is not None or not context_of(options).is_local:
        with reached(options, name) as found:
            yield from _live(found.admin, follow=is_following)
        return
    run, folder = folder_of(name)
    if is_following and run is not None and run.holder() is not None:
        yield from _live(AdminClient.of(run), follow=True)
    elif (folder / FILE).exists():
        yield from _written((folder / FILE).read_text(encoding="utf-8"))


def _written(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # the last line of a supervisor that was killed while it wrote
            continue
        yield event


def _live(admin: AdminClient, *, follow: bool) -> Iterator[dict[str, Any]]:
    seen = False
    try:
        for event in admin.lines("/v1/events", follow=int(follow), since=0):
            seen = True
            if event is not None:
                yield event
    except Unreachable:
        if not seen:
            raise
        # The deployment has ended, and its last event was shown.


def show(event: dict[str, Any], printer: Printer) -> None:
    """One event."""
    if printer.is_machine:
        printer.line({"kind": "event", **event}, f"event/{event['n']}")
        return
    clock = datetime.fromtimestamp(float(event["time"])).astimezone().strftime("%H:%M:%S")
    facts = {key: value for key, value in event.items() if key not in ("n", "time", "type")}
    printer.text(f"{clock}  {event['type']:<20}  {facts_text(facts)}".rstrip(), is_flushed=True)
