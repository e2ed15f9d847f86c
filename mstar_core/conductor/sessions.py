"""Replicas that served the sessions of clients, so that their later requests go there. Owned by the router."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MOST_SESSIONS: Final = 8192
"""Most sessions that are remembered; the one that was idle for longest is forgotten."""

Use = tuple[str, str]
"""(walk, node)."""


@dataclass(slots=True)
class SessionRanks:
    """Leading ranks by use of a node, for each session. The session used last is at the end."""

    _ranks: OrderedDict[str, dict[Use, int]] = field(default_factory=OrderedDict)

    def of(self, session: str) -> Mapping[Use, int]:
        """Return where a session was served; empty for an unknown one, and for no session."""
        return self._ranks.get(session, {})

    def served(self, session: str, ranks: Mapping[Use, int]) -> None:
        """Note where a request of a session goes."""
        if not session:
            return
        self._ranks.setdefault(session, {}).update(ranks)
        self._ranks.move_to_end(session)
        if len(self._ranks) > MOST_SESSIONS:
            self._ranks.popitem(last=False)

    def forget(self, session: str) -> None:
        """Forget a session that has ended."""
        self._ranks.pop(session, None)

    def left(self, rank: int) -> None:
        """Forget a rank whose process has ended: it has nothing of any session any more."""
        for session, ranks in self._ranks.items():
            self._ranks[session] = {use: place for use, place in ranks.items() if place != rank}
