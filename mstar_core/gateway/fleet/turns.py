"""Turns of models that take memory of devices: one at a time for each device, by arrival, with few exceptions.

A model that fits may pass one that waits for room, so that a small model does not wait until a large one has its room.
Each turn is passed a limited number of times, so that the large one is not kept waiting by small ones that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

MOST_PASSES: Final = 2
"""Turns that may pass one that came before them. Each may cost that one a sleep of the model that has passed."""


@dataclass(slots=True, eq=False, kw_only=True)
class MemoryTurn:
    """The wait of a model for devices, until it has taken their memory. model: its name.

    fits: whether its memory is free now. givers: models that have made room for it, which do not pass it: they would
    take that memory back. is_passing: it takes its memory before earlier ones. passes: how often it was passed.
    """

    model: str
    keys: frozenset[str]
    fits: Callable[[], bool]
    givers: set[str] = field(default_factory=set)
    is_passing: bool = False
    passes: int = 0


class MemoryTurns:
    """All turns by arrival. Owned by the fleet. Turns wait only for earlier ones, so that none wait for each other."""

    def __init__(self) -> None:
        self._turns: list[MemoryTurn] = []

    def enter(self, model: str, keys: Collection[str], fits: Callable[[], bool]) -> MemoryTurn:
        """Add a turn for these devices, behind all others."""
        turn = MemoryTurn(model=model, keys=frozenset(keys), fits=fits)
        self._turns.append(turn)
        return turn

    def leave(self, turn: MemoryTurn) -> None:
        """Remove a turn, whose model has its memory or has given up."""
        self._turns.remove(turn)

    def ahead(self, turn: MemoryTurn) -> list[MemoryTurn]:
        """Return the earlier turns that want a device of this one."""
        return [each for each in self._turns[: self._turns.index(turn)] if each.keys & turn.keys]

    def is_passed(self, turn: MemoryTurn) -> bool:
        """Return whether a later turn takes memory of its devices now."""
        return any(each.is_passing and each.keys & turn.keys for each in self._turns if each is not turn)

    def may_take(self, turn: MemoryTurn) -> bool:
        """Return whether it is a model's turn, or whether it passes the earlier ones."""
        ahead = self.ahead(turn)
        if not ahead or not turn.fits():
            turn.is_passing = False
            return not ahead
        if turn.is_passing:
            return True
        if self.is_passed(turn) or any(each.passes >= MOST_PASSES or turn.model in each.givers for each in ahead):
            return False
        if any(each.fits() for each in ahead if not self.ahead(each)):  # that one takes its memory now
            return False
        for each in ahead:
            each.passes += 1
        turn.is_passing = True
        return True
