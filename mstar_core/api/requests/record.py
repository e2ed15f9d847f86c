"""Record of one request over all its attempts: enough to send it again. Owned by `Attempts`, written by the link.

msgspec can encode and decode the whole record, so that another process can continue the request from it.
"""

from __future__ import annotations

from array import array
from typing import Final

import msgspec

from mstar_core.api.output.units import Delivered
from mstar_core.messages.flow import Drawn
from mstar_core.messages.requests import MoreInput, NewRequest, Resume, SavedLoop
from mstar_core.messages.tensors import InlineTensor

JOURNAL_BYTES: Final = 1 << 20
"""Most bytes of a journal: 262,144 ids."""

SAVED_BYTES: Final = 1 << 30
"""Most bytes of saved states of a request: those of nine runs with 100 MB each."""

INT32: Final = "i"


class Journal(msgspec.Struct, kw_only=True):
    """Ids that the loops of a request have drawn. Grows only, over all attempts.

    places: ids by loop (see `Drawn`), int32 in native byte order. is_full: the limit was exceeded; it has no ids then.
    """

    places: dict[str, bytearray] = {}
    is_full: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all ids."""
        return sum(map(len, self.places.values()))

    def add(self, drawn: Drawn, limit_bytes: int = JOURNAL_BYTES) -> None:
        """Append ids. Known ones are not changed, and ids behind a gap are dropped, because they cannot be forced."""
        ids = self.places.setdefault(drawn.place, bytearray())
        known = len(ids) // array(INT32).itemsize - drawn.start
        if self.is_full or not 0 <= known < len(drawn.ids):
            return
        ids += array(INT32, drawn.ids[known:]).tobytes()
        if self.size_bytes > limit_bytes:
            self.is_full = True
            self.places.clear()

    def ids(self) -> dict[str, list[int]]:
        """Return the ids by place."""
        return {place: array(INT32, bytes(ids)).tolist() for place, ids in self.places.items() if ids}


class SavedLoops(msgspec.Struct, kw_only=True):
    """Latest states of the loops of a request that save, with inline tensors.

    places: states by place (see `Saved`), the oldest first.
    """

    places: dict[str, SavedLoop] = {}

    def keep(self, place: str, state: SavedLoop, limit_bytes: int = SAVED_BYTES) -> None:
        """Replace the state of a place by a newer one. Beyond the limit the oldest places are dropped.

        Their loops begin anew. States from other hosts may come in another order than they were sent in.
        """
        known = self.places.get(place)
        if known is not None and known.iteration > state.iteration:
            return
        self.places.pop(place, None)
        self.places[place] = state
        while self.size_bytes > limit_bytes:
            del self.places[next(iter(self.places))]

    @property
    def size_bytes(self) -> int:
        """Bytes of all states."""
        values = (ref for state in self.places.values() for ref in state.values.values())
        return sum(len(ref.data) for ref in values if isinstance(ref, InlineTensor))


class Attempt(msgspec.Struct, kw_only=True):
    """One attempt. began: when it was sent to the conductor, monotonic.

    lost: name of the process whose death ended it, empty while it runs; lost_at: when that was noticed; cause: of that
    death, one sentence for clients; is_excused: no request can be the cause, see PeerDown. pause_s: seconds from the
    end of the attempt before it to its first new output, None before that output and for the first attempt.
    """

    handle: int
    began: float
    lost: str = ""
    lost_at: float = 0.0
    cause: str = ""
    is_excused: bool = False
    pause_s: float | None = None


class AttemptRecord(msgspec.Struct, kw_only=True):
    """A request over all its attempts.

    request: its message without `resume`; the tensors of its inputs stay lent until the request ends. deadline:
    monotonic time. delivered: what the client has or will get. unresumable: why no attempt can follow a lost one;
    empty if it can. attempts: the current one is the last; none while the request has not been sent yet.
    """

    request: NewRequest
    deadline: float
    delivered: Delivered
    journal: Journal = msgspec.field(default_factory=Journal)
    saved: SavedLoops = msgspec.field(default_factory=SavedLoops)
    unresumable: str = ""
    attempts: list[Attempt] = []

    @property
    def lost(self) -> list[Attempt]:
        """Attempts that a death has ended."""
        return [attempt for attempt in self.attempts if attempt.lost]

    def grow(self, more: MoreInput) -> None:
        """Add values to a growing input, for later attempts."""
        known = self.request.growing[more.name]
        known.values.extend(more.values)  # in place: a text of n pieces is not copied n times
        if more.is_over:
            ended = msgspec.structs.replace(known, is_over=True)
            self.request = msgspec.structs.replace(self.request, growing={**self.request.growing, more.name: ended})

    def message(self, handle: int, now: float) -> NewRequest:
        """Return the message of the next attempt."""
        left_s = max(0.001, self.deadline - now)
        delivered = self.delivered
        resume = Resume(
            attempt=len(self.attempts) + 1,
            ids=self.journal.ids(),
            delivered=dict(delivered.units),
            chunks={port: chunk for port, chunk in delivered.chunks.items() if chunk[0] > 0},
            saved=dict(self.saved.places),
        )
        return msgspec.structs.replace(self.request, handle=handle, deadline_s=left_s, resume=resume)
