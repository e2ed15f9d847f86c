"""Load tests that record against this deployment, as the admin socket lists them."""

from __future__ import annotations

from mstarctl.output.units import size_text
from mstarctl.top import figures
from mstarctl.top.bars import bar
from mstarctl.top.layout.scroll import Window, framed, scrolled
from mstarctl.top.line import Line, fit, left, line, right, safe
from mstarctl.top.view import View

HINT = "  no load test records here; start one with: mstarctl bench run"


def bench_page(view: View, width: int, height: int, window: Window) -> tuple[list[Line], list[str]]:
    """(exactly `height` lines, keys of the recordings that are shown)."""
    found = list(view.recordings)
    keys = [str(item.get("id", "")) for item in found]
    room = height - 1
    window = scrolled(keys, window, room)
    shown = found[window.offset : window.offset + room]
    rows = [recording(view, item, width) for item in shown] or [line((HINT, "dim"))]
    titles = f" {'RECORDING':<20}  {'STATE':<10}  {'PROGRESS':<24}  {'REQUESTS':>8}  {'SIZE':>9}"
    shown_keys = keys[window.offset : window.offset + room]
    return [
        fit(line((titles, "head")), width),
        *framed(view, rows, shown_keys, window, len(found), width, room),
    ], shown_keys


def recording(view: View, item: dict[str, object], width: int) -> Line:
    """One recording: its name, how far it is, what it holds."""
    share = number(item.get("progress"))
    name = str(item.get("name") or item.get("id") or figures.NONE)
    state = str(item.get("state") or ("recording" if item.get("is_open", True) else "closed"))
    size = number(item.get("bytes"))
    kept = number(item.get("requests", item.get("lines")))
    meter = bar(share, 16, view.glyphs, "accent") + line((f" {figures.percent(share):>6} ", "value"))
    return fit(
        line(
            " ",
            (left(safe(name), 20), "strong"),
            "  ",
            (left(safe(state), 10), "accent" if state == "recording" else "dim"),
            "  ",
            meter,
            "  ",
            (right(figures.NONE if kept is None else f"{kept:.0f}", 8), "value"),
            "  ",
            (right(figures.NONE if size is None else size_text(size), 9), ""),
            "  ",
            (safe(str(item.get("note") or "")), "dim"),
        ),
        width,
    )


def number(value: object) -> float | None:
    """A number of an answer, None for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
