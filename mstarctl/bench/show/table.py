"""Tables of a result: the figures of its modalities, goals, assertions and where the time went. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mstarctl.bench.measure.incidents import incident_lines
from mstarctl.bench.measure.load_metrics import BY_NAME
from mstarctl.bench.show.live import number
from mstarctl.output.units import counted

COLUMNS: Final = ("p50", "p90", "p95", "p99", "max")
HIDDEN: Final = frozenset({"lag", "service", "underruns", "tokens"})
WINDOW_ORDER: Final = (
    "throughput",
    "goodput",
    "offered",
    "text_rate",
    "audio_rate",
    "image_rate",
    "chunk_rate",
    "step_rate",
    "miss_rate",
    "jitter",
    "underrun_rate",
    "continuity_ok",
    "error_rate",
    "incomplete_rate",
    "payload",
)
PER_LINE: Final = 5
SHARES: Final = frozenset({"error_rate", "incomplete_rate", "underrun_rate", "continuity_ok", "miss_rate"})


def result_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return a result as lines: head, percentiles, rates, goals, assertions, shares and warnings."""
    lines = [head_line(facts), *incident_lines(facts)]
    lines += metric_lines(facts["metrics"])
    lines += rate_lines(facts["metrics"])
    lines += [f"goal {text}: met by {100 * share:.1f} %" for text, share in facts.get("attained", {}).items()]
    for judged in facts.get("asserts", ()):
        lines.append(assert_line(judged))
    lines += [
        f"{failure['n']}x {failure['status']}: {failure['reason'] or 'no reason'}"
        for failure in facts.get("failures", ())
    ]
    lines += share_lines(facts.get("shares") or {})
    lines += [f"note: {text}" for text in note_texts(facts)]
    lines += [f"warning: {text}" for text in facts.get("warnings", ())]
    return lines


def note_texts(facts: Mapping[str, Any]) -> list[str]:
    """Return the notes of a result, with one if half of its successes or more are missing in its throughput."""
    after, succeeded = facts.get("ended_after", 0), facts["statuses"].get("ok", 0)
    late = f"{counted(after, 'request')} ended after the window, and the throughput counts none of them"
    return [*facts.get("notes", ()), *([late] if after and 2 * after >= succeeded else [])]


def is_loud(line: str) -> bool:
    """Return whether a line of a result is printed in bold: outages, incidents of the server, failed assertions."""
    return line.startswith(("OUTAGE ", "SERVER ", "FAILS "))


def head_line(facts: Mapping[str, Any]) -> str:
    """Return workload, load, length, seed, server and the counts by outcome."""
    counts = facts["statuses"]
    bad = "  ".join(f"{name} {count}" for name, count in sorted(counts.items()) if name != "ok")
    span = facts["window"]["end_s"] - facts["window"]["start_s"]
    lag = facts["client"].get("lag_p99_ms")
    late = f"   lag p99 {number(lag)} ms" if lag is not None else ""
    interrupted = "   INTERRUPTED" if facts.get("is_interrupted") else ""
    return (
        f"{facts['workload']['name']}  {facts['load_text']}  {span:.1f} s  seed {facts['seed']}"
        f"   {facts['server']['model']}   n {facts['intended']}  ok {counts.get('ok', 0)}  {bad}{late}{interrupted}"
    ).rstrip()


def metric_lines(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of percentiles. `~` marks too few samples, `>` a lower limit because requests were cut."""
    rows = [["", *COLUMNS, "n"], *percentile_rows(metrics)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    is_few = any("~" in line for line in lines)
    return [*lines, *(["~ fewer samples than this percentile needs: indicative only"] if is_few else [])]


def percentile_rows(metrics: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a row of text for each metric with percentiles: name and unit, `COLUMNS`, samples."""
    rows = []
    for name, metric in metrics.items():
        if "p50" in metric and name not in HIDDEN:
            unit = metric.get("unit") or BY_NAME[name].unit if name in BY_NAME else ""
            rows.append([f"{name} {unit}".strip(), *(cell(metric, column) for column in COLUMNS), str(metric["n"])])
    return rows


def cell(metric: Mapping[str, Any], column: str) -> str:
    """Return one percentile with its marks."""
    mark = "~" if column in metric.get("few", ()) else ""
    over = "> " if column in metric.get("over", ()) else ""
    return f"{over}{number(float(metric[column]))}{mark}"


def rate_lines(metrics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the metrics of the window, a few on each line."""
    parts = []
    for name in WINDOW_ORDER:
        if name in metrics:
            value = float(metrics[name]["value"])
            if name in ("incomplete_rate", "error_rate") and not value:
                continue
            parts.append(f"{name.replace('_', ' ')} {rate_text(name, metrics)}")
    return ["   ".join(parts[at : at + PER_LINE]) for at in range(0, len(parts), PER_LINE)]


def rate_text(name: str, metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the value of a metric of the window with its unit, shares in percent."""
    value = float(metrics[name]["value"])
    return f"{100 * value:.1f} %" if name in SHARES else f"{number(value)}{_unit(BY_NAME[name].unit)}"


def _unit(unit: str) -> str:
    return unit if unit.startswith("/") or unit == "x" else f" {unit}" if unit else ""


def assert_line(judged: Mapping[str, Any]) -> str:
    """Return one assertion with its value."""
    value = "" if judged["found"] is None else f"  is {number(float(judged['found']))}"
    why = f"  ({judged['why']})" if judged["why"] else ""
    return f"{'holds' if judged['holds'] else 'FAILS'}  {judged['text']}{value}{why}"


def share_lines(shares: Mapping[str, Any]) -> list[str]:
    """Return where the time went, around the median and in the slowest 1 %."""
    usual, slow = shares.get("usual") or {}, shares.get("slow") or {}
    if not usual:
        return []
    names = list(dict.fromkeys([*usual, *slow]))
    width = max(len(name) for name in names)
    grown = max(names, key=lambda name: slow.get(name, 0.0) - usual.get(name, 0.0))
    lines = [f"{'time of a request':<{width}}  around the median  slowest 1 %"]
    for name in names:
        mark = "  ◀" if name == grown and slow.get(name, 0.0) - usual.get(name, 0.0) > 0.05 else ""
        lines.append(f"{name:<{width}}  {100 * usual.get(name, 0.0):15.0f} %  {100 * slow.get(name, 0.0):9.0f} %{mark}")
    missing = shares.get("missing", 0)
    return [*lines, *([f"{missing} requests without the server's spans"] if missing else [])]


def markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as a Markdown table; the first row is the heading."""
    head, *rows = lines
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def result_markdown(facts: Mapping[str, Any]) -> list[str]:
    """Return the percentiles and rates of a result as Markdown tables."""
    metrics = facts["metrics"]
    rows = [["metric", "unit", *COLUMNS, "n"]]
    rows += [
        [name, str(metric.get("unit", "")), *(cell(metric, column) for column in COLUMNS), str(metric["n"])]
        for name, metric in metrics.items()
        if "p50" in metric and name not in HIDDEN
    ]
    rates = [
        ["metric", "value"],
        *(
            [name, f"{number(float(metrics[name]['value']))} {BY_NAME[name].unit}".strip()]
            for name in WINDOW_ORDER
            if name in metrics
        ),
    ]
    loud = [f"**{line}**  " for line in incident_lines(facts)]
    return [head_line(facts), *(["", *loud] if loud else []), "", *markdown(rows), "", *markdown(rates)]


def load_text(point: Mapping[str, Any]) -> str:
    """Return the load of a point: `4/s`, `1 client` or `8 clients`."""
    if point["kind"] == "rate":
        return f"{number(point['load'])}/s"
    return counted(round(point["load"]), "client")


def sweep_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    """Return the points of a sweep as rows of text, headings first."""
    rows = [["load", "offered", "throughput", "goodput", "first output", "p50 ms", "p99 ms", "n", "ok", ""]]
    for point in facts["points"]:
        is_knee = point["kind"] == "rate" and point["load"] == facts.get("knee")
        marks = ["knee"] if is_knee else []
        marks += ["over-saturated"] if point["is_over_saturated"] else []
        marks += ["the server was disturbed"] if point.get("is_disturbed") else []
        rows.append(
            [
                load_text(point),
                f"{number(point['offered'])}/s",
                f"{number(point['throughput'])}/s",
                f"{number(point['goodput'])}/s" if facts.get("slo") else "-",
                point["first"] or "-",
                *("-" if point[column] is None else number(point[column]) for column in ("p50", "p99")),
                str(point["n"]),
                str(point["statuses"].get("ok", 0)),
                ", ".join(marks),
            ]
        )
    return rows


def sweep_markdown(facts: Mapping[str, Any]) -> list[str]:
    """Return a sweep as a Markdown table with its goal and knee."""
    knee = f"{number(facts['knee'])}/s" if facts.get("knee") else "none"
    head = f"{facts['model']}, {facts['workload']}   goal {facts.get('slo') or 'none'}   knee {knee}"
    return [head, "", *markdown(sweep_rows(facts)), *(f"\nwarning: {text}" for text in facts.get("warnings", ()))]


def comparison_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return a comparison as lines: environment, verdicts, notes."""
    rows = facts["rows"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [environment_line(facts)]
    lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *(f"note: {text}" for text in facts["notes"])]


def comparison_markdown(facts: Mapping[str, Any]) -> list[str]:
    """Return a comparison as a Markdown table."""
    return [environment_line(facts), "", *markdown(facts["rows"]), *(f"\n{text}" for text in facts["notes"])]


def environment_line(facts: Mapping[str, Any]) -> str:
    """Return what differs between the environments, and the number of runs."""
    differences = [
        f"{difference['key']} {difference['base']} -> {difference['changed']}" for difference in facts["environment"]
    ]
    shown = ", ".join(differences[:6]) + (f" and {len(differences) - 6} more" if len(differences) > 6 else "")
    base, changed = facts["runs"]
    return f"environment: {shown or 'equal'}     {base} + {changed} runs"
