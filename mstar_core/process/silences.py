"""Silence of peers of other hosts: a connection may die, or never exist, without an error at either end."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

SILENT_S: Final = 15.0
"""Silence of a peer that counts as a dead connection: two marks of an idle link, and the time to connect again."""


class Silence(NamedTuple):
    """A peer from which nothing came. seconds: in which this process ran."""

    name: str
    incarnation: int
    seconds: float


class Silences:
    """Silences of all peers of other hosts. Owned by the life of a process."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, int], float] = {}

    def expect(self, name: str, incarnation: int) -> None:
        """Expect messages or marks of a peer from now on, and of no earlier incarnation."""
        self.forget(name, incarnation)
        self._seconds[name, incarnation] = 0.0

    def forget(self, name: str, incarnation: int) -> None:
        """Expect nothing of a peer that has ended, or of earlier incarnations."""
        for key in [key for key in self._seconds if key[0] == name and key[1] <= incarnation]:
            del self._seconds[key]

    def add(self, seconds: float, heard: Collection[tuple[str, int]]) -> Iterator[Silence]:
        """Add a time that has passed. heard: peers from which something came in it.

        Yields each peer whose silence is too long, once per `SILENT_S`.
        """
        for key, before in self._seconds.items():
            silent_s = self._seconds[key] = 0.0 if key in heard else before + seconds
            if int(silent_s / SILENT_S) > int(before / SILENT_S):
                yield Silence(*key, silent_s)
