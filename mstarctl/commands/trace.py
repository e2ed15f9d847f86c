"""`mstarctl trace`: shows where the time of one request went."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from mstar_core.errors import ConfigError
from mstar_core.observe.frames import GraphView
from mstarctl.client.holders import holder_of, request_path
from mstarctl.client.store import Store
from mstarctl.commands.requests import request_of
from mstarctl.complete import HolderName, bare, request_ids
from mstarctl.output import Printer
from mstarctl.output.line import Line, fit, line, safe, wrap
from mstarctl.output.paint import Paint, takes_ascii_only
from mstarctl.output.units import counted
from mstarctl.output.waterfall import parts_lines, waterfall
from mstarctl.top.data.spans import lanes
from mstarctl.top.data.view import View
from mstarctl.top.drawing.glyphs import ASCII, UNICODE, Glyphs, in_ascii
from mstarctl.top.layout import waterfall as pictures

WIDTH: Final = 120
LEAST_WIDTH: Final = 40


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
    with holder_of(printer.options, request, deployment) as holder:
        arguments = {} if handle is None else {"handle": handle}
        facts = holder.admin.get(request_path(request, "trace"), **arguments)
        graph = msgspec.convert(holder.admin.get("/v1/graph"), GraphView)
    if perfetto is not None:
        write_perfetto(facts, perfetto, printer)
        return
    text = drawn(facts, graph, printer) if sys.stdout.isatty() else waterfall(facts, WIDTH)
    printer.item("trace", {"name": request, **facts}, text)


def drawn(facts: dict[str, Any], graph: GraphView, printer: Printer) -> list[str]:
    """Return the waterfall for a terminal: the picture of `top`, as wide as the terminal."""
    paint = Paint.of(printer.options)
    width = max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns - 1)
    glyphs = ASCII if takes_ascii_only() else UNICODE
    return [paint.line(row) for row in picture(facts, graph, width, glyphs)]


def picture(facts: Mapping[str, Any], graph: GraphView, width: int, glyphs: Glyphs) -> list[Line]:
    """Draw a trace: title, parts, legend, axis with the first output, a line per lane, each of `width` cells."""
    request, t = request_of(facts["request"])
    view = View(store=Store(), glyphs=glyphs)
    view.store.graph, view.store.t = graph, t
    rows_by_place = lanes(facts, 1000 * request.age_s(t))
    rows = [pictures.title(view, request, width)]
    rows += [line(" ", (part, "value")) for part in parts_lines(facts, width - 1)]
    rows.append(pictures.legend(view, width))
    told = safe(request.error or request.why)
    if told and told not in rows[0].plain:
        rows += [line(" ", (part, "bad" if request.error else "warn")) for part in wrap(told, width - 1)]
    if request.placed:
        rows.append(fit(line((f" placed on {safe(request.placed)}", "dim")), width))
    if not rows_by_place:
        return [rows[0], line((" no spans have been recorded yet", "dim"))]
    rows += pictures.waterfall(view, rows_by_place, width, marks=pictures.marks_of(request))
    if facts.get("spans_cut"):
        rows.append(line((f" {counted(facts['spans_cut'], 'early span')} counted in the sums only", "dim")))
    return [in_ascii(row) for row in rows] if glyphs.is_ascii else rows


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
