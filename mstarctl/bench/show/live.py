"""Live state of a run and its drawing: progress, metrics of the modalities in use, goals, and the server.

`LiveState` is fed by the run; `live_lines` is a pure function from it to lines of a width.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.text import Text

from mstarctl.bench.client.wire import Counters
from mstarctl.bench.measure.load_metrics import BY_NAME, Measures, samples_of
from mstarctl.bench.measure.outcome import ERRORS, Outcome
from mstarctl.bench.measure.terms import Term, meets
from mstarctl.bench.show.histogram import LiveHistogram

WIDE: Final = 80
SPARKS: Final = "▁▂▃▄▅▆▇█"
WARM_UP, MEASURED = "warm-up", "measured"
SHOWN: Final = {
    "text": ("ttft", "itl"),
    "audio": ("ttfa", "rtf"),
    "image": ("ttfi",),
    "action": ("chunk", "control"),
    "tensor": ("ttfs",),
}
"""Metrics of each modality, first the one with a history."""


@dataclass(slots=True)
class LiveState:
    """State of a running load test. Owned by the run. Lengths in seconds; total: planned requests, 0 if unknown.

    warm_total, warm_limit_s: requests of the warm-up and the time after which it sends no more, 0 without a limit.
    """

    title: str
    load: str
    measures: Measures
    goals: Sequence[Term]
    total: int
    span_s: float
    warm_total: int = 0
    warm_limit_s: float = 0.0
    elapsed_s: float = 0.0
    phase: str = WARM_UP
    statuses: Counter[str] = field(default_factory=Counter)
    warm: Counter[str] = field(default_factory=Counter)
    counters: dict[int, Counters] = field(default_factory=dict)
    histograms: dict[str, LiveHistogram] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    good: int = 0
    misses: int = 0
    underruns: int = 0
    spoken: int = 0
    server: dict[str, Any] = field(default_factory=dict)
    history: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    _second: list[float] = field(default_factory=list)
    _sent_before: int = 0

    def begin(self) -> None:
        """Forget the warm-up."""
        self.phase = MEASURED
        self._sent_before = self._sent

    @property
    def _sent(self) -> int:
        return sum(counter.sent for counter in self.counters.values())

    @property
    def sent(self) -> int:
        """Requests of this phase that were sent."""
        return self._sent - self._sent_before

    @property
    def done(self) -> int:
        """Requests of this phase that ended."""
        return sum((self.statuses if self.phase == MEASURED else self.warm).values())

    @property
    def in_flight(self) -> int:
        return sum(counter.in_flight for counter in self.counters.values())

    @property
    def errors(self) -> int:
        """Errors of this phase."""
        return sum((self.statuses if self.phase == MEASURED else self.warm)[name] for name in ERRORS)

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until this phase ends; None if unknown."""
        if self.phase == MEASURED and self.span_s:
            return max(0.0, self.span_s - self.elapsed_s)
        total = self.total if self.phase == MEASURED else self.warm_total
        if not self.done or not total:
            return None
        pace_s = self.elapsed_s / self.done
        left_s = pace_s * max(0, total - self.done)
        if self.phase == MEASURED or not self.warm_limit_s:
            return left_s
        # After the limit only requests in flight are awaited.
        return min(left_s, max(0.0, self.warm_limit_s - self.elapsed_s) + pace_s * self.in_flight)

    @property
    def main(self) -> str:
        """The metric with a history: the time to the first output."""
        return next((names[0] for names in SHOWN.values() if names[0] in self.histograms), "latency")

    def add(self, outcome: Outcome) -> None:
        """Count a request that ended."""
        self.statuses[outcome.status] += 1
        self.misses += outcome.status == "skipped"
        mine = samples_of(outcome, self.measures) if outcome.is_ok else {}
        for name, values in mine.items():
            histogram = self.histograms.setdefault(name, LiveHistogram())
            for value in values:
                histogram.add(value)
        self.misses += bool(mine.get("missed", (0,))[0])
        self.spoken += "underruns" in mine
        self.underruns += bool(mine.get("underruns", (0,))[0])
        self._second += mine.get(self.main, [])
        results = [(term.text, meets(outcome, mine, term)) for term in self.goals]
        for text, is_met in results:
            if is_met is not None:
                self.judged[text] += 1
                self.met[text] += is_met
        self.good += outcome.is_ok and all(is_met is not False for _, is_met in results)

    def second(self) -> None:
        """Close a second of the history."""
        if self._second:
            self.history.append(sorted(self._second)[len(self._second) // 2])
            self._second = []

    def facts(self) -> dict[str, Any]:
        """Return the progress for the deployment's recording, which `top` shows."""
        facts: dict[str, Any] = {
            "test": self.title,
            "load": self.load,
            "phase": self.phase,
            "elapsed_s": round(self.elapsed_s, 1),
            "sent": self.sent,
            "done": self.done,
            "in_flight": self.in_flight,
            "errors": self.errors,
        }
        facts |= {"total": self.total} if self.total else {}
        facts |= {"share": round(self.share, 4)} if self.share is not None else {}
        facts |= {"left_s": round(self.left_s, 1)} if self.left_s is not None else {}
        for name in dict.fromkeys([self.main, *(name for names in SHOWN.values() for name in names)]):
            if name in self.histograms:
                values = self.histograms[name]
                shares = {f"p{share}": _rounded(values.percentile(share)) for share in (50, 90, 99)}
                facts[name] = {**shares, "unit": BY_NAME[name].unit}
        if self.goals and self.elapsed_s:
            facts["goodput"] = round(self.good / self.elapsed_s, 3)
            facts["goals"] = {text: round(self.met[text] / max(1, self.judged[text]), 4) for text in self.judged}
        facts["history"] = [_rounded(value) for value in self.history]
        return facts

    @property
    def share(self) -> float | None:
        """The share of this phase that is over; None if unknown."""
        if self.phase != MEASURED:
            return min(1.0, self.done / self.warm_total) if self.warm_total else 0.0
        if self.span_s:
            return min(1.0, self.elapsed_s / self.span_s)
        return min(1.0, self.done / self.total) if self.total else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def sparks(values: Sequence[float], width: int) -> str:
    """Return a small history as block characters, newest last, from 0 to the maximum."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0) or 1.0
    return "".join(SPARKS[min(7, int(8 * value / top))] for value in shown)


def live_lines(state: LiveState, width: int) -> list[Text]:
    """Draw the state in `width` columns: two lines below 80, else up to five."""
    head = _head(state, width)
    if width < WIDE:
        return [_fit(head, width), _fit(_metric(state, state.main, sparked=0), width)]
    lines = [head, _metrics(state, width)]
    if state.goals:
        lines.append(_goals(state))
    if "chunk" in state.histograms:
        lines.append(_robots(state))
    if state.server:
        lines.append(_server(state))
    return [_fit(line, width) for line in lines]


def _fit(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line


def _head(state: LiveState, width: int) -> Text:
    line = Text(f" {state.title}", "bold")
    line.append(f"  {state.load}  ", "")
    share = state.share
    if share is not None and width >= WIDE:
        full = int(20 * share)
        line.append("█" * full, "cyan").append("░" * (20 - full), "dim").append(" ")
    if state.phase != MEASURED:
        line.append(warm_text(state), "yellow")
    elif state.span_s:
        line.append(f"{min(state.elapsed_s, state.span_s):.0f}/{state.span_s:.0f} s")
    elif share is not None:
        line.append(f"{100 * share:.0f} %")
    done = state.done
    if width >= WIDE:
        line.append(f"   sent {state.sent}  done {done}  in flight {state.in_flight}  ")
    else:
        line.append(f"  done {done}  ")
    line.append(f"err {state.errors}", "bold red" if state.errors else "")
    lag = state.histograms.get("lag")
    if lag is not None and width >= WIDE and state.measures.is_late:
        late = lag.percentile(99) or 0.0
        line.append(f"   lag p99 {late:.1f} ms", "yellow" if late > 5 else "dim")
    return line


def warm_text(state: LiveState) -> str:
    """Return the progress of the warm-up with an estimate of what is left: `warm-up 7/20, about 65 s left`."""
    counted = f"warm-up {state.done}/{state.warm_total}" if state.warm_total else "warm-up"
    if state.warm_limit_s and state.elapsed_s >= state.warm_limit_s:
        counted = f"{counted}, time is up: awaiting {state.in_flight} in flight"
    return counted if state.left_s is None else f"{counted}, about {state.left_s:.0f} s left"


def _metric(state: LiveState, name: str, sparked: int) -> Text:
    line = Text(f" {name.upper()} ", "bold")
    histogram = state.histograms.get(name)
    if sparked:
        line.append(f"{sparks(state.history, sparked)} ", "cyan")
    if histogram is None or not histogram.count:
        return line.append("-", "dim")
    unit = BY_NAME[name].unit
    middle, high = histogram.percentile(50) or 0.0, histogram.percentile(99) or 0.0
    return line.append(f"p50 {number(middle)}  p99 {number(high)}{f' {unit}' if unit else ''}")


def _metrics(state: LiveState, width: int) -> Text:
    names = [name for group in SHOWN.values() for name in group if name in state.histograms] or ["latency"]
    line = Text("  ")
    for place, name in enumerate(names):
        line.append_text(_metric(state, name, sparked=min(20, width // 8) if place == 0 else 0)).append("     ")
    if state.spoken:
        line.append(f"underruns {100 * state.underruns / state.spoken:.1f} %")
    return line


def _goals(state: LiveState) -> Text:
    done = max(1, sum(state.statuses.values()))
    rate = state.good / state.elapsed_s if state.elapsed_s else 0.0
    line = Text("   ").append("goodput ", "bold").append(f"{rate:.2f}/s ({100 * state.good / done:.1f} %)   ")
    for text, count in state.judged.items():
        share = state.met[text] / count
        colour = "green" if share >= 0.95 else "yellow" if share >= 0.8 else "red"
        line.append(f"{text} ").append("█" * round(12 * share), colour).append(f" {100 * share:.0f} %   ")
    return line


def _robots(state: LiveState) -> Text:
    chunks = state.histograms["chunk"]
    jitter = (chunks.percentile(99) or 0.0) - (chunks.percentile(50) or 0.0)
    done = max(1, sum(state.statuses.values()))
    return Text("   ").append(
        f"missed deadlines {state.misses} ({100 * state.misses / done:.1f} %)   jitter {number(jitter)} ms"
        f"   deadline {1e3 * state.measures.deadline_s:g} ms"
    )


def _server(state: LiveState) -> Text:
    server = state.server
    line = (
        Text("   ")
        .append("server ", "bold")
        .append(f"{server.get('running') or 0} run, {server.get('waiting') or 0} queued")
    )
    if server.get("pages_total"):
        line.append(f", pages {100 * (server.get('pages_used') or 0) / server['pages_total']:.0f} %")
    return line


def number(value: float) -> str:
    """Format a value with three digits: `0.35`, `5.2`, `214`, `1184`."""
    size = abs(value)
    return (
        f"{value:.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.3g}"
        if size >= 1
        else f"{value:.2f}"
    )
