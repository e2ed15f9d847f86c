"""Result of a soak: one JSON object, its verdict, and a short table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.serving.figures import at, median
from bench.soak.crowd import ENDED_EARLY, Crowd, Outcome
from bench.soak.killer import Killer
from bench.soak.watch import Watch

FINE: Final = ("whole", "refused", *ENDED_EARLY)
"""Outcomes that fail nothing. A request that comes while the only replica restarts may be refused."""


def result(crowds: Sequence[Crowd], killer: Killer, watch: Watch) -> dict[str, Any]:
    """Return the figures of a soak and the reasons for which it failed; none if it passed."""
    figures = {
        "deployments": {crowd.name: of_crowd(crowd) for crowd in crowds},
        "pauses_s": pauses(crowds, killer),
        "deaths": [{name: value for name, value in death.items() if name != "at_s"} for death in killer.deaths],
        "rolling_restarts": killer.restarts if killer.can_roll else "this version has no `restart --rolling`",
        "left_in_lulls": watch.left,
        "reconciled": watch.reconciled(),
        "slopes": watch.slopes(),
        "in_use": watch.in_use,
        "samples": watch.samples(),
    }
    return {"failures": list(failures(crowds, killer, figures)), **figures}


def of_crowd(crowd: Crowd) -> dict[str, Any]:
    """Return the figures of one deployment's requests."""
    flawed = [outcome for outcome in crowd.outcomes if outcome.flaws]
    return {
        "model": crowd.served.plan.model,
        "rate_per_s": round(crowd.rate, 3),
        "requests": len(crowd.outcomes),
        "outcomes": dict(crowd.counts()),
        "by_sample": dict(Counter(outcome.sample for outcome in crowd.outcomes)),
        "held_back": crowd.held_back,
        "causes": dict(Counter(outcome.cause for outcome in crowd.outcomes if outcome.cause)),
        "flawed": [{"sample": each.sample, "kind": each.kind, "flaws": each.flaws[:3]} for each in flawed[:20]],
    }


def pauses(crowds: Sequence[Crowd], killer: Killer) -> dict[str, Any]:
    """Return the longest pauses of whole answers by the kind of process that died meanwhile; `none` without a death."""
    found: dict[str, list[float]] = {}
    for crowd in crowds:
        deaths = [death for death in killer.deaths if death["deployment"] == crowd.name]
        for outcome in crowd.outcomes:
            if outcome.kind == "whole":
                kinds = [death["kind"] for death in deaths if outcome.sent_s <= death["at_s"] <= outcome.ended_s]
                found.setdefault(kinds[0] if kinds else "none", []).append(outcome.pause_s)
    return {kind: quantiles(sorted(values)) for kind, values in sorted(found.items())}


def quantiles(ordered: list[float]) -> dict[str, Any]:
    return {"n": len(ordered), "p50": round(median(ordered), 3), "p99": round(at(ordered, 0.99), 3)}


def failures(crowds: Sequence[Crowd], killer: Killer, figures: dict[str, Any]) -> Iterator[str]:
    """Yield why a soak has failed."""
    for crowd in crowds:
        for kind, count in crowd.counts().items():
            if kind not in FINE:
                causes = {outcome.cause for outcome in crowd.outcomes if outcome.kind == kind}
                yield f"{crowd.name}: {count} requests ended with: {kind} ({'; '.join(sorted(causes)[:3])})"
        yield from (f"{crowd.name}: {error}" for error in crowd.errors[:5])
        wrong = [outcome for outcome in crowd.outcomes if outcome.flaws]
        if wrong:
            yield f"{crowd.name}: {len(wrong)} answers differ from the undisturbed ones, such as {described(wrong[0])}"
    for death in killer.deaths:
        if death.get("back_s") is None:
            yield f"{death['deployment']}: {death['process']} did not come back"
    for restart in killer.restarts:
        if restart["exit"]:
            yield f"{restart['deployment']}: a rolling restart failed: {restart['message']}"
    for left in figures["left_in_lulls"]:
        yield f"{left['deployment']}: held without requests at minute {left['minute']}: {left['held']}"
    for name, count in figures["reconciled"].items():
        if count:
            yield f"{name}: reconciliation closed {count:g} requests"
    for line in figures["slopes"]:
        if line["verdict"] == "grows":
            yield f"{line['deployment']}: {line['quantity']} of {line['process']} grow by {line['per_minute']} a minute"


def described(outcome: Outcome) -> str:
    return f"{outcome.sample} ({outcome.kind}): {outcome.flaws[0]}"


def table(report: dict[str, Any]) -> str:
    """Return a short table of a result."""
    lines = [f"{'deployment':<14} {'requests':>8} {'req/s':>6}  outcomes"]
    for name, each in report["deployments"].items():
        outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(each["outcomes"].items()))
        lines.append(f"{name:<14} {each['requests']:>8} {each['rate_per_s']:>6.2f}  {outcomes}")
    lines.append(f"\n{'death of':<14} {'streams':>8} {'p50 s':>6} {'p99 s':>6}   longest pause of a whole answer")
    for kind, each in report["pauses_s"].items():
        lines.append(f"{kind:<14} {each['n']:>8} {each['p50']:>6.2f} {each['p99']:>6.2f}")
    kinds = Counter(death["kind"] for death in report["deaths"])
    lines.append(f"\ndeaths: {', '.join(f'{count} {kind}' for kind, count in kinds.items()) or 'none'}")
    rolled = report["rolling_restarts"]
    lines.append(f"rolling restarts: {rolled if isinstance(rolled, str) else len(rolled)}")
    lines.append(f"reconciled: {report['reconciled']}")
    verdicts = Counter(line["verdict"] for line in report["slopes"])
    lines.append(f"slopes: {', '.join(f'{count} {verdict}' for verdict, count in verdicts.items())}")
    lines += [f"FAILED {why}" for why in report["failures"]] or ["passed"]
    return "\n".join(lines)
