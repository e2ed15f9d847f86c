"""What ends a child that stands still: no progress in a start, no steps in a run. Made and run by the supervisor."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mstar_core.supervisor.child import Child
from mstar_core.supervisor.events import Events
from mstar_core.supervisor.kinds import Pace
from mstar_core.supervisor.verdicts import hang, is_stalled


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchdog:
    """Owned by the supervisor, whose children it looks at; a killed child is restarted by whoever attends to it.

    stall_s, hang_s: seconds without progress, without a step. is_starting: whether a stall now fails the deployment.
    fail: takes the record of that failure.
    """

    children: Mapping[str, Child]
    events: Events
    pace: Pace
    stall_s: float
    hang_s: float
    is_starting: Callable[[], bool]
    fail: Callable[[dict[str, Any]], None]

    async def watch(self) -> NoReturn:
        """Look at every child for ever."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(self.pace.watch_s)
            now = time.monotonic()
            self._excuse(now - looked - self.pace.watch_s)
            for child in list(self.children.values()):  # a look may take a second, and children come and go
                if not child.is_running or child.ending:
                    continue
                if child.state == "ready":
                    await self._check_hang(child, now)
                elif is_stalled(child, now, self.stall_s):
                    await self._stalled(child)
            looked = time.monotonic()

    def _excuse(self, late_s: float) -> None:
        """Hold a time in which this process did not run against nobody.

        A pause of the container or of the machine stopped the children too; else what they said in it is still unread.
        """
        if late_s > self.pace.watch_s:
            for child in self.children.values():
                child.excuse(late_s)

    async def _check_hang(self, child: Child, now: float) -> None:
        why = hang(child, now, self.hang_s)
        if why is None:
            return
        self.events.add("child.hangs", child=child.name, why=why)
        await self._dump_and_kill(child)

    async def _stalled(self, child: Child) -> None:
        why = f"{child.name} made no progress in phase {child.phase} for {self.stall_s:g} s"
        self.events.add("child.stalled", child=child.name, phase=child.phase)
        await self._dump_and_kill(child, end=self.is_starting())
        if self.is_starting():
            last = child.log.tail[-1] if child.log.tail else ""
            self.fail({"name": child.name, "message": why, "detail": f"last log line: {last[:300]}", "code": "stalled",
                       "monotonic": time.monotonic(), "log": str(child.log.path)})  # fmt: skip

    async def _dump_and_kill(self, child: Child, *, end: bool = False) -> None:
        child.ending = end
        child.signal(signal.SIGUSR1)  # faulthandler writes every thread's stack to the child's log
        await asyncio.sleep(self.pace.stacks_s)
        child.signal(signal.SIGKILL)
