"""`mstarctl ps`: the deployments of this host."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from mstar_core.errors import ExitCode
from mstarctl.client import Known, find_known, known_deployments
from mstarctl.output import Column, Printer, age_text

COLUMNS = (
    Column("NAME", "name"),
    Column("STATE", "state"),
    Column("RANKS", "ranks", is_right=True),
    Column("RUN/WAIT", "load", is_right=True),
    Column("AGE", "age", is_right=True),
    Column("ENDPOINT", "address"),
    Column("MODEL", "model_shown", is_wide=True),
    Column("PID", "pid", is_wide=True, is_right=True),
    Column("RESTARTS", "restarts", is_wide=True, is_right=True),
    Column("LOGS", "log_dir", is_wide=True),
    Column("", "note"),
)
NOTE_CELLS = 80
"""A longer cause is cut in the table; `describe` and -o json show all of it."""

FAILED = ("failed", "unhealthy", "silent")


def ps(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="one deployment, also after its end; exit 6 when it failed")
    ] = None,
    is_watching: Annotated[
        bool, typer.Option("--watch", help="print again whenever something changed; NDJSON with -o json")
    ] = False,
) -> None:
    """List the deployments of this host."""
    printer = Printer.of(ctx)
    items = _show(name, printer)
    if is_watching:
        _watch(name, printer, items)
    if name is not None and items[0]["state"] in FAILED:
        raise typer.Exit(ExitCode.START_FAILED)


def _items(name: str | None) -> list[dict[str, Any]]:
    found = known_deployments() if name is None else [find_known(name)]
    return [item_of(known) for known in found]


def _show(name: str | None, printer: Printer) -> list[dict[str, Any]]:
    items = _items(name)
    shown = items if printer.is_machine else [for_people(item) for item in items]
    printer.items(
        "deployment",
        shown,
        COLUMNS if any(item["note"] for item in items) else COLUMNS[:-1],
        empty="no deployment; start one with: mstarctl up MODEL",
    )
    for item in items:
        if item["state"] == "stale":
            printer.say(
                f"{item['name']} is stale: its supervisor was killed; mstarctl up cleans it when the name is used again"
            )
    return items


def _watch(name: str | None, printer: Printer, before: list[dict[str, Any]]) -> None:
    while True:
        time.sleep(1.0)
        items = _items(name)
        if [_lasting(item) for item in items] == [_lasting(item) for item in before]:
            continue
        before = items
        if printer.is_machine:
            for item in items:
                printer.line({"kind": "deployment", **item})
        else:
            _show(name, printer)


def _lasting(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != "age_s"}


def item_of(known: Known) -> dict[str, Any]:
    """One deployment as data: base units, the supervisor's own words."""
    if not known.is_running:
        return _ended_item(known)
    head, values = known.head, known.snapshot.get("values", {})
    return {
        "name": known.name,
        "state": known.state,
        "reason": head.get("reason", ""),
        "model": head.get("model"),
        "weights": head.get("weights"),
        "ranks": head.get("ranks"),
        "running": _count(values, "api.running", "conductor.in_flight"),
        "waiting": _count(values, "api.waiting"),
        "age_s": head.get("age_s"),
        "endpoint": head.get("endpoint"),
        "pid": known.pid,
        "restarts": head.get("restarts"),
        "cause": known.cause,
        "log_dir": head.get("log_dir"),
        "note": _note(known),
    }


def _ended_item(known: Known) -> dict[str, Any]:
    end = known.outcome
    return {
        "name": known.name,
        "state": known.state,
        "reason": end.get("reason", ""),
        "model": end.get("model"),
        "weights": end.get("weights"),
        "ranks": end.get("ranks"),
        "running": None,
        "waiting": None,
        "age_s": None,
        "endpoint": None,
        "pid": None,
        "restarts": None,
        "cause": known.cause,
        "log_dir": None if known.log_dir is None else str(known.log_dir),
        "note": str(end.get("reason", "")) if known.state == "failed" else "",
    }


def _count(values: dict[str, float], *names: str) -> int | None:
    return next((int(values[name]) for name in names if name in values), None)


def _note(known: Known) -> str:
    head = known.head
    if known.state == "silent":
        return f"its supervisor, pid {known.pid}, does not answer"
    if known.state == "starting":
        return next((_progress(child) for child in known.children if child["state"] != "ready"), "")
    return str(head.get("reason", "")) if known.state in ("degraded", "unhealthy", "draining", "failed") else ""


def _progress(child: dict[str, Any]) -> str:
    share = f" {100 * child['done'] // child['total']} %" if child["total"] else ""
    return f"{child['name']} {child['phase']}{share}"


def for_people(item: dict[str, Any]) -> dict[str, Any]:
    """The item with its cells as text."""
    running, waiting, age = item["running"], item["waiting"], item["age_s"]
    load = None if running is None else f"{running}/{0 if waiting is None else waiting}"
    address = (item["endpoint"] or "").removeprefix("http://")
    model = f"{item['model']}:tiny" if item["weights"] == "tiny" else item["model"]
    note = item["note"] if len(item["note"]) <= NOTE_CELLS else f"{item['note'][: NOTE_CELLS - 3]}..."
    return {
        **item,
        "note": note,
        "load": load,
        "age": None if age is None else age_text(age),
        "address": address,
        "model_shown": model,
    }
