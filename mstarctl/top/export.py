"""Export to files: table, snapshot, screen, spans of a request. Existing files are not overwritten."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.errors import MstarError
from mstarctl.output.line import Line
from mstarctl.output.moments import dated
from mstarctl.top.data.spans import Lane
from mstarctl.top.data.view import View
from mstarctl.top.drawing.svg import svg
from mstarctl.top.layout.request_list import Sort, chosen, place

FORMS: Final = (
    ("c", "csv", "the filtered table as CSV"),
    ("j", "json", "the filtered table as JSON"),
    ("n", "snapshot", "the whole snapshot as JSON"),
    ("t", "txt", "this screen as text"),
    ("v", "svg", "this screen as SVG"),
)
"""(key, form, description), as shown in the export dialog."""


def export(form: str, view: View, sort: Sort, screen: Sequence[Line], folder: Path) -> Path:
    """Write one form to a file in `folder` and return its path. Raises MstarError."""
    match form:
        case "csv":
            return save(folder, view, "requests", "csv", table_csv(view, sort))
        case "json":
            return save(folder, view, "requests", "json", table_json(view, sort))
        case "snapshot":
            return save(folder, view, "snapshot", "json", snapshot_json(view))
        case "txt":
            return save(folder, view, "screen", "txt", "\n".join(row.plain.rstrip() for row in screen) + "\n")
        case "svg":
            return save(folder, view, "screen", "svg", svg(screen, title=f"mstarctl top {view.store.deployment.name}"))
    raise KeyError(form)


def save(folder: Path, view: View, what: str, suffix: str, text: str) -> Path:
    """Write a new file, named after the deployment, its content and the time. Raises MstarError."""
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in view.store.deployment.name or "mstar")
    stem = f"{name}-{what}-{time.strftime('%Y%m%dT%H%M%S')}"
    for number in range(100):
        path = folder / f"{stem}{f'-{number}' if number else ''}.{suffix}"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            raise MstarError(f"{path} cannot be written", str(error.strerror), "start top in another folder") from error
        return path
    raise MstarError(f"{folder} contains 100 files named {stem}", hint="remove some")


def rows(view: View, sort: Sort) -> list[dict[str, Any]]:
    """Return the filtered, sorted table with every field of a request in base units, start and end as ISO times."""
    return [
        dated(msgspec.to_builtins(r), view.epoch_s) | {"age_s": round(r.age_s(view.t), 3), "at": place(r)}
        for _, r in chosen(view, sort)
    ]


CSV_FIELDS: Final[dict[str, Callable[[dict[str, Any]], Any]]] = {
    "id": lambda r: r["id"],
    "state": lambda r: r.get("state", ""),
    "route": lambda r: r.get("route", ""),
    "inputs": lambda r: "+".join(r.get("inputs", [])),
    "outputs": lambda r: "+".join(r.get("outputs", [])),
    "started": lambda r: r["started"],
    "ended": lambda r: r["ended"],
    "at": lambda r: r["at"],
    "rank": lambda r: r.get("rank"),
    "age": lambda r: r["age_s"],
    "ttft": lambda r: r.get("ttft_ms"),
    "ttfa": lambda r: r.get("ttfa_ms"),
    "tokens": lambda r: r.get("tokens", 0),
    "audio": lambda r: r.get("audio_s", 0.0),
    "step": lambda r: r.get("step", 0),
    "steps": lambda r: r.get("steps", 0),
    "wait": lambda r: r.get("waited_ms", 0.0),
    "pages": lambda r: r.get("pages", 0),
    "prompt": lambda r: r.get("prompt_tokens", 0),
    "error": lambda r: r.get("error", ""),
}
"""Columns of the CSV file: route is that of the api, times are ISO, numbers are in base units."""


def table_csv(view: View, sort: Sort) -> str:
    """Return the table as CSV, see CSV_FIELDS."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for row in rows(view, sort):
        writer.writerow(_cell(value(row)) for value in CSV_FIELDS.values())
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Quote text that a spreadsheet would run as a formula, because ids come from clients."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def table_json(view: View, sort: Sort) -> str:
    """Return the table in the format of `mstarctl requests -o json`."""
    items = rows(view, sort)
    return (
        json.dumps(
            {"kind": "request", "items": items, "truncated": view.store.truncated.get("requests", 0)},
            indent=2,
            ensure_ascii=False,
        )
        + "\n"
    )


def snapshot_json(view: View) -> str:
    """Return the state as a snapshot frame."""
    return msgspec.json.format(msgspec.json.encode(view.store.snapshot(events=200), enc_hook=str)).decode() + "\n"


def perfetto(request: str, lanes: Sequence[Lane]) -> str:
    """Return a request's lanes as trace events for ui.perfetto.dev, one track per lane."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": f"{lane.place} {lane.label}"}}
        for tid, lane in enumerate(lanes, start=1)
    ]
    events.append({"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": request}})
    for tid, lane in enumerate(lanes, start=1):
        events += [
            {
                "ph": "X",
                "pid": 1,
                "tid": tid,
                "name": lane.label if bar.kind == "compute" else bar.kind,
                "cat": bar.kind,
                "ts": round(1000 * bar.start_ms),
                "dur": max(1, round(1000 * (bar.end_ms - bar.start_ms))),
            }
            for bar in lane.bars
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
