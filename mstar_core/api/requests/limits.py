"""Limits of resumption: which lost requests get no further attempt, and the error that they end with."""

from __future__ import annotations

from typing import Final

from mstar_core.api.errors import PoisonRequest, lost
from mstar_core.api.requests.record import AttemptRecord
from mstar_core.errors import WorkerLost
from mstar_core.messages.names import process_rank

MOST_ATTEMPTS: Final = 3
"""Attempts that deaths may end; those whose process was taken out of service or lost its host do not count."""

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
    if ended[-1].is_excused:
        return None
    deaths = [attempt for attempt in ended if not attempt.is_excused]
    kind = process_kind(ended[-1].lost)
    if sum(process_kind(attempt.lost) == kind for attempt in deaths) > MOST_DEATHS:
        return PoisonRequest(
            f"{cause}, and so did another {kind} with the same request, which may be the cause",
            "; ".join(f"{attempt.lost}: {attempt.cause}" for attempt in deaths),
            "do not send it again without changes",
        )
    if len(deaths) >= MOST_ATTEMPTS:
        return lost(cause, f"it is the death number {MOST_ATTEMPTS} for this request")
    return None


def process_kind(name: str) -> str:
    """Return the kind of a process: workers and followers of all ranks are one kind."""
    return "worker" if process_rank(name) is not None else name
