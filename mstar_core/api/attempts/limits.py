"""Limits of resumption: which lost requests get no further attempt, and the error that they end with."""

from __future__ import annotations

from collections import Counter
from typing import Final

from mstar_core.api.attempts.record import AttemptRecord
from mstar_core.api.errors import PoisonRequest, lost
from mstar_core.errors import WorkerLost
from mstar_core.messages.names import process_rank

MOST_ATTEMPTS: Final = 3
MOST_DEATHS: Final = 1
"""Deaths of processes of one kind that a request may survive. One that met another of that kind may be their cause."""


def last_error(record: AttemptRecord) -> WorkerLost | None:
    """Return the error of a request whose latest attempt was lost, None if it may have another attempt."""
    ended = record.lost
    cause = ended[-1].cause
    if record.unresumable:
        return lost(cause, f"the request cannot be resumed: {record.unresumable}")
    if record.journal.is_full:
        return lost(cause, "the request cannot be resumed: it has drawn more ids than the journal holds")
    kind, deaths = Counter(process_kind(attempt.lost) for attempt in reversed(ended)).most_common(1)[0]
    if deaths > MOST_DEATHS:
        detail = "; ".join(f"{attempt.lost}: {attempt.cause}" for attempt in ended)
        return PoisonRequest(
            f"{cause}, and so did another {kind} with the same request, which may be the cause",
            detail,
            "do not send it again without changes",
        )
    if len(record.attempts) >= MOST_ATTEMPTS:
        return lost(cause, f"that was attempt {MOST_ATTEMPTS}, the last one")
    return None


def process_kind(name: str) -> str:
    """Return the kind of a process: workers and followers of all ranks are one kind."""
    return "worker" if process_rank(name) is not None else name
