"""Steps of loops that run together, counted once for all of them and added to a request when its times are read.

Loops that decode together usually do so for many steps. Owned by the tracer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from mstar_core.worker.state.request import LoopJob, SharedSteps

if TYPE_CHECKING:
    from mstar_core.engine.base import Handle
    from mstar_core.worker.state.request import Recorded, WorkerRequest

REPEATS: Final = 4
"""Latest steps among which a batch must occur again to be shared: one for each node of a rank that decodes."""


class SharedLoops:
    """Loops by the batch that they run in. keys: of the jobs of a batch, in the order of its steps."""

    def __init__(self) -> None:
        self._latest: deque[bytes] = deque(maxlen=REPEATS)
        self._steps: dict[bytes, SharedSteps] = {}
        self._loops: dict[Handle, list[LoopJob]] = {}

    def count(self, keys: bytes, duration_s: float, times: int) -> bool:
        """Count a step of a shared batch. Returns False if the batch is not shared: its caller counts the step.

        times: iterations of each loop.
        """
        steps = self._steps.get(keys)
        if steps is None:
            return False
        steps.count += times
        steps.busy_s += duration_s
        return True

    def note(self, keys: bytes, entries: Iterable[Recorded]) -> None:
        """Note a step that its caller has counted. A batch that occurs again is shared from its next step on."""
        if keys not in self._latest:
            self._latest.append(keys)
            return
        entries = list(entries)
        steps = SharedSteps(keys, jobs=len(entries))
        for entry in entries:
            if isinstance(entry, LoopJob):
                self.leave(entry)
                entry.total.shared, entry.total.shared_count, entry.total.shared_s = steps, 0, 0.0
                self._loops.setdefault(entry.request.handle, []).append(entry)
        self._steps[keys] = steps

    def leave(self, entry: LoopJob) -> None:
        """Settle the request of a loop that ends or joins another batch. Its batch is not shared any more."""
        self.settle(entry.request)
        if entry.total.shared is not None:
            self._steps.pop(entry.total.shared.keys, None)
            entry.total.shared = None
            loops = [loop for loop in self._loops.pop(entry.request.handle) if loop is not entry]
            if loops:
                self._loops[entry.request.handle] = loops

    def settle(self, request: WorkerRequest) -> None:
        """Add the shared steps of its loops to the times of a request, which are about to be read."""
        for entry in self._loops.get(request.handle, ()):
            total, steps = entry.total, entry.total.shared
            if steps is not None:
                spent_s = steps.busy_s - total.shared_s
                total.busy_s += spent_s
                total.device_s += spent_s / steps.jobs
                request.spent_s += spent_s
                total.count += steps.count - total.shared_count
                total.shared_count, total.shared_s = steps.count, steps.busy_s
