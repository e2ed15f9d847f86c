"""Incarnations of the other processes: decides whether a receiver accepts a message.

Every receiver uses it: api, conductor, workers and followers through `ChildLife`, and the supervisor.
"""

from __future__ import annotations

from typing import Final

from mstar_core.messages.flow import Outputs
from mstar_core.messages.wire import Envelope

LASTING: Final = (Outputs,)
"""Messages that stay valid after the death of their sender: results of requests, which are numbered.

Everything else is a command, a report or a loan, and has no effect without the process that sent it.
"""


class Peers:
    """The incarnations of each process that have ended. Owned by the main loop of a process.

    Messages of one process arrive in order, but the announcement of its death comes from another process and may arrive
    before or after its last messages.
    """

    def __init__(self) -> None:
        self._alive: dict[str, int] = {}  # lowest incarnation that may still live
        self._latest: dict[str, int] = {}  # highest one that has appeared

    def accepts(self, envelope: Envelope) -> bool:
        """Return whether the sender may still live, or the message stays valid after its death."""
        return not self.is_over(envelope.sender, envelope.incarnation) or isinstance(envelope.body, LASTING)

    def is_over(self, name: str, incarnation: int) -> bool:
        """Return whether an incarnation has ended."""
        return incarnation < self._alive.get(name, 0)

    def appeared(self, name: str, incarnation: int) -> int | None:
        """Note a living incarnation. Returns its predecessor if the death of that one was not announced yet.

        A process starts only after the end of its predecessor.
        """
        if incarnation <= (before := self._latest.get(name, -1)) or self.is_over(name, incarnation):
            return None
        is_news = before >= 0 and not self.is_over(name, before)
        self._latest[name] = self._alive[name] = incarnation
        return before if is_news else None

    def ended(self, name: str, incarnation: int) -> bool:
        """Note the death of an incarnation. Returns False if it was known."""
        if self.is_over(name, incarnation):
            return False
        self._alive[name] = incarnation + 1
        return True
