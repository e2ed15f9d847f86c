"""Watchdog: a silent child is killed, unless the supervisor was stopped at the same time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from mstar_core.host.readings.processes import main_thread_s
from mstar_core.process.spawn import LocalProcess
from mstar_core.supervisor.child import Child, ChildKind, Pace
from mstar_core.supervisor.events import Events
from mstar_core.supervisor.health import Watchdog, hang

LIMIT_S = 60.0
HANG_S = 0.5
PACE = Pace(watch_s=0.02, stacks_s=0.0)


class StillChild(Child):
    """A child without a process, silent from its start. asked: signals sent to it; killed: set by SIGKILL."""

    asked: list[signal.Signals]
    killed: asyncio.Event

    @property
    def is_running(self) -> bool:
        return True

    def signal(self, number: signal.Signals) -> None:
        self.asked.append(number)
        if number == signal.SIGKILL:
            self.killed.set()


def still(state: str) -> StillChild:
    child = StillChild(ChildKind(name="api", module="none"), SimpleNamespace(tail=[], path="none"), state=state)  # type: ignore[arg-type]
    child.asked, child.killed = [], asyncio.Event()
    child.started = child.last_progress = child.last_beat = child.last_step_change = time.monotonic()
    return child


async def blamed(
    child: StillChild, stopped_s: float, group: Sequence[StillChild] = ()
) -> tuple[float, list[dict[str, Any]]]:
    """Stop the loop for `stopped_s`, then watch until the child is killed. Returns the duration and the events."""
    events = Events(None)
    watchdog = Watchdog(
        children={child.name: child},
        events=events,
        pace=PACE,
        stall_s=HANG_S,
        hang_s=HANG_S,
        step_limit_s=HANG_S,
        is_cpu_rank=lambda rank: False,
        is_starting=lambda: False,
        fail=lambda record: None,
        group_of=lambda _: group,
    )
    began = time.monotonic()
    task = asyncio.create_task(watchdog.watch())
    await asyncio.sleep(0)  # the watchdog waits for its first check
    time.sleep(stopped_s)  # noqa: ASYNC251 -- stops the loop
    await asyncio.wait_for((group[-1] if group else child).killed.wait(), LIMIT_S)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return time.monotonic() - began, list(events.ring)


async def test_a_silent_child_is_killed_with_its_stacks_written() -> None:
    child = still("ready")
    took_s, events = await blamed(child, 0.0)
    assert took_s >= HANG_S and child.asked[:2] == [signal.SIGUSR1, signal.SIGKILL]
    assert events[0]["type"] == "child.hangs" and "no sign of life" in events[0]["why"]


async def test_time_in_which_the_supervisor_did_not_run_is_excluded() -> None:
    for state in ("ready", "spawned"):
        took_s, _ = await blamed(still(state), 3 * HANG_S)
        assert took_s >= 4 * HANG_S - 2 * PACE.watch_s, "what came before it woke up was counted as silence"


async def test_a_suspended_member_of_a_group_is_killed_and_the_others_write_their_stacks() -> None:
    leader, follower = still("ready"), still("ready")
    process = await asyncio.create_subprocess_exec("sleep", "600")
    process.send_signal(signal.SIGSTOP)
    follower.process = LocalProcess(process, asyncio.Event())
    try:
        _, events = await blamed(leader, 0.0, [leader, follower])
    finally:
        process.kill()
        await process.wait()
    assert leader.asked == [signal.SIGUSR1] and follower.asked == [signal.SIGUSR1, signal.SIGKILL]
    assert "its process is suspended, and api waits for it: no sign of life" in events[0]["why"]
    assert follower.hung == events[0]["why"] and not leader.hung


@pytest.mark.parametrize(
    ("silent_s", "stuck_s", "computes", "why"),
    [
        (9.0, 0.0, False, None),
        (11.0, 0.0, False, "no sign of life for 11 s"),
        (299.0, 0.0, True, None),
        (301.0, 0.0, True, "one step computes for 301 s"),
        (1.0, 11.0, True, "work is ready but no step ran for 11 s"),
        (1.0, 9.0, False, None),
    ],
)
def test_a_process_hangs_by_what_it_sends_and_whether_it_computes(
    silent_s: float, stuck_s: float, computes: bool, why: str | None
) -> None:
    child = still("ready")
    child.last_beat, child.stuck_s = 1000.0 - silent_s, stuck_s
    assert hang(child, 1000.0, 10.0, 300.0, computes=computes) == why
    assert hang(child, 1000.0, 10.0, 1.0, computes=True) in (why, f"one step computes for {silent_s:.0f} s"), (
        "the limit of a step is at least that of a hang"
    )


class Computing:
    """A process whose CPU seconds grow by `rate` with each reading."""

    def __init__(self, rate: float) -> None:
        self.rate, self.used = rate, 0.0

    def computed_s(self) -> float:
        self.used += self.rate
        return self.used

    def is_suspended(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("rate", "name"), [(0.05, "worker-0"), (0.05, "follower-0"), (0.0, "worker-0"), (0.05, "api"), (0.05, "worker-1")]
)
async def test_a_worker_that_computes_is_left_alone_and_others_are_not(rate: float, name: str) -> None:
    child, events = still("ready"), Events(None)
    child.kind = ChildKind(name=name, module="none")
    child.process = Computing(rate)  # type: ignore[assignment]
    watchdog = Watchdog(
        children={name: child},
        events=events,
        pace=PACE,
        stall_s=HANG_S,
        hang_s=HANG_S,
        step_limit_s=1e9,
        is_cpu_rank=lambda rank: rank == 0,
        is_starting=lambda: False,
        fail=lambda record: None,
    )
    task = asyncio.create_task(watchdog.watch())
    async with asyncio.timeout(LIMIT_S):
        while not events.ring:
            await events.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    computes = rate > 0 and name in ("worker-0", "follower-0")  # rank 1 is a GPU
    assert events.ring[0]["type"] == ("child.long_step" if computes else "child.hangs")
    assert bool(child.asked) is not computes


def test_the_main_thread_of_a_process_that_waits_uses_no_cpu() -> None:
    before = main_thread_s(os.getpid())
    assert before is not None and main_thread_s(None) is None
    end = time.process_time() + 0.15
    while time.process_time() < end:
        pass
    after = main_thread_s(os.getpid())
    assert after is not None and after - before >= 0.1
