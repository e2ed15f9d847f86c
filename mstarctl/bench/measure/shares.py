"""Shares of request time by part: the server's spans joined with what clients saw, by request id. Pure functions.

Durations are joined, not clocks: the client's service time minus the server's total is network and client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.observe.parts import parts
from mstarctl.bench.measure.outcome import Outcome

OUTSIDE: Final = "network and client"
LEAST_MS: Final = 1e-3
Shares = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Requests with the server's summaries. by_id: milliseconds by part of each. missing: requests without one."""

    by_id: Mapping[str, Shares]
    missing: int


def joined(outcomes: Sequence[Outcome], spans: Iterable[Mapping[str, Any]]) -> Joined:
    """Join successes with their summaries. A later summary of an id replaces an earlier one."""
    known = {str(span["request"]["id"]): span for span in spans}
    successes = [outcome for outcome in outcomes if outcome.is_ok]
    spans_by_id = {
        outcome.id: stages(known[outcome.id], 1e3 * (outcome.end_s - outcome.sent_s))
        for outcome in successes
        if outcome.id in known
    }
    return Joined(by_id=spans_by_id, missing=len(successes) - len(spans_by_id))


def stages(span: Mapping[str, Any], service_ms: float) -> Shares:
    """Return the parts of one request's time in milliseconds, which add up to its service time.

    The server's parts are those of `trace`. The time that only the client saw is `network and client`. Results of
    earlier versions have sums only, from which the parts are computed.
    """
    shares: Shares = {}
    for name, ms in _parts(span, service_ms):
        shares[name] = shares.get(name, 0.0) + ms
    shares[OUTSIDE] = max(0.0, service_ms - sum(shares.values()))
    return {name: value for name, value in shares.items() if abs(value) >= LEAST_MS}


def _parts(span: Mapping[str, Any], service_ms: float) -> list[tuple[str, float]]:
    if "parts" in span:
        return [(str(part["name"]), float(part["ms"])) for part in span["parts"]]
    return [(part.name, part.ms) for part in parts(span["sums"], min(service_ms, _total_ms(span)))]


def _total_ms(span: Mapping[str, Any]) -> float:
    request = span["request"]
    started, ended = request.get("started"), request.get("ended")
    if started is not None and ended is not None:
        return 1e3 * (float(ended) - float(started))
    return max((float(part["end_ms"]) for part in span["sums"]), default=0.0)


def shares(rows: Sequence[Shares]) -> Shares:
    """Return the share of each part in the time of all rows, largest first; they add up to 1."""
    total: Shares = {}
    for row in rows:
        for name, value in row.items():
            total[name] = total.get(name, 0.0) + value
    whole = sum(total.values())
    return dict(sorted(((name, value / whole) for name, value in total.items()), key=lambda i: -i[1])) if whole else {}


def slow_and_usual(outcomes: Sequence[Outcome], by_id: Mapping[str, Shares], is_late: bool) -> tuple[Shares, Shares]:
    """Return the shares around the median and those of the slowest 1 % (at least one request) by latency."""
    known = [outcome for outcome in outcomes if outcome.id in by_id]
    known.sort(key=lambda outcome: outcome.end_s - (outcome.due_s if is_late else outcome.sent_s))
    if not known:
        return {}, {}
    few = max(1, len(known) // 100)
    middle, around = len(known) // 2, max(1, len(known) // 20)
    usual = known[max(0, middle - around) : middle + around]
    return shares([by_id[o.id] for o in usual]), shares([by_id[o.id] for o in known[-few:]])
