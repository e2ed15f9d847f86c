"""What `e` and `p` write: the table, the snapshot, the screen, a request's spans. No file is overwritten."""

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
from mstarctl.top.data.view import View
from mstarctl.top.drawing.line import Line
from mstarctl.top.drawing.svg import svg
from mstarctl.top.layout.requests import COLUMNS, Sort, chosen, place
from mstarctl.top.layout.waterfall import Lane

FORMS: Final = (
    ("c", "csv", "the filtered table as CSV"),
    ("j", "json", "the filtered table as JSON"),
    ("n", "snapshot", "the whole snapshot as JSON"),
    ("t", "txt", "this screen as text"),
    ("v", "svg", "this screen as SVG"),
)
"""(key, form, what it is), as the sheet of `e` shows them."""


def export(form: str, view: View, sort: Sort, screen: Sequence[Line], folder: Path) -> Path:
    """Write one form into `folder` and return the file. Raises MstarError when it cannot be written."""
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
    """A new file named after the deployment, what it holds and the time."""
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
    raise MstarError(f"{folder} has a hundred files called {stem}", hint="remove some")


def rows(view: View, sort: Sort) -> list[dict[str, Any]]:
    """The filtered table in its order, every field of a request in base units."""
    return [
        msgspec.to_builtins(r) | {"age_s": round(r.age_s(view.t), 3), "at": place(r)} for _, r in chosen(view, sort)
    ]


def table_csv(view: View, sort: Sort) -> str:
    """The columns of the table; text as it is, numbers in base units."""
    value: dict[str, Callable[[dict[str, Any]], Any]] = {
        "id": lambda r: r["id"],
        "route": lambda r: f"{'+'.join(r.get('inputs', []))} > {'+'.join(r.get('outputs', []))}",
        "at": lambda r: r["at"],
        "rank": lambda r: r.get("rank"),
        "age": lambda r: r["age_s"],
        "ttft": lambda r: r.get("ttft_ms"),
        "ttfa": lambda r: r.get("ttfa_ms"),
        "tokens": lambda r: r.get("tokens", 0),
        "audio": lambda r: r.get("audio_s", 0.0),
        "wait": lambda r: r.get("waited_ms", 0.0),
        "pages": lambda r: r.get("pages", 0),
        "prompt": lambda r: r.get("prompt_tokens", 0),
    }
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(column.key for column in COLUMNS)
    for row in rows(view, sort):
        writer.writerow(_cell(value[column.key](row)) for column in COLUMNS)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula is quoted by a mark; ids come from clients."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def table_json(view: View, sort: Sort) -> str:
    """As `mstarctl requests -o json`."""
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
    """The picture as a snapshot frame."""
    return msgspec.json.format(msgspec.json.encode(view.store.snapshot(events=200), enc_hook=str)).decode() + "\n"


def perfetto(request: str, lanes: Sequence[Lane]) -> str:
    """A request's lanes as trace events, one track a lane. Opens in ui.perfetto.dev."""
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
