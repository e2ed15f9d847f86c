"""Bench screen: the running load test, and recordings of load tests against this deployment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from mstarctl.output.line import Line, fit, left, line, right, safe, wrap
from mstarctl.output.units import duration_text, size_text
from mstarctl.top.data.view import View
from mstarctl.top.drawing import numbers
from mstarctl.top.drawing.bars import bar, spark
from mstarctl.top.layout.scroll import FOLDS_BELOW, Window, framed, scrolled

HINT = "no load test is recording this deployment"
START: Final = "start one:  mstarctl bench run {name} --rate 4 --duration 60s"
WORKLOADS: Final = "workloads:  mstarctl bench workloads"
METRICS: Final = ("ttft", "ttfa", "ttfi", "ttfs", "chunk", "latency", "rtf", "itl")
GOOD_SHARE: Final = 0.95
SHOWN: Final = ("done", "total", "share")
FEWEST_ROWS: Final = 3
"""Rows of the list that remain beside the details of the running test."""


def bench_page(view: View, width: int, height: int, window: Window) -> tuple[list[Line], list[str]]:
    """Return (exactly `height` lines, keys of the visible recordings)."""
    recordings = list(view.recordings)
    keys = [str(item.get("id", "")) for item in recordings]
    details = running_test(view, recordings, width)[: max(0, height - 1 - FEWEST_ROWS)]
    room = height - 1 - len(details)
    window = scrolled(keys, window, room)
    shown = recordings[window.offset : window.offset + room]
    rows = [recording(view, item, width) for item in shown]
    rows = rows or hint_rows(view, width)
    titles = f" {'RECORDING':<20}  {'STATE':<10}  {'PROGRESS':<24}  {'REQUESTS':>8}  {'SIZE':>9}"
    if width < FOLDS_BELOW:
        titles = f" {'RECORDING':<{width - 21}}  {'STATE':<10} {'DONE':>6}"
    shown_keys = keys[window.offset : window.offset + room]
    return [
        fit(line((titles, "head")), width),
        *framed(view, rows, shown_keys, window, len(recordings), width, room),
        *details,
    ], shown_keys


def hint_rows(view: View, width: int) -> list[Line]:
    """Say how to start a load test."""
    start = START.format(name=view.store.deployment.name or "NAME")
    texts = [(row, "dim") for row in wrap(HINT, width - 3)] + [(row, "value") for row in wrap(start, width - 3)]
    return [line("  ", text) for text in [*texts, *((row, "dim") for row in wrap(WORKLOADS, width - 3))]]


def running_test(view: View, recordings: Sequence[dict[str, object]], width: int) -> list[Line]:
    """Draw the newest test that reports its progress: counts, metrics with a history, goals."""
    reports = [
        progress for item in recordings if isinstance(progress := item.get("progress"), dict) and "test" in progress
    ]
    if not reports:
        return []
    told: dict[str, object] = reports[-1]
    head = line(" ", (f"{safe(str(told['test']))}  {safe(str(told.get('load', '')))}", "strong"), "  ")
    head = head + line((str(told.get("phase", "")), "accent"), f"  {numbers.age(number(told.get('elapsed_s')))}")
    counts = "  ".join(
        f"{name.replace('_', ' ')} {told[name]}" for name in ("sent", "done", "in_flight") if name in told
    )
    errors = number(told.get("errors")) or 0
    rows = [
        fit(head, width),
        fit(progress_row(view, told, width), width),
        fit(line("  ", counts, "  ", (f"errors {errors:.0f}", "bad" if errors else "dim")), width),
    ]
    rows += [fit(metric_row(view, told, name, width), width) for name in METRICS if isinstance(told.get(name), dict)]
    goals = told.get("goals")
    if isinstance(goals, dict):
        good = number(told.get("goodput"))
        rows.append(fit(line("  ", ("goodput ", "dim"), ("-" if good is None else f"{good:.2f}/s", "value")), width))
        for text, met in goals.items():
            share = number(met)
            role = "ok" if (share or 0) >= GOOD_SHARE else "warn"
            meter = bar(share, min(20, width // 4), view.glyphs, role)
            rows.append(
                fit(line(f"  {left(safe(str(text)), 20)} ") + meter + line(f" {numbers.percent(share)}"), width)
            )
    return [fit(line(), width), *rows]


def progress_row(view: View, told: Mapping[str, object], width: int) -> Line:
    """Draw the progress of the phase: a bar, `3/20` requests of a warm-up, and the time that is left."""
    share, left_s = share_of(told), number(told.get("left_s"))
    done, total = number(told.get("done")), number(told.get("total"))
    count = f"{done:.0f}/{total:.0f}" if done is not None and total else ""
    row = line("  ") + bar(share, max(8, min(30, width // 4)), view.glyphs, "accent")
    row = row + line((f" {numbers.percent(share)}", "value"), (f"  {count}" if count else "", "value"))
    return (
        row if left_s is None else row + line(("  about ", "dim"), (duration_text(left_s), "value"), (" left", "dim"))
    )


def metric_row(view: View, told: Mapping[str, object], name: str, width: int) -> Line:
    """Draw the percentiles of a metric; the first one has the test's history."""
    metric = told[name]
    assert isinstance(metric, dict)
    unit = f" {metric['unit']}" if metric.get("unit") else ""
    shares = [(key, number(metric.get(key))) for key in ("p50", "p90", "p99")]
    text = "  ".join(f"{key} {value:.4g}{unit}" for key, value in shares if value is not None)
    history = told.get("history")
    is_first = name == next(key for key in METRICS if isinstance(told.get(key), dict))
    shown = line("  ", (left(name.upper(), 8), "head"), (text, "value"))
    if is_first and isinstance(history, list) and width >= FOLDS_BELOW:
        shown = shown + line("   ", (spark([number(value) for value in history], 40, view.glyphs), "accent"))
    return shown


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
    words = " ".join(f"{key} {value}" for key, value in reported.items() if key not in SHOWN and "test" not in reported)
    return fit(
        line(" ", (left(safe(name), 20), "strong"), "  ")
        + line((left(safe(state), 10), role), "  ")
        + meter
        + line("  ", (right(numbers.NONE if kept is None else f"{kept:.0f}", 8), "value"), "  ")
        + line((right(numbers.NONE if size is None else size_text(size), 9), ""), "  ")
        + line((f"{lost:.0f} dropped  " if lost else "", "warn"), (safe(words), "dim")),
        width,
    )


def share_of(reported: Mapping[str, object]) -> float | None:
    """Return the progress of a load test: the reported share, or done of total."""
    share = number(reported.get("share"))
    return numbers.part(number(reported.get("done")), number(reported.get("total"))) if share is None else share


def number(value: object) -> float | None:
    """Return a number of an answer, None for another type."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
