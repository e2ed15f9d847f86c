"""Tells the log of requests that wait long for slots or pages of a node: nobody else sees why nothing comes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from mstar_core.engine.base import Handle, NodeRunner, ReportsPages

log = logging.getLogger(__name__)

LONG_S: Final = 10.0
"""A wait for room that is told of."""


@dataclass(slots=True)
class _Wait:
    """One request's wait at one node, since a time and a count of steps. is_told: whether the log has it."""

    since: float
    steps: int
    is_told: bool = False


@dataclass(slots=True)
class Waits:
    """Owned by the worker's report. Waits by request and node."""

    _waits: dict[tuple[Handle, str], _Wait] = field(default_factory=dict)

    def look(self, now: float, runners: Mapping[str, NodeRunner], steps: int) -> None:
        """Note who waits now, and log once what has lasted long. steps: of all nodes, collected so far.

        A wait in which no step ran is a warning: whoever has the room does not go on either.
        """
        whys = {
            (handle, node): why
            for node, runner in runners.items()
            if isinstance(runner, ReportsPages)
            for handle, (_, why) in runner.pages_and_waits().items()
            if why
        }
        for ended in self._waits.keys() - whys.keys():
            self._end(ended, now)
        for key, why in whys.items():
            wait = self._waits.setdefault(key, _Wait(now, steps))
            if not wait.is_told and now - wait.since >= LONG_S:
                wait.is_told = True
                level = logging.INFO if steps > wait.steps else logging.WARNING
                log.log(level, "request %d %s for %.0f s%s", key[0], f"{why} of {_room(runners[key[1]])}",
                        now - wait.since, "" if steps > wait.steps else ", and no step ran meanwhile")  # fmt: skip

    def _end(self, key: tuple[Handle, str], now: float) -> None:
        wait = self._waits.pop(key)
        if wait.is_told:
            log.info("request %d no longer waits for room of %s, after %.1f s", *key, now - wait.since)


def _room(runner: NodeRunner) -> str:
    """`LLM (402 of 520 slots, 800 of 2,547 pages in use)`."""
    use = runner.memory()
    slots = f"{use.slots_used:,} of {use.slots_total:,} slots"
    return f"{runner.name} ({slots}, {use.pages_used:,} of {use.pages_total:,} pages in use)"
