"""Incidents of a run: reasons of failed requests, outages that clients saw, states of the server. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mstarctl.bench.measure.outcome import Outcome
from mstarctl.bench.measure.window import MeasuredWindow
from mstarctl.output.units import counted

MOST_REASONS: Final = 8
LEAST_FAILURES: Final = 3
LEAST_OUTAGE_S: Final = 1.0
"""Failures in a row are an outage if they are so many, or last so long."""

READY: Final = "ready"
DIED: Final = "died"
STATE: Final = "deployment."
_REQUEST_ID: Final = re.compile(r"\bb-[0-9a-f]{8}-w?\d+")


def failures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the most frequent reasons of requests that did not succeed, each with the server's sentence."""
    counts = Counter(
        (o.status, _REQUEST_ID.sub("ID", o.flaw or o.detail)) for o in outcomes if not o.is_ok and o.status != "skipped"
    )
    return [{"status": status, "reason": reason, "n": n} for (status, reason), n in counts.most_common(MOST_REASONS)]


def outages(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the times in which the server refused or broke every request, as clients saw them.

    An outage lasts from the end of the first failed request to that of the next success. Refusals between successes
    are overload and no outage.
    """
    gaps: list[dict[str, Any]] = []
    failed: list[Outcome] = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.end_s):
        if outcome.is_ok:
            gaps += _outage(failed, outcome.end_s)
            failed = []
        elif _is_failed(outcome):
            failed.append(outcome)
    return gaps + _outage(failed, failed[-1].end_s if failed else 0.0)


def _is_failed(outcome: Outcome) -> bool:
    return outcome.status in ("refused", "transport", "stream") or outcome.http_status >= 500


def _outage(failed: Sequence[Outcome], until_s: float) -> list[dict[str, Any]]:
    begin_s = failed[0].end_s if failed else until_s
    if len(failed) < LEAST_FAILURES and until_s - begin_s < LEAST_OUTAGE_S:
        return []
    reason = failures(failed)[0]["reason"]
    return [{"from_s": round(begin_s, 3), "to_s": round(until_s, 3), "requests": len(failed), "reason": reason}]


def incidents(events: Sequence[Mapping[str, Any]], window: MeasuredWindow) -> list[dict[str, Any]]:
    """Return the states other than ready in which the server was during a window, and the deaths of its processes.

    events: `at_s` since the start of the phase, `type` and facts, in order; those before the window give its first
    state. The server's `to_s` is None if the state lasted beyond the window.
    """
    entries: list[dict[str, Any]] = []
    open_state: dict[str, Any] | None = None
    for event in (event for event in events if event["at_s"] < window.end_s):
        if event["type"] == "child.died" and event["at_s"] >= window.start_s:
            entries.append(
                {
                    "kind": DIED,
                    "child": str(event.get("child", "")),
                    "at_s": event["at_s"],
                    "why": str(event.get("cause") or ""),
                }
            )
        state = str(event["type"]).removeprefix(STATE)
        if state == event["type"] or state == "cut":
            continue
        if open_state is not None and state != open_state["state"]:
            open_state["to_s"] = event["at_s"]
            open_state = None
        if open_state is None and state != READY:
            open_state = {
                "kind": "state",
                "state": state,
                "from_s": event["at_s"],
                "to_s": None,
                "why": str(event.get("reason") or ""),
            }
            entries.append(open_state)
    return [
        entry for entry in entries if entry["kind"] == DIED or entry["to_s"] is None or entry["to_s"] > window.start_s
    ]


def incident_lines(facts: Mapping[str, Any]) -> list[str]:
    """Return the outages and incidents of a result as lines."""
    lines = []
    for entry in facts.get("incidents", ()):
        why = f": {entry['why']}" if entry["why"] else ""
        if entry["kind"] == DIED:
            lines.append(f"SERVER {entry['child']} died at {entry['at_s']:.1f} s{why}")
        else:
            until = "the end" if entry["to_s"] is None else f"{entry['to_s']:.1f} s"
            lines.append(f"SERVER {entry['state']} from {max(0.0, entry['from_s']):.1f} s to {until}{why}")
    for gap in facts.get("outages", ()):
        requests = counted(gap["requests"], "request")
        lines.append(
            f"OUTAGE from {gap['from_s']:.1f} s to {gap['to_s']:.1f} s: {requests} failed in a row ({gap['reason']})"
        )
    return lines
