"""Health of children: readiness to serve, and the supervisor's watchdog, which kills children that stall or hang."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from mstar_core.config.deployment import Plan
from mstar_core.messages.names import CONDUCTOR, process_rank, rank_of
from mstar_core.supervisor.child import Child, Pace
from mstar_core.supervisor.events import Events
from mstar_core.ticks import sleep_to_tick

COMPUTES_S: Final = 0.1
"""CPU seconds of its main thread that show that a process computes. One that waits uses none."""

FETCH: Final = "fetch"
"""Phase in which weights are downloaded. Its detail is the repository and the file."""


def can_serve(plan: Plan, children: Iterable[Child]) -> bool:
    """Return whether requests can be served: the conductor and one replica of each placement are ready.

    The leader of a tensor-parallel group is ready once its followers have joined.
    """
    ready = {child.name for child in children if child.state == "ready"}
    ranks = {rank for name in ready if (rank := rank_of(name)) is not None}
    return CONDUCTOR in ready and all(
        any(replica[0] in ranks for replica in placement.replicas) for placement in plan.placements
    )


def hang(child: Child, now: float, limit_s: float, step_limit_s: float, *, computes: bool = False) -> str | None:
    """Return why a ready child counts as hanging, or None.

    A child that sends heartbeats must take steps while work is ready. One that sends none must compute: a step of a CPU
    rank runs on the thread that sends them. computes: whether it, or another member of its group, has used a CPU core
    within `limit_s`. step_limit_s: seconds after which that counts as an endless loop.
    """
    silent = now - child.last_beat
    if silent <= limit_s:
        return f"work is ready but no step ran for {child.stuck_s:.0f} s" if child.stuck_s > limit_s else None
    if not computes:
        return f"no sign of life for {silent:.0f} s"
    return f"one step computes for {silent:.0f} s" if silent > max(limit_s, step_limit_s) else None


def is_stalled(child: Child, now: float, limit_s: float) -> bool:
    """Return whether a start makes no progress: no new phase, and no more done in it. Its duration has no limit."""
    return now - max(child.last_progress, child.started) > limit_s


def network_stall(child: Child, limit_s: float) -> dict[str, str] | None:
    """Return message, detail and hint for a download that has stalled; None for another phase."""
    if child.phase != FETCH or not child.detail:
        return None
    amount = (
        f"{child.phase_done / 2**20:,.1f} of {child.phase_total / 2**20:,.1f} MiB" if child.phase_total else "nothing"
    )
    return {
        "message": f"the download of {child.detail} has stalled: no data from the network for {limit_s:g} s",
        "detail": f"{amount} arrived; the next start resumes",
        "hint": "check the connection and HTTPS_PROXY, then start again; or use --weights DIR",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchdog:
    """Kills children that stall during their start or hang afterwards. Owned by the supervisor, which restarts them.

    stall_s, hang_s: seconds without progress, without a sign of life or a step. step_limit_s: seconds of one
    computation. is_cpu_rank: whether a rank computes on the CPU. is_starting: whether a stall now fails the deployment.
    fail: called with the record of that failure. group_of: the tensor-parallel group of a child, empty without one.
    """

    children: Mapping[str, Child]
    events: Events
    pace: Pace
    stall_s: float
    hang_s: float
    step_limit_s: float
    is_cpu_rank: Callable[[int | None], bool]
    is_starting: Callable[[], bool]
    fail: Callable[[dict[str, Any]], None]
    group_of: Callable[[Child], Sequence[Child]] = lambda child: ()

    async def watch(self) -> NoReturn:
        """Check all children forever."""
        checked = time.monotonic()
        while True:
            await sleep_to_tick(self.pace.watch_s)
            now = time.monotonic()
            self._extend_deadlines(now - checked - self.pace.watch_s)
            self._note_computing(now)
            for child in list(self.children.values()):  # a check may take a second, and children come and go
                if not child.is_running or child.ending:
                    continue
                if child.state == "ready":
                    await self._check_hang(child, now)
                elif is_stalled(child, now, self.stall_s):
                    await self._end_stalled(child)
            checked = time.monotonic()

    def _extend_deadlines(self, late_s: float) -> None:
        """Exclude time in which this process did not run.

        A pause of the container or host stops the children too; otherwise their messages of that time are unread.
        """
        if late_s > self.pace.watch_s:
            for child in self.children.values():
                child.extend_deadlines(late_s)

    def _note_computing(self, now: float) -> None:
        """Note which workers and followers of CPU ranks have used a CPU core.

        Api and conductor have no long steps: while one computes, no other request goes on. The thread of a GPU rank
        also uses a core while it waits in the driver for a device that hangs.
        """
        for child in self.children.values():
            if child.state != "ready" or not self.is_cpu_rank(process_rank(child.name)):
                continue
            used_s = child.process.computed_s() if child.process is not None else None
            if used_s is not None and used_s - child.computed_s >= COMPUTES_S:
                child.computed_s, child.last_computed = used_s, now

    def _note_long_step(self, child: Child, now: float) -> None:
        """Report a step that takes longer than the limit for a hang, once."""
        silent = now - child.last_beat
        if silent <= self.hang_s:
            child.has_long_step = False
        elif not child.has_long_step:
            child.has_long_step = True
            self.events.add("child.long_step", child=child.name, so_far_s=round(silent, 1), limit_s=self.step_limit_s)

    async def _check_hang(self, child: Child, now: float) -> None:
        group = [member for member in self.group_of(child) if member.is_running]
        computes = any(now - member.last_computed <= self.hang_s for member in (child, *group))
        why = hang(child, now, self.hang_s, self.step_limit_s, computes=computes)
        if why is None:
            self._note_long_step(child, now)
            return
        culprit = next((member for member in (child, *group) if member.is_suspended), child)
        if culprit is not child:
            why = f"its process is suspended, and {child.name} waits for it: {why}"
        culprit.hung = why
        self.events.add("child.hangs", child=culprit.name, why=why)
        for member in group:  # one that waits in a collective shows in its log which one
            if member is not culprit:
                member.signal(signal.SIGUSR1)
        await self._dump_and_kill(culprit)

    async def _end_stalled(self, child: Child) -> None:
        why = f"{child.name} made no progress in phase {child.phase} for {self.stall_s:g} s"
        child.hung = why
        last = next((line for line in reversed(child.log.tail) if line.strip()), "")  # the stacks follow
        words = f"last log line: {last[:300]}" if last else "it has written nothing to its log"
        self.events.add("child.stalled", child=child.name, phase=child.phase)
        await self._dump_and_kill(child, end=self.is_starting())
        if self.is_starting():
            facts = network_stall(child, self.stall_s) or {"message": why, "detail": words}
            self.fail(
                {
                    "name": child.name,
                    **facts,
                    "code": "stalled",
                    "phase": child.phase,
                    "monotonic": time.monotonic(),
                    "time": time.time(),
                    "log": str(child.log.path),
                }
            )

    async def _dump_and_kill(self, child: Child, *, end: bool = False) -> None:
        child.ending = end
        child.signal(signal.SIGUSR1)  # faulthandler writes every thread's stack to the child's log
        await asyncio.sleep(self.pace.stacks_s)
        child.signal(signal.SIGKILL)
