"""Pace of a control loop, from its recent requests: rate and missed ticks. Pure functions.

The server does not know the rate of a client. A robot sends one request after the other, so the usual interval between
their starts is its period, and a request that takes longer than the period has missed the next tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from mstar_core.observe.frames import RequestStatus

LEAST: Final = 4
"""Requests from which a period can be read."""

STREAMED: Final = frozenset({"text", "audio", "image"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A control loop. hz: by handle, the rate at which a request followed the previous one. late: handles."""

    period_s: float | None = None
    hz: Mapping[int, float] = field(default_factory=dict)
    late: frozenset[int] = frozenset()

    @property
    def rate_hz(self) -> float | None:
        return None if not self.period_s else 1 / self.period_s


def pace(requests: Iterable[RequestStatus]) -> Pace:
    """Return the pace of requests that do not overlap. Overlapping ones have rates, and no period."""
    order = sorted((r for r in requests if r.started), key=lambda r: r.started)
    gaps = {after.handle: after.started - before.started for before, after in pairwise(order)}
    hz = {handle: 1 / gap for handle, gap in gaps.items() if gap > 0}
    overlaps = any(before.ended is None or before.ended > after.started for before, after in pairwise(order))
    if len(order) < LEAST or overlaps:
        return Pace(hz=hz)
    period = median(gaps.values())
    late = frozenset(r.handle for r in order if r.ended is not None and r.ended - r.started > period)
    return Pace(period_s=period, hz=hz, late=late)


def answers_at_once(kinds: frozenset[str]) -> bool:
    """Return whether outputs are complete values, such as actions, instead of streamed text or sound."""
    return bool(kinds) and not kinds & STREAMED
