"""Charts of a result or of a sweep: distributions, timeline, shares of stages, the worst audio, the knee."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError, UsageError, did_you_mean
from mstarctl.bench.measure.load_metrics import BY_NAME, FIRSTS, samples_of
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.shares import joined, slow_and_usual
from mstarctl.bench.result import SWEEP, ResultFolder
from mstarctl.bench.show.chart import Chart, ChartBar, ChartLine, Point, drawn
from mstarctl.bench.show.live import number
from mstarctl.bench.show.table import load_text

MOST_POINTS: Final = 400


def sweep_facts(path: Path) -> dict[str, Any] | None:
    """Return the facts of a sweep's folder or file; None if it is not a sweep. Raises ConfigError if it is damaged."""
    file = path / SWEEP if path.is_dir() else path
    if file.name != SWEEP or not file.exists():
        return None
    try:
        facts = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a sweep", str(error), file=str(file)) from error
    if not isinstance(facts, dict) or not isinstance(facts.get("points"), list):
        raise ConfigError(f"{file} is not a sweep", "it has no points", file=str(file))
    return facts


def chart_of(path: Path, what: str | None) -> Chart:
    """Return a chart of a folder. Raises ConfigError for no result, UsageError for an unknown chart."""
    if (sweep := sweep_facts(path)) is not None:
        if what not in (None, "sweep"):
            raise UsageError(f"--what {what}: {path} is a sweep", hint="--what sweep, or name the folder of one point")
        return sweep_chart(sweep)
    opened = ResultFolder.opened(path)
    outcomes = [outcome for outcome in opened.outcomes() if opened.window.holds(outcome.due_s)]
    name = what or "cdf"
    if name in CHARTS:
        return CHARTS[name](opened, outcomes)
    if name in BY_NAME and not BY_NAME[name].is_of_window:
        return distribution(opened, outcomes, name)
    raise UsageError(f"--what is {name!r}", hint=did_you_mean(name, [*CHARTS, "sweep", *FIRSTS, "itl", "rtf"]))


def _title(opened: ResultFolder, n: int, what: str) -> str:
    """Return the title of a chart of `n` samples."""
    facts = opened.facts
    return (
        f"{facts['server']['model']}, {facts['workload']['name']}, {facts['load_text']}: {what}"
        f"  (n {n}, seed {facts['seed']})"
    )


def first_metric(opened: ResultFolder, outcomes: Sequence[Outcome]) -> Chart:
    """Return the distribution of the time to the first output."""
    name = next((name for name in FIRSTS if name in opened.facts["metrics"]), "latency")
    return distribution(opened, outcomes, name)


def distribution(opened: ResultFolder, outcomes: Sequence[Outcome], name: str) -> Chart:
    """Return the cumulative distribution of a metric with the goals on it. Raises UsageError without samples."""
    measures = opened.measures
    values = sorted(v for o in outcomes if o.is_ok for v in samples_of(o, measures).get(name, ()))
    if not values:
        raise UsageError(f"the result has no {name}", hint=f"it has {', '.join(opened.facts['metrics'])}")
    step = max(1, len(values) // MOST_POINTS)
    shown = [*range(0, len(values), step), len(values) - 1]
    points = [(values[i], 100 * (i + 1) / len(values)) for i in shown]
    marks = [(term.value, term.text) for term in opened.goals if term.metric.name == name]
    unit = BY_NAME[name].unit
    return Chart(
        title=_title(opened, len(values), f"distribution of {name}"),
        x_label=f"{name} [{unit}]" if unit else name,
        y_label="samples [%]",
        lines=[ChartLine(name=name, points=[(values[0], 0.0), *points])],
        marks=marks,
    )


def timeline(opened: ResultFolder, outcomes: Sequence[Outcome]) -> Chart:
    """Return requests in flight and the rate of ends over time, with pages in use if the server reports them."""
    buckets = opened.timeline()
    flight: list[Point] = [(bucket["elapsed_s"], bucket["in_flight"]) for bucket in buckets]
    rate: list[Point] = [
        (later["elapsed_s"], (later["done"] - earlier["done"]) / max(1e-9, later["elapsed_s"] - earlier["elapsed_s"]))
        for earlier, later in itertools.pairwise(buckets)
    ]
    lines = [
        ChartLine(name="in flight", points=flight or [(0.0, 0.0)]),
        ChartLine(name="ended per second", points=rate),
    ]
    pages: list[Point] = [
        (bucket["elapsed_s"], 100 * bucket["server"]["pages_used"] / bucket["server"]["pages_total"])
        for bucket in buckets
        if bucket.get("server", {}).get("pages_total")
    ]
    lines += [ChartLine(name="pages %", points=pages, is_right=True)] if pages else []
    return Chart(
        title=_title(opened, len(outcomes), "over time"),
        x_label="time [s]",
        y_label="requests, requests/s",
        lines=lines,
        right_label="pages [%]" if pages else "",
        bands=bands(opened),
    )


def bands(opened: ResultFolder) -> list[tuple[float, float, str]]:
    """Return outages and states of the server as shaded times."""
    facts, window = opened.facts, opened.window
    spans = [(outage["from_s"], outage["to_s"], "outage") for outage in facts.get("outages", ())]
    if not spans:
        spans = [
            (
                max(window.start_s, incident["from_s"]),
                window.end_s if incident["to_s"] is None else incident["to_s"],
                incident["state"],
            )
            for incident in facts.get("incidents", ())
            if incident["kind"] == "state"
        ]
    return spans


def nodes(opened: ResultFolder, outcomes: Sequence[Outcome]) -> Chart:
    """Return the shares of request time by stage. Raises UsageError without the server's spans."""
    spans = joined(outcomes, opened.spans())
    if not spans.by_id:
        raise UsageError("the result has no spans of the server", hint="run it against a deployment by its name")
    usual, slow = slow_and_usual(outcomes, spans.by_id, opened.measures.is_late)
    bars = [
        ChartBar(group=group, name=name, value=share)
        for group, shares in (("around the median", usual), ("slowest 1 %", slow))
        for name, share in shares.items()
        if share >= 0.005
    ]
    return Chart(title=_title(opened, len(spans.by_id), "time of a request"), bars=bars)


def audio_buffer(opened: ResultFolder, outcomes: Sequence[Outcome]) -> Chart:
    """Return the audio ahead of playback of the request that stalled longest. Raises UsageError without audio."""
    spoken = [outcome for outcome in outcomes if outcome.of_kind("audio")]
    if not spoken:
        raise UsageError("the result has no audio", hint="--what cdf")
    worst = max(spoken, key=lambda outcome: sum(samples_of(outcome, opened.measures).get("stall", (0.0,))))
    points: list[Point] = []
    held, before = 0.0, None
    first = worst.of_kind("audio")[0].at_s
    for chunk in worst.of_kind("audio"):
        at = chunk.at_s - first
        if before is not None:
            empty = before + held
            if empty < at:
                points.append((empty, 0.0))
            held = max(0.0, held - (at - before))
            points.append((at, held))
        held += chunk.amount
        points.append((at, held))
        before = at
    return Chart(
        title=_title(opened, 1, f"audio ahead of playback, {worst.id}"),
        x_label="time since the first audio [s]",
        y_label="audio [s]",
        lines=[ChartLine(name="buffer", points=points)],
    )


CHARTS: Final[Mapping[str, Callable[[ResultFolder, Sequence[Outcome]], Chart]]] = {
    "cdf": first_metric,
    "timeline": timeline,
    "nodes": nodes,
    "buffer": audio_buffer,
}


def sweep_chart(facts: Mapping[str, Any]) -> Chart:
    """Return goodput (or throughput of closed loops) and the p99 of the first output against the load."""
    is_open = any(point["kind"] == "rate" for point in facts["points"])
    points = [point for point in facts["points"] if (point["kind"] == "rate") is is_open]
    points.sort(key=lambda point: float(point["load"]))
    name = "goodput" if is_open else "throughput"
    first = next((point["first"] for point in points if point["first"]), "latency")
    knee = facts.get("knee")
    return Chart(
        title=f"{facts['model']}, {facts['workload']}: {name} and p99 of {first}  (goal {facts.get('slo') or 'none'})",
        x_label="offered [requests/s]" if is_open else "clients",
        y_label=f"{name} [requests/s]",
        right_label=f"{first} p99 [ms]",
        lines=[
            ChartLine(name=name, points=[(p["load"], p[name]) for p in points]),
            ChartLine(name=f"{first} p99", points=[(p["load"], p["p99"]) for p in points if p["p99"]], is_right=True),
        ],
        marks=[(knee, "knee")] if knee else [],
    )


def sweep_plot(facts: Mapping[str, Any]) -> list[str]:
    """Return a sweep as its chart, its points and its knee."""
    lines = drawn(sweep_chart(facts)) if facts["points"] else []
    for point in facts["points"]:
        first = f"{point['first']} p50 {number(point['p50'])} p99 {number(point['p99'])} ms" if point["first"] else ""
        state = "over-saturated" if point["is_over_saturated"] else ""
        state = f"{state}  the server was disturbed".strip() if point.get("is_disturbed") else state
        good = f"goodput {number(point['goodput'])}/s  " if point["kind"] == "rate" else ""
        sound = f"audio {number(point['audio_rate'])}x  " if point.get("audio_rate") else ""
        lines.append(
            f"{load_text(point):<12}  throughput {number(point['throughput'])}/s  "
            f"{good}{sound}{first}  {state}".rstrip()
        )
    if facts.get("knee"):
        knee = next(p for p in facts["points"] if p["load"] == facts["knee"] and p["kind"] == "rate")
        first = f", {knee['first']} p99 {number(knee['p99'])} ms" if knee["first"] else ""
        lines.append(f"knee {number(knee['load'])}/s: goodput {number(knee['goodput'])}/s{first}   goal {facts['slo']}")
    elif any(point["kind"] == "rate" for point in facts["points"]):
        lines.append("no rate met the goal")
    return [*lines, *(f"warning: {text}" for text in facts.get("warnings", ()))]
