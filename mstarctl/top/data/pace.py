"""Pace of control loops: the rate of requests, and the ticks that their clients missed. Pure functions.

Only the client knows the period of its loop, so ticks are counted only for requests that name one (`period_ms`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from mstar_core.observe.frames import RequestStatus

STREAMED: Final = frozenset({"text", "audio", "image"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Control loops. hz: by handle, the rate at which a request followed the previous one.

    late, skipped: ticks with a late or failed answer, and without a request. ticks: all of them, 0 if no client names
    its period.
    """

    hz: Mapping[int, float] = field(default_factory=dict)
    late: int = 0
    skipped: int = 0
    ticks: int = 0

    @property
    def missed(self) -> int:
        return self.late + self.skipped


def pace(requests: Iterable[RequestStatus], t: float) -> Pace:
    """Return the pace of requests at time `t`.

    A client that counts its skipped ticks is believed. The ticks that pass during a request count as skipped if no
    request of the same loop has reported them.
    """
    order = sorted((r for r in requests if r.started), key=lambda r: r.started)
    gaps = {after.handle: after.started - before.started for before, after in pairwise(order)}
    hz = {handle: 1 / gap for handle, gap in gaps.items() if gap > 0}
    timed = [r for r in order if r.period_ms is not None and (r.has_ended or r.is_late(t))]
    reports = [r for r in order if r.skipped_ticks is not None]
    skipped = sum(r.skipped_ticks or 0 for r in timed)
    skipped += sum(r.passed_ticks(t) for r in timed if not _is_followed(r, reports, t))
    late = sum(r.is_late(t) for r in timed)
    return Pace(hz=hz, late=late, skipped=skipped, ticks=len(timed) + skipped)


def _is_followed(r: RequestStatus, reports: Sequence[RequestStatus], t: float) -> bool:
    """Return whether a later request has reported the ticks that passed during this one.

    A request long after it that skipped nothing is the first one of another loop.
    """
    if r.skipped_ticks is None or r.period_ms is None or r.ended is None:
        return False
    at = bisect_left(reports, r.ended, key=lambda report: report.started)
    if at == len(reports):
        return False
    in_loop_s = (r.passed_ticks(t) + 2) * r.period_ms / 1000
    return bool(reports[at].skipped_ticks) or reports[at].started - r.started < in_loop_s


def answers_at_once(kinds: frozenset[str]) -> bool:
    """Return whether outputs are complete values, such as actions, instead of streamed text or sound."""
    return bool(kinds) and not kinds & STREAMED
