"""Life of a deployment on one loop: the real supervisor with real child processes that fail on purpose."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from mstar_core.errors import ExitCode, StateConflict
from mstar_core.messages.life import Telemetry
from mstar_core.messages.telemetry import RequestNews
from mstar_core.messages.wire import WIRE_VERSION, Envelope
from mstar_core.supervisor.child import Child, ChildKind, Pace
from mstar_core.supervisor.deaths import outcome
from mstar_core.supervisor.health import network_stall
from tests.fakes.deployment import LIMIT_S, event, running

Play = Callable[..., None]


async def test_a_start_becomes_ready_and_ends_with_nothing_left(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec()) as (supervisor, task):
        ready = await event(supervisor, "deployment.ready")
        assert ready["phases_s"]["spawn"] > 0 and set(ready["phases_s"]) > {"fetch", "spawn"}
        plan = await event(supervisor, "phase")
        assert (plan["child"], plan["phase"], plan["ranks"]) == ("supervisor", "plan", ["0 cpu: LLM"])
        pids = [child.pid for child in supervisor.children.values()]
        assert set(supervisor.children) == {"conductor", "worker-0", "api"}
        assert supervisor.spec.folder == supervisor.spec.run_dir
        supervisor.stop()
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.DONE
        assert supervisor.record()["cause"] is None
    assert not [pid for pid in pids if pid is not None and is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("child", "phase", "how", "code", "words"),
    [
        ("weights", "fetch", "error", ExitCode.INVALID, "weights lacks a file"),
        ("weights", "fetch", "exit", ExitCode.START_FAILED, "ended with exit status 23"),
        ("worker_0", "weights", "error", ExitCode.INVALID, "worker-0 lacks a file"),
        ("worker_0", "kv", "signal", ExitCode.START_FAILED, "was killed by SIGKILL"),
        ("api", "pool", "exit", ExitCode.START_FAILED, "api ended with exit status 23"),
    ],
)
async def test_a_failed_start_names_process_phase_and_cause(
    child: str, phase: str, how: str, code: ExitCode, words: str, logged_spec: Any, play: Play
) -> None:
    play(**{child: {"phase": phase, "how": how}})
    async with running(logged_spec()) as (supervisor, task):
        assert await asyncio.wait_for(task, LIMIT_S) is code
        cause = supervisor.record()["cause"]
    assert words in cause["message"]
    assert cause["name"] == child.replace("_", "-")
    if how == "error":  # the last message of a process that dies at once may be lost
        assert cause["phase"] == phase
    if how == "exit":
        assert "plain words before the end" in cause["detail"]


async def test_the_earliest_death_is_the_cause_and_later_ones_follow(logged_spec: Any, play: Play) -> None:
    play(worker_0={"phase": "kv", "how": "error"}, api={"phase": "pool", "how": "error"})
    async with running(logged_spec(), Pace(watch_s=0.1, cause_s=60.0, stop_s=3.0)) as (supervisor, task):
        await event(supervisor, "child.died", 2)
        supervisor.stop(now=True)
        await asyncio.wait_for(task, LIMIT_S)
    # The first record is the cause, independent of the order in which deaths are seen.
    for deaths in (supervisor.deaths, supervisor.deaths[::-1]):
        record = outcome(deaths, ExitCode.START_FAILED, "")
        assert record["cause"]["monotonic"] == min(death["monotonic"] for death in deaths)
        assert len(record["followed_by"]) == 1


async def test_a_start_without_progress_is_stalled_and_shows_its_stacks(logged_spec: Any, play: Play) -> None:
    play(worker_0={"phase": "kv", "how": "hang"})
    async with running(logged_spec(stall_s=LIMIT_S)) as (supervisor, task):
        for child in ("conductor", "api"):  # a busy machine may start them late, and they must not stall
            await event(supervisor, "phase", child=child, phase="ready")
        await event(supervisor, "phase", child="worker-0", phase="kv")
        stuck = supervisor.children["worker-0"]
        stuck.started = stuck.last_progress = time.monotonic() - LIMIT_S  # simulates the time without progress
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.TIMED_OUT
        cause = supervisor.record()["cause"]
        log = supervisor.children["worker-0"].log.path.read_text()
    assert "worker-0 made no progress in phase kv" in cause["message"]
    assert "signal.pause" in log or "in enter" in log


async def test_a_fetch_that_dies_of_sigusr1_counts_as_stalled(logged_spec: Any, play: Play) -> None:
    play(weights={"phase": "fetch", "how": "deaf"})
    async with running(logged_spec(stall_s=LIMIT_S)) as (supervisor, task):
        await event(supervisor, "phase", child="weights", phase="fetch")
        fetch = supervisor.children["weights"]
        fetch.started = fetch.last_progress = time.monotonic() - LIMIT_S  # simulates the time without progress
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.TIMED_OUT
        cause = supervisor.record()["cause"]
    assert "the download of part has stalled" in cause["message"] and cause["code"] == "stalled"


def test_a_stalled_download_names_its_repository_and_the_network() -> None:
    child = Child(
        kind=ChildKind(name="weights", module="x"),
        log=cast(Any, None),
        phase="fetch",
        phase_done=3 << 20,
        phase_total=6 << 20,
        detail="org/repo: model.safetensors",
    )
    facts = network_stall(child, 120.0)
    assert facts is not None and "org/repo: model.safetensors" in facts["message"] and "network" in facts["message"]
    assert "3.0 of 6.0 MiB" in facts["detail"] and "HTTPS_PROXY" in facts["hint"]
    child.phase = "kv"
    assert network_stall(child, 120.0) is None


async def test_a_dead_worker_comes_back_and_the_deployment_is_ready_again(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec()) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        worker = supervisor.children["worker-0"]
        os.kill(worker.pid or 0, signal.SIGKILL)
        died = await event(supervisor, "child.died")
        assert died["cause"] == "worker-0 was killed by SIGKILL"
        assert supervisor.state == "degraded"
        await event(supervisor, "deployment.ready", 2)
        assert (worker.incarnation, supervisor.restarts) == (2, 1)
        assert supervisor.cause is None, "the failure is over"
        [over] = supervisor.failures
        assert over["message"] == died["cause"] and over["time"] <= time.time(), "a later look still finds it"


async def test_a_worker_that_dies_repeatedly_is_not_restarted(logged_spec: Any, play: Play) -> None:
    pace = Pace(watch_s=0.1, backoff_s=(0.01, 0.02), stop_s=3.0, restarts_max=2)
    async with running(logged_spec(), pace) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        play(worker_0={"phase": "kv", "how": "signal"})
        os.kill(supervisor.children["worker-0"].pid or 0, signal.SIGKILL)
        unhealthy = await event(supervisor, "deployment.unhealthy")
        assert "worker-0 died 3 times in 10 minutes" in unhealthy["reason"]
        assert supervisor.children["worker-0"].incarnation == 3
        assert supervisor.children["api"].is_running
        waits = [(await event(supervisor, "child.restarting", n))["after_s"] for n in (1, 2)]
        assert waits == [0.0, 0.02], "at once after its service, then later and later"


def test_restarts_back_off_and_are_limited_to_five_in_ten_minutes() -> None:
    pace = Pace()
    assert pace.backoff_s == (1, 2, 4, 8, 16)
    assert (pace.restarts_max, pace.window_s) == (5, 600.0)


@pytest.mark.parametrize(
    ("how", "why"), [("silent", "no sign of life"), ("busy", "work is ready but no step ran")], ids=["silent", "busy"]
)
async def test_a_child_that_hangs_in_service_is_replaced(how: str, why: str, logged_spec: Any, play: Play) -> None:
    play(worker_0={"phase": "ready", "how": how, "lives": 1})
    async with running(logged_spec(hang_s=2.0)) as (supervisor, _):
        # On a busy machine any child may seem to hang for so short a time: only the events of worker-0 count.
        hangs = await event(supervisor, "child.hangs", child="worker-0")
        assert why in hangs["why"]
        await event(supervisor, "child.spawned", child="worker-0", incarnation=2)
        await event(supervisor, "deployment.ready", 2)


async def test_a_death_is_seen_even_if_a_grandchild_keeps_the_output_open(logged_spec: Any, play: Play) -> None:
    play(api={"grandchild": True, "lives": 1})
    async with running(logged_spec()) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        os.kill(supervisor.children["api"].pid or 0, signal.SIGKILL)
        await event(supervisor, "deployment.ready", 2)
        assert supervisor.children["api"].incarnation == 2


async def test_a_child_that_does_not_end_is_killed(logged_spec: Any, play: Play) -> None:
    play(conductor={"stubborn": True})
    async with running(logged_spec(), Pace(stop_s=0.5)) as (supervisor, task):
        await event(supervisor, "deployment.ready")
        supervisor.stop()
        await asyncio.wait_for(task, LIMIT_S)
        assert "conductor" in {item["child"] for item in supervisor.events.ring if item["type"] == "child.killed"}


async def test_a_drain_over_its_limit_is_cut_and_reported(logged_spec: Any, play: Play) -> None:
    play(api={"drains": False})
    async with running(logged_spec()) as (supervisor, task):
        await event(supervisor, "deployment.ready")
        supervisor.stop(grace_s=0.1)
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.DONE
        assert "longer than 0.1 s" in (await event(supervisor, "deployment.cut"))["why"]


async def test_an_immediate_stop_reports_the_aborted_requests(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec()) as (supervisor, task):
        await event(supervisor, "deployment.ready")
        supervisor.values["conductor.in_flight"] = 3.0
        supervisor.stop(now=True, reason="asked to stop")
        supervisor.stop(now=True, reason="asked again")
        await asyncio.wait_for(task, LIMIT_S)
        cut = [item for item in supervisor.events.ring if item["type"] == "deployment.cut"]
    assert [(item["requests"], item["why"]) for item in cut] == [(3, "asked to stop")]


async def test_stopping_a_drained_deployment_waits_for_the_drain(logged_spec: Any, play: Play) -> None:
    play(api={"drains": False})
    async with running(logged_spec()) as (supervisor, task):
        await event(supervisor, "deployment.ready")
        supervisor.drain()
        supervisor.stop(grace_s=60)
        assert not task.done() and supervisor.state == "draining"
        supervisor.stop()
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.DONE


async def test_a_drained_deployment_can_resume(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec()) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        supervisor.drain()
        assert supervisor.state == "draining"
        supervisor.resume()
        assert supervisor.state == "ready"


async def test_a_restart_renews_every_process_without_a_death(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec()) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        first_s = supervisor.ready_s or 0.0
        supervisor.ask_restart()
        again = await event(supervisor, "deployment.ready", 2)
        second_s = supervisor.ready_s or 0.0
        assert 0 < second_s <= time.monotonic() - supervisor.started - first_s, "each start reports its own time"
        assert again["ready_s"] == round(second_s, 2) and "fetch" not in again["phases_s"]
        assert {child.incarnation for child in supervisor.children.values()} == {2}
        assert supervisor.deaths == []


async def test_a_restart_during_a_back_off_leaves_one_process_of_each_name(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), Pace(watch_s=0.1, backoff_s=(60.0,), stop_s=3.0)) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        worker = supervisor.children["worker-0"]
        os.kill(worker.pid or 0, signal.SIGKILL)
        await event(supervisor, "deployment.ready", 2)
        os.kill(worker.pid or 0, signal.SIGKILL)  # the second death in a short time
        await event(supervisor, "child.died", 2)
        supervisor.ask_restart()
        await event(supervisor, "deployment.ready", 3)
        os.kill(worker.pid or 0, signal.SIGKILL)
        await event(supervisor, "deployment.ready", 4)
        spawned = [
            e["incarnation"]
            for e in supervisor.events.ring
            if e["type"] == "child.spawned" and e["child"] == "worker-0"
        ]
        assert spawned == [1, 2, 3, 4]


async def test_a_child_that_served_for_long_restarts_at_once_each_time(logged_spec: Any, play: Play) -> None:
    pace = Pace(watch_s=0.1, backoff_s=(1.0, 5.0), stop_s=3.0, lived_s=0.0)
    async with running(logged_spec(), pace) as (supervisor, _):
        for count in (1, 2, 3):
            await event(supervisor, "deployment.ready", count)
            os.kill(supervisor.children["worker-0"].pid or 0, signal.SIGKILL)
            assert (await event(supervisor, "child.restarting", count))["after_s"] == 0.0


async def test_a_child_that_dies_before_it_serves_again_waits(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), Pace(watch_s=0.1, backoff_s=(0.01, 0.02), stop_s=3.0, lived_s=0.0)) as (
        supervisor,
        _,
    ):
        await event(supervisor, "deployment.ready")
        play(worker_0={"phase": "kv", "how": "exit", "lives": 2})
        os.kill(supervisor.children["worker-0"].pid or 0, signal.SIGKILL)
        assert (await event(supervisor, "child.restarting"))["after_s"] == 0.0
        assert (await event(supervisor, "child.restarting", 2))["after_s"] == 0.02


async def test_a_second_restart_is_refused_and_the_first_ends_as_it_began(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec()) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        supervisor.ask_restart()
        with pytest.raises(StateConflict, match="already restarting"):
            supervisor.ask_restart()
        with pytest.raises(StateConflict, match="restarting"):
            supervisor.resume()
        await event(supervisor, "deployment.degraded", reason="restarting")
        with pytest.raises(StateConflict, match="already restarting"):
            supervisor.ask_restart()
        await event(supervisor, "deployment.ready", 2)
        assert supervisor.restarts == 1 and {child.incarnation for child in supervisor.children.values()} == {2}
        supervisor.ask_restart()
        await event(supervisor, "deployment.ready", 3)


async def test_a_deployment_that_is_about_to_end_cannot_resume(logged_spec: Any, play: Play) -> None:
    play(api={"drains": False})
    async with running(logged_spec()) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        supervisor.stop(grace_s=60)
        with pytest.raises(StateConflict, match="about to end"):
            supervisor.resume()


async def test_a_drain_ends_with_the_api_and_a_new_api_drains_too(logged_spec: Any, play: Play) -> None:
    play(api={"drains": False, "lives": 1})
    async with running(logged_spec()) as (supervisor, task):
        await event(supervisor, "deployment.ready")
        supervisor.drain()
        assert not supervisor.is_drained
        os.kill(supervisor.children["api"].pid or 0, signal.SIGKILL)
        await event(supervisor, "child.died", child="api")
        assert supervisor.is_drained, "its requests ended with it"
        supervisor._drained.clear()  # only the answer of the new api sets it again
        await asyncio.wait_for(supervisor._drained.wait(), LIMIT_S)
        supervisor.stop(grace_s=600)
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.DONE


async def test_messages_of_a_dead_child_change_nothing(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), Pace(watch_s=0.1, backoff_s=(60.0,), stop_s=3.0)) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        news = RequestNews(handle=7, id="r", state="run", started=1.0)
        telemetry = Telemetry(name="api", incarnation=1, values={"api.running": 1.0}, requests=[news])
        supervisor.on_batch([Envelope(WIRE_VERSION, "api", 1, telemetry)])
        os.kill(supervisor.children["api"].pid or 0, signal.SIGKILL)
        await event(supervisor, "child.died", child="api")
        supervisor.on_batch([Envelope(WIRE_VERSION, "api", 1, telemetry)])
        supervisor.publisher.refresh(now_all=True)
        assert supervisor.hub.store.deployment.running == 0 and "api.running" not in supervisor.values


async def test_a_stop_on_purpose_shows_no_earlier_failure_as_its_cause(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), Pace(watch_s=0.1, backoff_s=(60.0,), stop_s=3.0)) as (supervisor, task):
        await event(supervisor, "deployment.ready")
        os.kill(supervisor.children["worker-0"].pid or 0, signal.SIGKILL)
        await event(supervisor, "child.died")
        assert supervisor.cause is not None and supervisor.public_reason == "a worker died"
        supervisor.stop(now=True)
        await asyncio.wait_for(task, LIMIT_S)
        assert supervisor.cause is None and supervisor.record()["cause"] is None
