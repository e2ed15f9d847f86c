"""The phases of a start, put together over processes. For the supervisor's events and the admin socket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Started(Protocol):
    """What is read of a process: seconds of each phase of its start."""

    @property
    def phases_s(self) -> dict[str, float]: ...


def longest_phases(fetch_s: float, children: Iterable[Started]) -> dict[str, float]:
    """Seconds of each start-up phase: of the process that took longest in it. fetch_s: of finding the weights."""
    longest = {"fetch": fetch_s} if fetch_s else {}
    for child in children:
        for name, seconds in child.phases_s.items():
            longest[name] = max(longest.get(name, 0.0), seconds)
    return {name: round(seconds, 3) for name, seconds in longest.items()}
