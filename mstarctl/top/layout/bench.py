"""Bench screen: recordings of load tests against this deployment."""

from __future__ import annotations

from mstarctl.output.units import size_text
from mstarctl.top.data.view import View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import bar
from mstarctl.top.drawing.line import Line, fit, left, line, right, safe, wrap
from mstarctl.top.layout.scroll import FOLDS_BELOW, Window, framed, scrolled

HINT = "no load test is recording this deployment"


def bench_page(view: View, width: int, height: int, window: Window) -> tuple[list[Line], list[str]]:
    """Return (exactly `height` lines, keys of the visible recordings)."""
    found = list(view.recordings)
    keys = [str(item.get("id", "")) for item in found]
    room = height - 1
    window = scrolled(keys, window, room)
    shown = found[window.offset : window.offset + room]
    rows = [recording(view, item, width) for item in shown]
    rows = rows or [line("  ", (row, "dim")) for row in wrap(HINT, width - 3)]
    titles = f" {'RECORDING':<20}  {'STATE':<10}  {'PROGRESS':<24}  {'REQUESTS':>8}  {'SIZE':>9}"
    if width < FOLDS_BELOW:
        titles = f" {'RECORDING':<{width - 21}}  {'STATE':<10} {'DONE':>6}"
    shown_keys = keys[window.offset : window.offset + room]
    return [
        fit(line((titles, "head")), width),
        *framed(view, rows, shown_keys, window, len(found), width, room),
    ], shown_keys


def recording(view: View, item: dict[str, object], width: int) -> Line:
    """Draw one recording: its name, the progress of the load test, its size."""
    progress = item.get("progress")
    reported: dict[str, object] = progress if isinstance(progress, dict) else {}
    share = share_of(reported)
    name, state = str(item.get("name") or item.get("id") or numbers.NONE), str(item.get("state") or numbers.NONE)
    size, kept, lost = number(item.get("size_bytes")), number(item.get("requests")), number(item.get("dropped"))
    role = "accent" if state == "recording" else "warn"
    if width < FOLDS_BELOW:
        short = line(" ", (left(safe(name), width - 21), "strong"), "  ", (left(safe(state), 10), role))
        return fit(short + line((f" {numbers.percent(share):>6}", "value")), width)
    meter = bar(share, 16, view.glyphs, "accent") + line((f" {numbers.percent(share):>6} ", "value"))
    words = " ".join(f"{key} {value}" for key, value in reported.items() if key not in ("done", "total", "share"))
    return fit(
        line(" ", (left(safe(name), 20), "strong"), "  ")
        + line((left(safe(state), 10), role), "  ")
        + meter
        + line("  ", (right(numbers.NONE if kept is None else f"{kept:.0f}", 8), "value"), "  ")
        + line((right(numbers.NONE if size is None else size_text(size), 9), ""), "  ")
        + line((f"{lost:.0f} dropped  " if lost else "", "warn"), (safe(words), "dim")),
        width,
    )


def share_of(reported: dict[str, object]) -> float | None:
    """Return the progress of a load test: the reported share, or done of total."""
    share = number(reported.get("share"))
    return numbers.part(number(reported.get("done")), number(reported.get("total"))) if share is None else share


def number(value: object) -> float | None:
    """Return a number of an answer, None for another type."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
