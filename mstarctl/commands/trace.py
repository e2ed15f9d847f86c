"""`mstarctl trace`: shows where the time of one request went."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mstar_core.errors import ConfigError
from mstarctl.client.holders import holder_of, request_path
from mstarctl.complete import HolderName, bare, request_ids
from mstarctl.output import Printer
from mstarctl.output.waterfall import waterfall

WIDTH: Final = 120


def trace(
    ctx: typer.Context,
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST",
            help="id of the request, as its client knows it",
            autocompletion=request_ids,
            callback=bare,
        ),
    ],
    perfetto: Annotated[
        Path | None, typer.Option("--perfetto", metavar="FILE", help="write a file for ui.perfetto.dev instead")
    ] = None,
    handle: Annotated[
        int | None, typer.Option("--handle", help="one of several requests with this id; see requests -o wide")
    ] = None,
    deployment: HolderName = None,
) -> None:
    """Show one request as a waterfall: where its time went."""
    printer = Printer.of(ctx)
    with holder_of(printer.options, request, deployment) as found:
        arguments = {} if handle is None else {"handle": handle}
        facts = found.admin.get(request_path(request, "trace"), **arguments)
    if perfetto is not None:
        write_perfetto(facts, perfetto, printer)
        return
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    printer.item("trace", {"name": request, **facts}, waterfall(facts, width))


def write_perfetto(facts: dict[str, Any], path: Path, printer: Printer) -> None:
    """Write the trace-event file. Raises ConfigError."""
    from mstarctl.output.perfetto import trace_events

    try:
        path.write_text(json.dumps(trace_events(facts)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written", error.strerror or str(error), file=str(path), key="perfetto"
        ) from error
    printer.say(f"wrote {path}: open it in ui.perfetto.dev")
    printer.item("file", {"name": str(path), "spans": len(facts["spans"])}, str(path))
