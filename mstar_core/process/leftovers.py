"""Requests that a process still holds although their owner no longer knows them.

The api owns the requests of the conductor, and the conductor those of the workers. An owner sends its live requests
once a minute (`Reconcile`).
"""

from __future__ import annotations

from collections.abc import Iterable

from mstar_core.messages.requests import Reconcile


class Leftovers:
    """Finds requests whose end was lost. Owned by the main loop of a process. closed: number of those found.

    A message about a request may overtake the owner's, so a request has to be unknown in two messages in a row.
    """

    def __init__(self) -> None:
        self.closed = 0
        self._unknown: set[int] = set()

    def find(self, message: Reconcile, held: Iterable[int]) -> list[int]:
        """Return the handles to close, among those that this process holds, and count them."""
        live = frozenset(message.live)
        unknown = {handle for handle in held if handle <= message.newest and handle not in live}
        ended = sorted(unknown & self._unknown)
        self._unknown = unknown.difference(ended)
        self.closed += len(ended)
        return ended
