"""Counts who still needs each value of a run, and frees it with the last one. Owned by WalkState, shared by its parts.

A value is brought in with one holder, the event that brings it; who keeps its name retains it until its release.
"""

from __future__ import annotations

from collections.abc import Iterable

from mstar_core.graph.runtime.action_queue import Agenda
from mstar_core.graph.runtime.actions import Free, Key, Ref
from mstar_core.graph.runtime.frames import Pending


class Values:
    """Values that the caller stores for one run. References other than keys are not counted."""

    __slots__ = ("_agenda", "_holders")

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._holders: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def bring_in(self, keys: Iterable[Key]) -> None:
        """Begin to count values that the caller has just stored."""
        for key in keys:
            self._holders[key] = 1

    def retain(self, ref: Ref | None) -> None:
        if isinstance(ref, Key):
            self._holders[ref] += 1

    def release(self, ref: Ref | Pending | None) -> None:
        if isinstance(ref, Key):
            self._holders[ref] -= 1
            if not self._holders[ref]:
                del self._holders[ref]
                self._agenda.act(Free(ref))

    def release_all(self, refs: Iterable[Ref | Pending | None]) -> None:
        for ref in refs:
            self.release(ref)

    def free_all(self) -> None:
        """Free everything at once, whoever holds it."""
        for key in self._holders:
            self._agenda.act(Free(key))
        self._holders.clear()
