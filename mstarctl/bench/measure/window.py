"""Metrics of a measured window, computed from outcomes. Used by runs, by `show` and by comparisons. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from mstarctl.bench.measure.load_metrics import (
    BY_NAME,
    LONGEST_STALL_S,
    METRICS,
    Measures,
    Samples,
    samples_of,
    steps_of,
    t0_of,
)
from mstarctl.bench.measure.outcome import ERRORS, Outcome
from mstarctl.bench.measure.statistics import spread
from mstarctl.bench.measure.terms import Term, meets

RATES: Final = (
    ("text_rate", "text"),
    ("audio_rate", "audio"),
    ("image_rate", "image"),
    ("chunk_rate", "action"),
    ("step_rate", "tensor"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWindow:
    """Measured time in seconds since the start of the phase. A request belongs to it by its intended time."""

    start_s: float
    end_s: float

    @property
    def span_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, at_s: float) -> bool:
        """Return whether a time lies in the window."""
        return self.start_s <= at_s < self.end_s


@dataclass(slots=True)
class WindowTally:
    """Collected samples of a window. Owned by `summarised`."""

    samples: Samples = field(default_factory=dict)
    censored: Samples = field(default_factory=dict)
    attained: dict[str, list[bool]] = field(default_factory=dict)
    good: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome, measures: Measures, terms: Sequence[Term]) -> None:
        """Add one request that belongs to the window."""
        self.statuses[outcome.status] += 1
        if outcome.status == "skipped":
            self.samples.setdefault("missed", []).append(1.0)
            return
        mine = samples_of(outcome, measures) if outcome.is_ok else {}
        for name, values in mine.items():
            self.samples.setdefault(name, []).extend(values)
        if outcome.status in ("incomplete", "timeout"):
            self._cut(outcome, measures)
        if outcome.status == "cancelled":
            return
        met = [(term.text, meets(outcome, mine, term)) for term in terms]
        for text, is_met in met:
            if is_met is not None:
                self.attained.setdefault(text, []).append(is_met)
        self.good += outcome.is_ok and all(is_met is not False for _, is_met in met)

    def _cut(self, outcome: Outcome, measures: Measures) -> None:
        """Add a request that was cut as longer than its age, where its first chunk or its end is missing."""
        age_ms = 1e3 * (outcome.end_s - t0_of(outcome, measures))
        names = ["latency"]
        for kind, name in (
            ("text", "ttft"),
            ("audio", "ttfa"),
            ("image", "ttfi"),
            ("action", "chunk"),
            ("tensor", "ttfs"),
        ):
            if kind in outcome.requested and not outcome.of_kind(kind):
                names.append(name)
        for name in names:
            self.censored.setdefault(name, []).append(age_ms)


def ended_in(outcome: Outcome, window: MeasuredWindow) -> bool:
    """Return whether a request counts for the throughput: a success that ended in the window, whenever it was sent."""
    return outcome.is_ok and window.holds(outcome.end_s)


def window_of(outcomes: Sequence[Outcome], span_s: float, ramp_s: float) -> MeasuredWindow:
    """Return the window: `span_s` after the ramp, or until the last request ended if the requests decide."""
    if span_s:
        return MeasuredWindow(start_s=ramp_s, end_s=ramp_s + span_s)
    ends = [outcome.end_s for outcome in outcomes]
    begins = [outcome.due_s for outcome in outcomes]
    return MeasuredWindow(start_s=min(begins, default=0.0), end_s=max(ends, default=0.0) + 1e-6)


def summarised(
    outcomes: Sequence[Outcome], window: MeasuredWindow, measures: Measures, terms: Sequence[Term]
) -> dict[str, Any]:
    """Return every metric with samples, the counts by status, and the attainment of each goal.

    `ended_after` counts successes of the window that ended after it: their latencies count, but not for the throughput.
    """
    tally = WindowTally()
    mine = [outcome for outcome in outcomes if window.holds(outcome.due_s)]
    for outcome in mine:
        tally.add(outcome, measures, terms)
    metrics = {
        metric.name: {
            **spread(tally.samples.get(metric.name, ()), tally.censored.get(metric.name, ())),
            "unit": metric.unit,
        }
        for metric in METRICS
        if not metric.is_of_window and (tally.samples.get(metric.name) or tally.censored.get(metric.name))
    }
    metrics |= {
        name: {"value": float(f"{value:.6g}"), "n": len(mine), "unit": BY_NAME[name].unit}
        for name, value in _of_window(outcomes, mine, tally, window, bool(terms)).items()
    }
    attained = {text: sum(met) / len(met) for text, met in tally.attained.items()}
    ended_after = sum(outcome.is_ok and not ended_in(outcome, window) for outcome in mine)
    return {
        "metrics": metrics,
        "statuses": dict(tally.statuses),
        "attained": attained,
        "intended": len(mine),
        "ended_after": ended_after,
    }


def _of_window(
    outcomes: Sequence[Outcome], mine: Sequence[Outcome], tally: WindowTally, window: MeasuredWindow, has_goals: bool
) -> dict[str, float]:
    span_s = max(window.span_s, 1e-9)
    asked = [outcome for outcome in mine if outcome.status not in ("cancelled", "skipped")]
    whole = max(1, len(asked))
    values = {
        "throughput": sum(ended_in(outcome, window) for outcome in outcomes) / span_s,
        "offered": len(mine) / span_s,
        "error_rate": sum(outcome.status in ERRORS for outcome in asked) / whole,
        "incomplete_rate": sum(outcome.status == "incomplete" for outcome in asked) / whole,
        "payload": sum(outcome.size_bytes for outcome in mine) / span_s,
    }
    if has_goals:
        values["goodput"] = tally.good / span_s
    received = [
        chunk
        for outcome in outcomes
        for chunk in (*(c for c in outcome.chunks if c.kind != "tensor"), *steps_of(outcome.of_kind("tensor")))
        if window.holds(chunk.at_s)
    ]
    kinds = {kind for outcome in mine for kind in outcome.requested}
    for name, kind in RATES:
        if kind in kinds:
            has_amount = kind in ("text", "audio")
            values[name] = sum(chunk.amount if has_amount else 1.0 for chunk in received if chunk.kind == kind) / span_s
    samples = tally.samples
    if samples.get("underruns"):
        values["underrun_rate"] = sum(map(bool, samples["underruns"])) / len(samples["underruns"])
        longest = samples["longest_stall"]
        values["continuity_ok"] = sum(stall <= 1e3 * LONGEST_STALL_S for stall in longest) / len(longest)
    if samples.get("missed"):
        values["miss_rate"] = sum(samples["missed"]) / len(samples["missed"])
    if samples.get("chunk"):
        spread_of = spread(samples["chunk"])
        values["jitter"] = spread_of["p99"] - spread_of["p50"]
    return {name: value for name, value in values.items() if math.isfinite(value)}
