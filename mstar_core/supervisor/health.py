"""Judgements on children and their deaths: pure functions over what the supervisor has seen."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mstar_core.config.deployment import Plan
from mstar_core.errors import ExitCode
from mstar_core.messages.names import CONDUCTOR, rank_of
from mstar_core.supervisor.child import Child
from mstar_core.supervisor.events import Events
from mstar_core.supervisor.kinds import Pace


def hang(child: Child, now: float, limit_s: float) -> str | None:
    """Why a child that is ready counts as hanging, or None. Only workers take steps."""
    silent = now - child.last_beat
    stuck = now - child.last_step_change if rank_of(child.name) is not None else 0.0
    if silent > limit_s:
        return f"no sign of life for {silent:.0f} s"
    return f"work is ready but no step ran for {stuck:.0f} s" if stuck > limit_s else None


def is_stalled(child: Child, now: float, limit_s: float) -> bool:
    """Whether a start stands still: no new phase, and nothing more done in it. How long it takes does not matter."""
    return now - max(child.last_progress, child.started) > limit_s


def can_serve(plan: Plan, children: Iterable[Child]) -> bool:
    """Whether a request could be taken: a conductor, and for each placement a replica whose ranks are all ready."""
    ready = {child.name for child in children if child.state == "ready"}
    ranks = {rank for name in ready if (rank := rank_of(name)) is not None}
    return CONDUCTOR in ready and all(
        any(ranks.issuperset(replica) for replica in placement.replicas) for placement in plan.placements
    )


def in_flight(values: Mapping[str, float]) -> int:
    """Requests that the conductor works for, as it told last."""
    return int(values.get("conductor.in_flight", 0))


def exit_code_of(record: dict[str, Any]) -> ExitCode:
    """The exit code of a start that failed of this: a stall, a wrong input, anything else."""
    if record.get("code") == "stalled":
        return ExitCode.TIMED_OUT
    return ExitCode.INVALID if record.get("status") == ExitCode.INVALID else ExitCode.START_FAILED


def cause_sentence(record: dict[str, Any]) -> str:
    """A death in one sentence."""
    detail = record.get("detail") or ""
    return f"{record.get('message', 'a process died')}{f' ({detail})' if detail else ''}"


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
            self._extend_deadlines(now - looked - self.pace.watch_s)
            for child in list(self.children.values()):  # a look may take a second, and children come and go
                if not child.is_running or child.ending:
                    continue
                if child.state == "ready":
                    await self._check_hang(child, now)
                elif is_stalled(child, now, self.stall_s):
                    await self._stalled(child)
            looked = time.monotonic()

    def _extend_deadlines(self, late_s: float) -> None:
        """Hold a time in which this process did not run against nobody.

        A pause of the container or of the machine stopped the children too; else what they said in it is still unread.
        """
        if late_s > self.pace.watch_s:
            for child in self.children.values():
                child.extend_deadlines(late_s)

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
