"""A result computed again from its raw data, and lists of its requests by status and by latency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mstarctl.bench.measure.incidents import failures, incidents, outages
from mstarctl.bench.measure.load_metrics import t0_of
from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.shares import joined, slow_and_usual
from mstarctl.bench.measure.window import summarised
from mstarctl.bench.result import ResultFolder
from mstarctl.bench.show.live import number


def again(opened: ResultFolder, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the facts of a result with figures computed from its requests and spans."""
    facts = dict(opened.facts)
    facts |= summarised(outcomes, opened.window, opened.measures, opened.goals)
    facts |= {
        "failures": failures(outcomes),
        "outages": outages(outcomes),
        "incidents": incidents(facts.get("server_events", ()), opened.window),
    }
    mine = [outcome for outcome in outcomes if opened.window.holds(outcome.due_s)]
    spans = joined(mine, opened.spans())
    if spans.by_id:
        usual, slow = slow_and_usual(mine, spans.by_id, opened.measures.is_late)
        facts["shares"] = {"usual": usual, "slow": slow, "missing": spans.missing, "joined": len(spans.by_id)}
    return facts


def by_status(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the number of requests by status, with the most frequent reasons of each."""
    reasons = failures(outcomes)
    lines = []
    for status, count in Counter(outcome.status for outcome in outcomes).most_common():
        lines.append(f"{status:<12} {count:6d}")
        lines += [
            f"{'':<12} {reason['n']:6d}x {reason['reason']}"
            for reason in reasons
            if reason["status"] == status and reason["reason"]
        ]
    return lines


def slowest_lines(opened: ResultFolder, outcomes: Sequence[Outcome], count: int) -> list[str]:
    """Return the slowest requests with where their time went."""
    known = joined(outcomes, opened.spans()).by_id
    ended = [outcome for outcome in outcomes if outcome.is_ok]
    ended.sort(key=lambda outcome: t0_of(outcome, opened.measures) - outcome.end_s)
    lines = []
    for outcome in ended[:count]:
        stages = sorted(known.get(outcome.id, {}).items(), key=lambda item: -item[1])[:4]
        where = "  ".join(f"{name} {number(value)}" for name, value in stages)
        latency = 1e3 * (outcome.end_s - t0_of(outcome, opened.measures))
        lines.append(f"{outcome.id}  at {outcome.due_s:.2f} s  {number(latency)} ms   {where}".rstrip())
    return lines
