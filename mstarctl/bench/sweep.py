"""Sweep over loads: fixed points, or the knee found by itself. Every point is a run of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import UsageError
from mstarctl.bench import result
from mstarctl.bench.measure.load_metrics import FIRSTS
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.terms import parse_terms
from mstarctl.bench.result import ResultFolder
from mstarctl.bench.run import BenchRun, RunOptions, is_disturbed
from mstarctl.bench.server_side import wait_empty
from mstarctl.bench.show.display import Display
from mstarctl.bench.show.table import load_text
from mstarctl.bench.target import BenchTarget

UNLOADED_FACTOR: Final = 3.0
GROWTH: Final = 1.05
SHARES: Final = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
BEYOND: Final = 1.15
"""Factor between the rates above those shares, while the goal is met: the peak is a lower estimate."""
MOST_BEYOND: Final = 8
WIDTH: Final = 0.05
SHORT: Final = 3.0
"""Median latencies under load that a window should last."""
EMPTY_S: Final = 60.0
MOST_CLIENTS: Final = 1024
LEAST_EXPECTED: Final = 3.0
"""An open point whose window expects fewer requests is left out."""

_RANGE: Final = re.compile(r"(?P<low>[\d.]+)\.\.(?P<high>[\d.]+):x(?P<factor>[\d.]+)$")

MakeOptions = Callable[..., RunOptions]
"""Makes the options of a point: called with its folder and the fields of its load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One point: its load as a number, the facts of its run, and the folder of its result."""

    load: float
    is_open: bool
    facts: dict[str, Any]
    folder: Path

    @property
    def goodput(self) -> float:
        return float(self.facts["metrics"].get("goodput", {}).get("value", 0.0))

    @property
    def offered(self) -> float:
        return float(self.facts["metrics"]["offered"]["value"])

    @property
    def throughput(self) -> float:
        return float(self.facts["metrics"]["throughput"]["value"])

    def work_rate(self) -> float:
        opened = ResultFolder.opened(self.folder)
        return work_rate(opened.outcomes(), opened.window.start_s)

    def is_good(self, knee: float) -> bool:
        """Return whether the goodput is at least this share of the offered load."""
        return not self.facts["is_over_saturated"] and self.goodput >= knee * self.offered > 0


def work_rate(outcomes: Iterable[Outcome], start_s: float) -> float:
    """Return the requests per second that a server answers, from the start of the window until the last one ended.

    Unlike the throughput it is meaningful for windows that are shorter than a request. It is never above the server's
    rate: while the last requests end, the server has less to do.
    """
    ends = [outcome.end_s for outcome in outcomes if outcome.is_ok and outcome.end_s > start_s]
    return len(ends) / max(1e-9, max(ends) - start_s) if ends else 0.0


def points_of(text: str, option: str) -> list[float]:
    """Parse `1,2,4` or `1..64:x2`. Raises UsageError."""
    parsed = _RANGE.match(text)
    try:
        if parsed is None:
            points = [float(part) for part in text.split(",")]
        else:
            low, high, factor = (float(parsed[name]) for name in ("low", "high", "factor"))
            points = []
            while low <= high * (1 + 1e-9) and factor > 1 and low > 0:
                points.append(low)
                low *= factor
    except ValueError:
        points = []
    if not points or min(points) <= 0:
        raise UsageError(f"{option} is {text!r}", hint=f"{option} 1,2,4,8 or {option} 1..64:x2, or --rate auto")
    return sorted(set(points))


class Sweep:
    """One sweep against one target. Owned by the command. points: those that were run, in order."""

    def __init__(
        self,
        target: BenchTarget,
        make: MakeOptions,
        out: Path,
        display: Display,
        *,
        knee: float,
        slo: str,
        span_s: float,
    ) -> None:
        self.points: list[SweepPoint] = []
        self.unloaded: SweepPoint | None = None
        self.warnings: list[str] = []
        self.slo = slo
        self._target = target
        self._make = make
        self._out = out
        self._display = display
        self._knee = knee
        self._span_s = span_s

    def fixed(self, loads: Sequence[float], *, is_open: bool) -> None:
        """Run fixed points in ascending order. An over-saturated point ends an open sweep."""
        for load in loads:
            point = self._run(load, is_open=is_open)
            if is_open and point.facts["is_over_saturated"]:
                self._display.say(f"over-saturated at {load:g}/s: higher rates are left out")
                break
        self._warn_of_short_windows()

    def auto(self, first_clients: int) -> None:
        """Find the knee: the unloaded latency, the peak by doubled concurrency, open loads around it, bisection."""
        self.unloaded = self._run(1, is_open=False)
        if not self.slo:
            self.slo = default_goal(self.unloaded)
            self._display.say(f"goal: {self.slo} (3x unloaded)")
        peak = self._peak(first_clients, self.unloaded.work_rate())
        good, bad = 0.0, 0.0
        for load in self._rising(peak):
            if not self._run(load, is_open=True).is_good(self._knee):
                bad = load
                break
            good = load
        while good and bad and bad - good > WIDTH * good:
            middle = (good + bad) / 2
            good, bad = (middle, bad) if self._run(middle, is_open=True).is_good(self._knee) else (good, middle)

    def _rising(self, peak: float) -> list[float]:
        """Return the rates to try, up to far above the peak."""
        shares = [*SHARES, *(SHARES[-1] * BEYOND**step for step in range(1, MOST_BEYOND + 1))]
        return [share * peak for share in shares if share * peak * self._span_s >= LEAST_EXPECTED]

    def _peak(self, clients: int, before: float) -> float:
        """Double the clients until the rate of work grows by less than 5 %; return the highest rate."""
        peak = before
        while clients <= MOST_CLIENTS:
            rate = self._run(clients, is_open=False).work_rate()
            peak = max(peak, rate)
            if rate < GROWTH * before:
                break
            before, clients = rate, 2 * clients
        self._display.say(f"peak: {peak:.3g}/s with {min(clients, MOST_CLIENTS)} clients")
        self._warn_of_short_windows()
        return peak

    def _warn_of_short_windows(self) -> None:
        """Say so if windows are too short for a steady state, in which rates come out wrong and the knee too high."""
        latencies = [point.facts["metrics"].get("latency", {}).get("p50", 0.0) for point in self.points]
        latency = max(latencies, default=0.0)
        if self._span_s < SHORT * latency / 1000:
            self.warnings.append(
                f"windows of {self._span_s:g} s are short for requests of {latency / 1000:.2g} s: throughput counts "
                f"only requests that ended in the window, and a knee may be too high; give --duration "
                f"{SHORT * latency / 1000:.0f}s or more, or --ramp"
            )
            self._display.say(f"warning: {self.warnings[-1]}")

    @property
    def knee(self) -> SweepPoint | None:
        """The open point with the highest offered rate whose goodput is high enough; None without one."""
        good = [point for point in self.points if point.is_open and point.is_good(self._knee)]
        return max(good, key=lambda point: point.load, default=None)

    def _run(self, load: float, *, is_open: bool) -> SweepPoint:
        if self.points and not wait_empty(self._target.admin, EMPTY_S):
            self._display.say(f"the server's queue is not empty after {EMPTY_S:g} s")
        name = f"{len(self.points):02d}-{'rate' if is_open else 'clients'}-{load:.4g}"
        fields: dict[str, Any] = (
            {"rate": load, "concurrency": None} if is_open else {"rate": None, "concurrency": round(load)}
        )
        options = self._make(self._out / name, **fields)
        goals = tuple(parse_terms(self.slo, "--slo", is_goal=True))
        options = replace(options, slo=self.slo, goals=goals, asserts=(), joins_spans=False)
        facts = BenchRun(self._target, options, self._display).perform()
        point = SweepPoint(load=load, is_open=is_open, facts=facts, folder=self._out / name)
        self.points.append(point)
        self._display.say(point_line(point, self._knee))
        self.write()
        if facts["is_interrupted"]:
            raise KeyboardInterrupt
        return point

    def write(self) -> dict[str, Any]:
        """Write the sweep with its knee and return its facts."""
        knee = self.knee
        facts = {
            "schema": result.SCHEMA,
            "kind": "sweep",
            "slo": self.slo,
            "knee_share": self._knee,
            "knee": None if knee is None else knee.load,
            "model": self._target.model,
            "workload": self.points[0].facts["workload"]["name"] if self.points else "",
            "points": [point_facts(point, self._knee) for point in self.points],
            "warnings": self.warnings,
        }
        result.write_json(self._out / result.SWEEP, facts)
        return facts


def default_goal(unloaded: SweepPoint) -> str:
    """Return a goal of three times the unloaded first output. Raises UsageError if no request succeeded."""
    metrics = unloaded.facts["metrics"]
    for name in FIRSTS:
        if "p50" in metrics.get(name, {}):
            return f"{name}<{UNLOADED_FACTOR * metrics[name]['p50']:.4g}ms"
    raise UsageError("no request succeeded without load", hint="mstarctl bench run with --concurrency 1 shows why")


def point_facts(point: SweepPoint, knee: float) -> dict[str, Any]:
    """Return a point for the file and for plots."""
    metrics = point.facts["metrics"]
    first = next((name for name in FIRSTS if "p50" in metrics.get(name, {})), None)
    return {
        "load": point.load,
        "kind": "rate" if point.is_open else "clients",
        "offered": point.offered,
        "throughput": point.throughput,
        "goodput": point.goodput,
        "is_good": point.is_good(knee),
        "is_over_saturated": point.facts["is_over_saturated"],
        "first": first,
        "p50": metrics[first]["p50"] if first else None,
        "p99": metrics[first]["p99"] if first else None,
        "audio_rate": metrics.get("audio_rate", {}).get("value"),
        "text_rate": metrics.get("text_rate", {}).get("value"),
        "is_disturbed": is_disturbed(point.facts),
        "statuses": point.facts["statuses"],
        "n": point.facts["intended"],
        "folder": point.folder.name,
    }


def point_line(point: SweepPoint, knee: float) -> str:
    """Return a point as one line."""
    facts = point_facts(point, knee)
    first = f"{facts['first']} p50 {facts['p50']:.4g} p99 {facts['p99']:.4g} ms" if facts["first"] else "no success"
    state = "over-saturated" if facts["is_over_saturated"] else "good" if facts["is_good"] else "below the goal"
    state = state if point.is_open else ""
    state = f"{state}  the server was disturbed".strip() if facts["is_disturbed"] else state
    good = f"  goodput {facts['goodput']:.3g}/s" if point.is_open else ""
    return f"  {load_text(facts):<12} throughput {facts['throughput']:.3g}/s{good}  {first}  {state}".rstrip()
