"""Terms of goals and assertions: `p99.ttft<500ms, error_rate<1%, goodput>=3.8/s`. Parsed before the load starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.errors import UsageError, did_you_mean
from mstarctl.bench.measure.load_metrics import BY_NAME, Metric
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.statistics import PERCENTILES, least_samples, name_of

_TERM: Final = re.compile(
    r"^(?:(?P<which>p\d+(?:\.\d+)?|mean|min|max)\.)?(?P<name>[a-z][\w.\-]*?)\s*(?P<op><=|>=|<|>)\s*"
    r"(?P<value>-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-zA-Z%/]*)$"
)
_FACTORS: Final = {
    ("ms", "us"): 1e-3,
    ("ms", "ms"): 1.0,
    ("ms", "s"): 1e3,
    ("s", "ms"): 1e-3,
    ("s", "s"): 1.0,
    ("/s", "/s"): 1.0,
    ("Hz", "Hz"): 1.0,
    ("x", "x"): 1.0,
    ("tok/s", "tok/s"): 1.0,
    ("tok/s", "/s"): 1.0,
    ("B/s", "B/s"): 1.0,
}
_OPERATORS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_NODE: Final = re.compile(r"node\.[\w\-]+\.share$")
SERVER: Final = {
    "pages.max": Metric(name="pages.max", unit="", is_of_window=True, definition="most pages in use at the server")
}
"""Metrics of the server that assertions may name, besides node.NAME.share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term. which: `p99`, `mean`, or empty for a metric of the window or of one request. value: in its unit."""

    text: str
    metric: Metric
    which: str
    op: str
    value: float

    def holds(self, value: float) -> bool:
        """Return whether a value meets the term."""
        return _OPERATORS[self.op](value, self.value)


def parse_terms(text: str, option: str, *, is_goal: bool, known: Mapping[str, Metric] | None = None) -> list[Term]:
    """Parse terms joined by commas. Raises UsageError.

    is_goal: terms of one request, without percentiles. known: metrics in place of those of requests and servers.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    return [_term(part, option, is_goal=is_goal, known=known) for part in parts]


def _term(text: str, option: str, *, is_goal: bool, known: Mapping[str, Metric] | None) -> Term:
    parsed = _TERM.match(text)
    if parsed is None:
        raise UsageError(f"{option}: {text!r} is not a term", hint="write METRIC<VALUE, such as p99.ttft<500ms")
    name, which = parsed["name"], parsed["which"] or ""
    metrics = {**BY_NAME, **SERVER} if known is None else known
    metric = metrics.get(name)
    if metric is None and known is None and _NODE.match(name):
        metric = Metric(name=name, unit="", is_of_window=True, definition="share of the server's time")
    if metric is None or (is_goal and name in SERVER):
        raise UsageError(f"{option}: no metric {name!r}", hint=did_you_mean(name, metrics))
    if is_goal and (metric.is_of_window or which):
        raise UsageError(f"{option}: {text!r} is not about one request", hint="use --assert for it")
    if not is_goal and bool(which) == metric.is_of_window:
        hint = f"write {name} alone" if which else f"write p50.{name}, p99.{name} or mean.{name}"
        raise UsageError(f"{option}: {text!r} has no single value" if not which else f"{option}: {text!r}", hint=hint)
    if which.startswith("p") and which not in {name_of(p) for p in PERCENTILES}:
        raise UsageError(f"{option}: {which} is not computed", hint=f"use {', '.join(name_of(p) for p in PERCENTILES)}")
    value = float(parsed["value"]) * _factor(text, option, metric, parsed["unit"])
    return Term(text=text, metric=metric, which=which, op=parsed["op"], value=value)


def _factor(text: str, option: str, metric: Metric, unit: str) -> float:
    if not unit:
        return 1.0
    if unit == "%" and not metric.unit:
        return 0.01
    if (metric.unit, unit) not in _FACTORS:
        raise UsageError(
            f"{option}: {text!r} has unit {unit!r}", hint=f"{metric.name} is in {metric.unit or 'no unit'}"
        )
    return _FACTORS[metric.unit, unit]


def meets(outcome: Outcome, samples: Mapping[str, Sequence[float]], term: Term) -> bool | None:
    """Return whether one request meets a goal; None if its modalities do not have the metric.

    A metric that should exist and does not, fails. Of several values, the worst counts.
    """
    metric = term.metric
    if metric.kind and metric.kind not in outcome.requested:
        return None
    if not outcome.is_ok:
        return False
    values = samples.get(metric.name)
    if not values:
        return metric.name in ("itl", "tpot", "step") and None  # a single chunk has no gaps
    return term.holds(max(values) if term.op.startswith("<") else min(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Result of an assertion. found: the value; None if there is none."""

    text: str
    holds: bool
    found: float | None
    why: str = ""


def judge(term: Term, metrics: Mapping[str, Mapping[str, Any]], *, allows_few: bool) -> Judged:
    """Return whether an assertion holds for the metrics of a result."""
    facts = metrics.get(term.metric.name, {})
    value = facts.get(term.which or "value")
    if value is None:
        return Judged(text=term.text, holds=False, found=None, why="no such samples")
    if term.which in facts.get("over", ()) and term.op.startswith("<") and not term.holds(value):
        return Judged(text=term.text, holds=False, found=value, why="requests were cut")
    if term.which in facts.get("over", ()):
        return Judged(text=term.text, holds=False, found=value, why="the value is a lower limit: requests were cut")
    if term.which in facts.get("few", ()) and not allows_few:
        needed = least_samples(float(term.which[1:]))
        why = f"{facts['n']} samples, {term.which} needs {needed} (--allow-few)"
        return Judged(text=term.text, holds=False, found=value, why=why)
    return Judged(text=term.text, holds=term.holds(float(value)), found=float(value))
