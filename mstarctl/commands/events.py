"""`mstarctl events`: prints the life-cycle events of a deployment."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from mstar_core.errors import Unreachable, UsageError
from mstarctl.client import AdminClient
from mstarctl.client.gateways import running_gateways
from mstarctl.client.reach import context_of, reached
from mstarctl.commands.logs import folder_of
from mstarctl.complete import PastDeploymentName
from mstarctl.output import Printer
from mstarctl.output.durations import parse_duration
from mstarctl.output.facts import facts_text
from mstarctl.output.options import GlobalOptions

FILE = "events.ndjson"


def events(
    ctx: typer.Context,
    name: PastDeploymentName = None,
    is_following: Annotated[
        bool, typer.Option("-f", "--follow", help="print new events until the deployment ends")
    ] = False,
    kind: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="only events of this type, such as child.died or 'child.*'")
    ] = "*",
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="only the last TIME, such as 10m")] = "",
) -> None:
    """Show the events of a deployment."""
    printer = Printer.of(ctx)
    oldest = time.time() - parse_duration(since, "--since") if since else 0.0
    for event in events_of(printer.options, name, is_following=is_following):
        if fnmatchcase(str(event["type"]), kind) and float(event["time"]) >= oldest:
            show(event, printer)


def events_of(options: GlobalOptions, name: str | None, *, is_following: bool) -> Iterator[dict[str, Any]]:
    """Yield events from the deployment's file, which outlives it, or from its socket if followed or remote."""
    if options.socket is not None or not context_of(options).is_local:
        with reached(options, name) as target:
            yield from _live(target.admin, follow=is_following)
        return
    run, folder = folder_of(name)
    if run is not None and run == running_gateways().get(run.name):
        raise UsageError(
            f"gateway {run.name!r} has no events", hint=f"mstarctl logs {run.name}, or mstarctl serve ls {run.name}"
        )
    if is_following and run is not None and run.holder() is not None:
        yield from _live(AdminClient.of(run), follow=True)
    elif (folder / FILE).exists():
        yield from _written((folder / FILE).read_text(encoding="utf-8"))


def _written(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # a supervisor was killed while it wrote the last line
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
        # The deployment has ended after its last event.


def show(event: dict[str, Any], printer: Printer) -> None:
    """Print one event."""
    if printer.is_machine:
        printer.line({"kind": "event", **event}, f"event/{event['n']}")
        return
    clock = datetime.fromtimestamp(float(event["time"])).astimezone().strftime("%H:%M:%S")
    facts = {key: value for key, value in event.items() if key not in ("n", "time", "type")}
    printer.text(f"{clock}  {event['type']:<20}  {facts_text(facts)}".rstrip(), is_flushed=True)
