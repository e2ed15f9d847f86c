"""Comparison of runs: bootstrap intervals of differences, and a verdict for each metric. Pure functions.

Requests of one run share a queue, so whole runs are resampled. With fewer than three runs a side, blocks of 5 s are
resampled instead, which do not cover the noise between runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from mstarctl.bench.measure.load_metrics import BY_NAME, METRICS, Measures, Metric
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.statistics import CONFIDENCE, RESAMPLES, SEED, least_samples, name_of
from mstarctl.bench.measure.terms import Term
from mstarctl.bench.measure.window import MeasuredWindow, WindowTally, ended_in

if TYPE_CHECKING:
    Floats = np.ndarray[Any, np.dtype[np.float64]]

Verdict = Literal["better", "worse", "same", "unclear", "too few"]
BLOCK_S: Final = 5.0
LEAST_BLOCK_S: Final = 0.5
FEWEST_BLOCKS: Final = 8
FEWEST_RUNS: Final = 3
PERCENTILES: Final = (50.0, 90.0, 99.0)
THRESHOLD: Final = 0.05
MOST_RUNS: Final = 50
NORMAL: Final = 1.96
"""Quantile of the normal distribution for 95 %."""

SKIPPED: Final = frozenset({"lag", "service", "underruns", "stall", "continuity", "viability", "tokens"})
MOST_VALUES: Final = 20_000
"""Values of a block that are kept for resampling; more are thinned evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSamples:
    """One run prepared for comparison: values by metric and block, and counts by block. span_s: of its window.

    succeeded: successes by the block in which they ended; good: requests that met the goals by the block in which they
    were intended. Their sums over span_s are the throughput and the goodput of the run. cut: by metric, the age of the
    youngest request that was cut; its value, which is at least that, is among `values`.
    """

    values: Mapping[str, Sequence[Floats]]
    succeeded: Floats
    good: Floats
    span_s: float
    has_goals: bool
    cut: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One metric of two sides. low, high: interval of the relative difference, which is never below -1.

    difference, low, high: None if there is none: a share of 0, or too few blocks for an interval. runs_needed: for a
    clear verdict, 0 if that cannot be said.
    """

    name: str
    unit: str
    base: float
    changed: float
    difference: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    runs_needed: int = 0


def prepared(
    outcomes: Sequence[Outcome], window: MeasuredWindow, measures: Measures, goals: Sequence[Term]
) -> RunSamples:
    """Sort the values of a window into blocks of at most 5 s by intended time, by the rules of `summarised`."""
    block_s = max(LEAST_BLOCK_S, min(BLOCK_S, window.span_s / FEWEST_BLOCKS))
    count = max(1, math.ceil(window.span_s / block_s))
    tallies = [WindowTally() for _ in range(count)]
    succeeded = np.zeros(count)

    def block_of(at_s: float) -> int:
        return min(count - 1, int((at_s - window.start_s) / block_s))

    for outcome in outcomes:
        if ended_in(outcome, window):
            succeeded[block_of(outcome.end_s)] += 1
        if window.holds(outcome.due_s):
            tallies[block_of(outcome.due_s)].add(outcome, measures, goals)
    names = {name for tally in tallies for name in (*tally.samples, *tally.censored)}
    values = {
        name: [_thinned(np.array([*tally.samples.get(name, ()), *tally.censored.get(name, ())])) for tally in tallies]
        for name in names
        if name in BY_NAME and name not in SKIPPED
    }
    cut: dict[str, float] = {}
    for name, ages in (item for tally in tallies for item in tally.censored.items()):
        cut[name] = min(cut.get(name, math.inf), *ages)
    return RunSamples(
        values=values,
        succeeded=succeeded,
        good=np.array([float(tally.good) for tally in tallies]),
        span_s=window.span_s,
        has_goals=bool(goals),
        cut=cut,
    )


def _thinned(values: Floats) -> Floats:
    return values if len(values) <= MOST_VALUES else values[:: math.ceil(len(values) / MOST_VALUES)]


def compared(
    base: Sequence[RunSamples],
    changed: Sequence[RunSamples],
    *,
    thresholds: Mapping[str, float],
    default: float = THRESHOLD,
    is_paired: bool = False,
    resamples: int = RESAMPLES,
) -> list[Compared]:
    """Return a verdict for each percentile of each metric, throughput and goodput.

    is_paired: both sides have the same schedule, so the same blocks are drawn from both. Runs are never paired.
    """
    draws = _Draws(base, changed, is_paired=is_paired, resamples=resamples)
    rows = []
    for metric in METRICS:
        if metric.is_of_window or metric.name in SKIPPED or metric.name not in draws.names:
            continue
        for percentile in PERCENTILES:
            name = f"{name_of(percentile)}.{metric.name}"
            drawn = draws.percentile(metric.name, percentile)
            if drawn is not None:
                is_few = draws.count(metric.name) < least_samples(percentile)
                cut = tuple(value >= limit for value, limit in zip(drawn[:2], draws.cuts(metric.name), strict=True))
                limit = thresholds.get(name, default)
                rows.append(_row(name, metric, drawn, limit, draws, is_few=is_few, cut=cut))
    for name in ("throughput", "goodput"):
        if name == "goodput" and not all(run.has_goals for run in (*base, *changed)):
            continue
        drawn = draws.rate("succeeded" if name == "throughput" else "good")
        rows.append(_row(name, BY_NAME[name], drawn, thresholds.get(name, default), draws))
    return rows


Drawn = tuple[float, float, "Floats"]


class _Draws:
    """Resamples of two sides. Draws whole runs if both have at least three, else blocks."""

    def __init__(
        self, base: Sequence[RunSamples], changed: Sequence[RunSamples], *, is_paired: bool, resamples: int
    ) -> None:
        self._sides = (base, changed)
        self.has_runs = min(len(base), len(changed)) >= FEWEST_RUNS
        self.runs = min(len(base), len(changed))
        self.names = {name for run in base for name in run.values} & {name for run in changed for name in run.values}
        chance = np.random.default_rng(SEED)
        sizes = [len(side) if self.has_runs else sum(len(run.succeeded) for run in side) for side in self._sides]
        self.groups = min(sizes)
        first = chance.integers(0, sizes[0], (resamples, sizes[0]))
        is_alike = is_paired and not self.has_runs and sizes[0] == sizes[1]
        self._rows = (first, first if is_alike else chance.integers(0, sizes[1], (resamples, sizes[1])))

    def count(self, name: str) -> int:
        """Return the fewest samples of a metric on a side."""
        return min(sum(len(block) for run in side for block in run.values.get(name, ())) for side in self._sides)

    def percentile(self, name: str, percentile: float) -> Drawn | None:
        """Return a percentile of both sides and the relative differences of all resamples."""
        groups = [
            [np.concatenate(run.values[name]) for run in side if name in run.values]
            if self.has_runs
            else [block for run in side for block in run.values.get(name, ())]
            for side in self._sides
        ]
        if any(len(side) != self._rows[number].shape[1] for number, side in enumerate(groups)):
            return None
        whole = [np.sort(np.concatenate(side)) for side in groups]
        if not all(len(side) for side in whole):
            return None
        values = [_rank(side, percentile) for side in whole]
        percentiles = [_resampled(side, self._rows[number], percentile) for number, side in enumerate(groups)]
        return values[0], values[1], relative(percentiles[0], percentiles[1])

    def cuts(self, name: str) -> tuple[float, float]:
        """Return from which value on the requests of each side were cut; infinite if none was."""
        base, changed = (min((run.cut.get(name, math.inf) for run in side), default=math.inf) for side in self._sides)
        return base, changed

    def rate(self, field: str) -> Drawn:
        """Return requests per second of both sides and the relative differences of all resamples."""
        values, means = [], []
        for number, side in enumerate(self._sides):
            counts = [run.succeeded if field == "succeeded" else run.good for run in side]
            if self.has_runs:
                parts = np.array([block.sum() / run.span_s for block, run in zip(counts, side, strict=True)])
            else:
                parts = np.concatenate(
                    [block * (len(block) / run.span_s) for block, run in zip(counts, side, strict=True)]
                )
            values.append(float(parts.mean()))
            means.append(parts[self._rows[number]].mean(axis=1))
        return values[0], values[1], relative(means[0], means[1])


def relative(base: Floats, changed: Floats) -> Floats:
    """Return relative differences: 0 where both are 0, infinite where only the base is."""
    from_nothing = np.where(changed > 0, math.inf, 0.0)
    return np.where(base > 0, changed / np.where(base > 0, base, 1.0) - 1, from_nothing)


def _rank(ordered: Floats, percentile: float) -> float:
    return float(ordered[max(1, math.ceil(percentile / 100 * len(ordered) - 1e-9)) - 1])


def _resampled(groups: Sequence[Floats], rows: Any, percentile: float) -> Floats:
    """Return a percentile of each resample of groups, by weights over the sorted values of all groups."""
    values = np.concatenate(groups)
    owner = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    percentiles = np.empty(len(rows))
    for number, row in enumerate(rows):
        weights = np.bincount(row, minlength=len(groups))[owner]
        total = np.cumsum(weights)
        if not total[-1]:
            percentiles[number] = values[-1]
            continue
        percentiles[number] = values[np.searchsorted(total, max(1, math.ceil(percentile / 100 * total[-1] - 1e-9)))]
    return percentiles


def _row(
    name: str,
    metric: Metric,
    drawn: Drawn,
    threshold: float,
    draws: _Draws,
    *,
    is_few: bool = False,
    cut: tuple[bool, ...] = (False, False),
) -> Compared:
    """Return one row. cut: for each side, whether its value is a lower limit because requests were cut."""
    base, changed, differences = drawn
    difference = float(relative(np.array(base), np.array(changed)))
    low, high = interval(difference, differences, draws.groups)
    has_runs = draws.runs >= FEWEST_RUNS
    verdict: Verdict = (
        "too few"
        if is_few
        else verdict_of(low, high, threshold, is_better_high=metric.is_better_high, has_runs=has_runs)
    )
    # A value that is a lower limit is worse by an unknown amount, which can only confirm one of the verdicts.
    if (cut[0] and verdict in ("same", "worse")) or (cut[1] and verdict in ("same", "better")):
        verdict = "unclear"
    is_sayable = verdict == "unclear" and not any(cut) and min(base, changed) > 0
    needed = runs_needed(low, high, threshold, draws.runs) if is_sayable else 0
    return Compared(
        name=name,
        unit=metric.unit,
        base=base,
        changed=changed,
        difference=_finite(difference),
        low=_finite(low),
        high=_finite(high),
        verdict=verdict,
        runs_needed=needed,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def interval(difference: float, differences: Floats, groups: int) -> tuple[float, float]:
    """Return the interval of a relative difference from those of all resamples of so many groups.

    It contains the difference and no value below -1, because nothing falls by more than it was.
    """
    if not math.isfinite(difference) or groups < 2:
        return (0.0, 0.0) if difference == 0 and not np.any(differences) else (-1.0, math.inf)
    tail, wide = 100 * (1 - CONFIDENCE) / 2, few_groups(groups)
    ends = (float(np.percentile(differences, at, method="nearest")) for at in (tail, 100 - tail))
    low, high = (difference + wide * (end - difference) for end in ends)
    return max(-1.0, min(low, difference)), max(high, difference)


def few_groups(groups: int) -> float:
    """Return the factor by which a bootstrap interval of few groups is too narrow.

    The factor is Student's quantile over the normal one (Cornish-Fisher), with the bias of the bootstrap's variance.
    """
    if groups < 2:
        return math.inf
    v, z = groups - 1, NORMAL
    student = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    return student / z * math.sqrt(groups / v)


def verdict_of(low: float, high: float, threshold: float, *, is_better_high: bool, has_runs: bool = True) -> Verdict:
    """Return the verdict of an interval of relative differences.

    `same`: all of it is within the threshold. `better` or `worse`: it excludes zero, and its middle is beyond the
    threshold. Without repeated runs the noise between runs is unknown, so all of it must be beyond the threshold.
    `unclear` otherwise.
    """
    if -threshold <= low and high <= threshold:
        return "same"
    middle = (low + high) / 2
    is_beyond = abs(middle) > threshold if has_runs else min(abs(low), abs(high)) > threshold
    if (low > 0 or high < 0) and is_beyond:
        return "better" if (middle > 0) == is_better_high else "worse"
    return "unclear"


def runs_needed(low: float, high: float, threshold: float, runs: int) -> int:
    """Return about how many runs a side make the interval narrower than the threshold on both sides.

    0 if that is unknown, because the interval is cut off, or more than `MOST_RUNS`.
    """
    if low <= -1 or not math.isfinite(high):
        return 0
    half = (high - low) / 2
    needed = max(runs + 1, math.ceil(max(1, runs) * (half / threshold) ** 2))
    return needed if needed <= MOST_RUNS else 0
