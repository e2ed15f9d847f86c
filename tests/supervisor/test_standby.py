"""Standby process of the real supervisor with fake children: it becomes the child that dies, or is missing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from mstar_core.config.deployment import DeploymentSpec, NodePlacement, Plan, RankPlan
from mstar_core.supervisor.child import Child, Pace, standby_kind
from mstar_core.supervisor.supervisor import Supervisor
from tests.fakes.child import STANDBY
from tests.fakes.deployment import LIMIT_S, event, running

Play = Callable[..., None]
PACE: Final = Pace(
    watch_s=0.05,
    backoff_s=(0.01,),
    stop_s=3.0,
    lived_s=0.0,
    standby_s=0.1,
    standby_retry_s=0.1,
    standby_answer_s=LIMIT_S,
)
TWO_RANKS: Final = Plan(
    ranks=tuple(RankPlan(rank=rank, device="cpu", nodes=("LLM",)) for rank in (0, 1)),
    placements=(NodePlacement(node="LLM", replicas=((0,), (1,))),),
)


def kill(child: Child) -> None:
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds. Fails if it does not."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110 a process and a file give no event
            await asyncio.sleep(0.02)


async def ended(pid: int) -> None:
    """Wait until a process is gone. Fails if it stays."""
    await until(lambda: not Path(f"/proc/{pid}").exists())


def spawned(supervisor: Supervisor, child: str) -> list[tuple[int, bool]]:
    """Return the pid of each life of a child, and whether a standby process became it."""
    events = [e for e in supervisor.events.ring if e["type"] == "child.spawned" and e["child"] == child]
    return [(e["pid"], e.get("standby", False)) for e in events]


async def test_the_standby_becomes_the_worker_that_dies_and_is_replaced(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        standby = await event(supervisor, "standby.ready")
        worker = supervisor.children["worker-0"]
        kill(worker)
        await event(supervisor, "deployment.ready", 2)
        assert spawned(supervisor, "worker-0")[1:] == [(standby["pid"], True)]
        assert (worker.pid, worker.incarnation, worker.state) == (standby["pid"], 2, "ready")
        second = await event(supervisor, "standby.ready", 2)
        assert second["pid"] != standby["pid"]
        began = [e["type"] for e in supervisor.events.ring]
        ready = [at for at, kind in enumerate(began) if kind == "deployment.ready"]
        assert ready[1] < [at for at, kind in enumerate(began) if kind == "standby.spawned"][1], "not beside a start"


async def test_the_output_of_a_standby_goes_to_the_log_of_what_it_becomes(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        await event(supervisor, "standby.ready")
        worker = supervisor.children["worker-0"]
        kill(worker)
        await event(supervisor, "deployment.ready", 2)
        own = supervisor.logs["standby"].path
        assert "preloaded by the standby" in own.read_text()
        assert "preloaded by the standby" not in worker.log.path.read_text()
        worker.signal(signal.SIGUSR1)  # the process writes its stacks
        await until(lambda: "most recent call first" in worker.log.path.read_text())
        assert "most recent call first" not in own.read_text()


async def test_of_two_workers_that_die_at_once_one_takes_the_standby(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(plan=TWO_RANKS), PACE, STANDBY) as (supervisor, _):
        standby = await event(supervisor, "standby.ready")
        for name in ("worker-0", "worker-1"):
            kill(supervisor.children[name])
        await event(supervisor, "child.spawned", child="worker-0", incarnation=2)
        await event(supervisor, "child.spawned", child="worker-1", incarnation=2)
        await event(supervisor, "deployment.ready", 2)
        lives = [spawned(supervisor, name)[1] for name in ("worker-0", "worker-1")]
        assert sorted(is_standby for _, is_standby in lives) == [False, True]
        assert (standby["pid"], True) in lives


async def test_a_dead_standby_is_replaced_and_until_then_workers_are_spawned(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        first = await event(supervisor, "standby.ready")
        os.kill(first["pid"], signal.SIGKILL)
        assert supervisor.state == "ready"
        assert (await event(supervisor, "standby.ended"))["pid"] == first["pid"]
        second = await event(supervisor, "standby.ready", 2)
        os.kill(second["pid"], signal.SIGKILL)
        await ended(second["pid"])
        kill(supervisor.children["worker-0"])
        await event(supervisor, "deployment.ready", 2)
        assert [is_standby for _, is_standby in spawned(supervisor, "worker-0")] == [False, False]


async def test_a_standby_that_does_not_answer_is_ended_and_a_new_process_started(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), replace(PACE, standby_answer_s=0.5), STANDBY) as (supervisor, _):
        standby = await event(supervisor, "standby.ready")
        os.kill(standby["pid"], signal.SIGSTOP)
        kill(supervisor.children["worker-0"])
        await event(supervisor, "deployment.ready", 2)
        assert [is_standby for _, is_standby in spawned(supervisor, "worker-0")] == [False, False]
        await ended(standby["pid"])


async def test_a_death_while_the_standby_imports_starts_a_new_process(logged_spec: Any, play: Play) -> None:
    play(standby={"how": "hang"})
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        standby = await event(supervisor, "standby.spawned")
        kill(supervisor.children["worker-0"])
        await event(supervisor, "deployment.ready", 2)
        assert [is_standby for _, is_standby in spawned(supervisor, "worker-0")] == [False, False]
        await ended(standby["pid"])


async def test_a_standby_that_cannot_import_is_tried_three_times(logged_spec: Any, play: Play) -> None:
    play(standby={"how": "exit"})
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        why = (await event(supervisor, "standby.ended", 3))["why"]
        assert "exit status 23" in why
        await asyncio.sleep(5 * PACE.standby_retry_s)
        assert [e["type"] for e in supervisor.events.ring].count("standby.spawned") == 3
        assert supervisor.state == "ready"


async def test_a_standby_with_another_environment_is_not_used(
    logged_spec: Any, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        await event(supervisor, "standby.ready")
        monkeypatch.setenv("A_THREAD_COUNT", "7")  # takes effect at the start of a process only
        kill(supervisor.children["worker-0"])
        await event(supervisor, "deployment.ready", 2)
        assert [is_standby for _, is_standby in spawned(supervisor, "worker-0")] == [False, False]


async def test_a_restart_on_purpose_starts_new_processes(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        standby = await event(supervisor, "standby.ready")
        supervisor.ask_restart()
        await event(supervisor, "deployment.ready", 2)
        assert [is_standby for _, is_standby in spawned(supervisor, "worker-0")] == [False, False]
        await ended(standby["pid"])


async def test_only_workers_use_the_standby_and_it_ends_with_the_supervisor(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        standby = await event(supervisor, "standby.ready")
        kill(supervisor.children["api"])
        await event(supervisor, "deployment.ready", 2)
        assert [is_standby for _, is_standby in spawned(supervisor, "api")] == [False, False]
        assert supervisor.standby.pid == standby["pid"]
    await ended(standby["pid"])


async def test_the_standby_is_shown_with_its_memory(logged_spec: Any, play: Play) -> None:
    async with running(logged_spec(), PACE, STANDBY) as (supervisor, _):
        standby = await event(supervisor, "standby.ready")

        def status() -> Any:
            return supervisor.hub.store.children.get("standby")

        await until(lambda: bool(status() and status().state == "ready" and status().resident_bytes))
        assert status().pid == standby["pid"] and status().resident_bytes > 1 << 20


def spec_of(*devices: str, standby: bool | None = None, **fields: Any) -> DeploymentSpec:
    ranks = tuple(RankPlan(rank=rank, device=device, nodes=("LLM",)) for rank, device in enumerate(devices))
    plan = Plan(ranks=ranks, placements=(), **fields)
    return DeploymentSpec(name="d", model="m", plugin="p", run_dir="/r", log_dir="/l", plan=plan, standby=standby)


@pytest.mark.parametrize(
    ("spec", "has_standby"),
    [
        (spec_of("cpu"), False),
        (spec_of("cpu", standby=True), True),
        (spec_of("cuda:0"), True),
        (spec_of("cuda:0", standby=False), False),
    ],
)
def test_a_deployment_beside_gpus_has_one_unless_it_is_switched_off(spec: DeploymentSpec, has_standby: bool) -> None:
    assert (standby_kind(spec) is not None) is has_standby
