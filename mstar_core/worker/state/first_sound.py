"""Order of the work of a device until a listener hears the first sound of a request.

A step that is launched ahead runs before everything that follows from the results of the step in front of it. It also
slows down the kernels beside it. Until a request's first sound has left, its results go before further steps. Owned by
the executor, which notes the jobs; the worker's steps query it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mstar_core.engine.slack import Slack
from mstar_core.worker.state.request import LoopJob, MoveJob

if TYPE_CHECKING:
    from mstar_core.engine.base import JobKey
    from mstar_core.worker.state.playback import Playback
    from mstar_core.worker.state.request import Recorded, UnderWay

MOST_WAIT_S: Final = 0.05
"""Longest wait for one first piece of sound."""


@dataclass(slots=True)
class FirstSounds:
    """Jobs under way of requests whose listener has heard nothing yet.

    node: makes the sound; feeders: nodes that give its items. requests: returns the number of open requests. missing:
    returns the iterations of a loop until the first piece of sound can be made here, None if the loop does not give its
    items. slack: of the device. most_requests: open requests up to which steps wait; each wait costs every other stream
    its time, which a full device cannot spare. jobs: node and record of each job.
    """

    node: str
    feeders: Collection[str]
    playback: Playback
    requests: Callable[[], int]
    missing: Callable[[LoopJob], int | None]
    slack: Slack = field(default_factory=Slack)
    most_requests: int = 0
    jobs: dict[JobKey, tuple[str, Recorded]] = field(default_factory=dict)

    def submitted(self, key: JobKey, node: str, entry: UnderWay) -> None:
        """Note a job if it leads to a first sound that is listened to."""
        request = entry.request
        if not self.node or not request.is_heard or request.sound.dry_at is not None or isinstance(entry, MoveJob):
            return
        if self.node in request.homes and (not request.outputs or "audio" in request.outputs):
            self.jobs[key] = node, entry

    def ended(self, keys: Collection[JobKey]) -> None:
        """Forget jobs that have ended, or whose request is heard."""
        if self.jobs:
            for key in keys:
                self.jobs.pop(key, None)

    def is_due(self) -> bool:
        """Return whether such jobs go first now: none do while too many requests are open."""
        return bool(self.jobs) and self.requests() <= self.most_requests

    def keys(self, node: str) -> frozenset[JobKey]:
        """Return the jobs at a node, none while too many requests are open."""
        if not self.is_due():
            return frozenset()
        return frozenset([key for key, (name, _) in self.jobs.items() if name == node])

    def must_wait(self, node: str, carried: Sequence[Collection[JobKey]]) -> bool:
        """Return whether a node launches no step now. carried: jobs of each of its steps in flight.

        It waits while another node makes a first piece of sound. A node that gives its items also waits if a step in
        flight ends the prompt or gives the last of them. Nothing waits if a stream would run dry.
        """
        if not self.is_due() or self.slack.left_s() < self.playback.piece_s:
            return False
        now = self.playback.clock()
        for key, (name, entry) in self.jobs.items():
            if name == node:
                steps = sum([key in each for each in carried])
                waits = steps > 0 and node in self.feeders and self._decides(entry, steps)
            else:
                sound = entry.request.sound
                waits = name == self.node and sound.taken > 0 and now - sound.taken_at < MOST_WAIT_S
            if waits:
                self.slack.is_holding = True
                return True
        return False

    def _decides(self, entry: Recorded, steps: int) -> bool:
        """Return whether the next work of a request follows from so many steps in flight: its loop, or its sound."""
        if not isinstance(entry, LoopJob):
            run = entry.run
            return len(entry.request.queues.get(run.partition, ())) <= 1  # the loop of the items
        missing = self.missing(entry)
        return missing is not None and steps >= missing
