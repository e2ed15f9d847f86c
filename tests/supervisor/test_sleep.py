"""Sleep and wake of a deployment: the real supervisor with real child processes that answer as ranks do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mstar_core.errors import NotFound, StartError, StateConflict, Unavailable, UsageError
from mstar_core.messages.sleep import WakeWanted
from mstar_core.messages.wire import Envelope
from mstar_core.supervisor.child import Child
from mstar_core.supervisor.supervisor import Supervisor
from tests.supervisor.test_operations import ready, replicated
from tests.supervisor.test_supervisor_life import LIMIT_S, event, running

Play = Callable[..., None]


class FakeLedger:
    """Account of one device. free: bytes that others leave. moves: what was given back (+) and taken again (-)."""

    def __init__(self) -> None:
        self.free = 0
        self.moves: list[int] = []

    def give_back(self, freed: Mapping[str, int], *, is_whole: bool) -> None:
        self.free += sum(freed.values())
        self.moves += freed.values()

    def take_again(self, needed: Mapping[str, int], *, is_whole: bool) -> None:
        size = sum(needed.values())
        if size > self.free:
            raise StartError("GPU 0 has too little memory left", "deployment 'other' holds it", "mstarctl sleep other")
        self.free -= size
        self.moves.append(-size)


async def ended(supervisor: Supervisor) -> str:
    """Wait for the end of the operation in progress and return its error."""
    assert await supervisor.changes.until(lambda: not supervisor.operations.is_running, LIMIT_S)
    assert supervisor.operations.latest is not None
    return supervisor.operations.latest.error


async def test_a_deployment_gives_its_memory_back_and_takes_it_again(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec)) as (supervisor, _):
        await ready(supervisor)
        supervisor.sleep.ledger = ledger = FakeLedger()
        supervisor.sleep.sleep(2)
        assert await ended(supervisor) == ""
        assert (supervisor.state, supervisor.sleep.level, supervisor.sleep.nodes) == ("sleeping", 2, ["LLM"])
        assert supervisor._pause  # new requests wait
        supervisor.publisher.refresh(now_all=True)
        ranks = supervisor.ranks()
        assert [(r.state, r.given_back_bytes, r.kept_bytes) for r in ranks.values()] == [("sleeping", 100, 60)] * 2
        assert (await event(supervisor, "deployment.sleeps"))["freed"] == 200
        with pytest.raises(StateConflict, match="the deployment sleeps"):
            supervisor.drain()
        for refused in (supervisor.operations.restart, supervisor.ask_restart):
            with pytest.raises(StateConflict, match="the deployment sleeps"):
                refused()
        with pytest.raises(StateConflict, match="sleeps"):
            supervisor.operations.scale(3, [])
        with pytest.raises(NotFound):
            supervisor.sleep.wake(["LLN"])
        supervisor.sleep.wake()
        with pytest.raises(StateConflict, match="a wake is in progress"):
            supervisor.sleep.wake()
        assert await ended(supervisor) == ""
        assert (supervisor.state, supervisor.sleep.ranks, supervisor._pause) == ("ready", {}, 0)
        assert ledger.moves == [200, -200]
        assert (await event(supervisor, "deployment.woken"))["level"] == 2
        with pytest.raises(StateConflict, match="nothing sleeps"):
            supervisor.sleep.wake()


async def test_a_wake_without_room_names_the_holder_and_is_tried_again_by_requests(
    logged_spec: Any, play: Play
) -> None:
    async with running(replicated(logged_spec, 1)) as (supervisor, _):
        await ready(supervisor)
        supervisor.sleep.ledger = ledger = FakeLedger()
        supervisor.sleep.sleep()
        assert await ended(supervisor) == ""
        ledger.free = 50
        with pytest.raises(Unavailable, match="too little memory") as refused:
            await supervisor.sleep.refused(supervisor.sleep.wake())
        assert refused.value.detail == "deployment 'other' holds it"
        await event(supervisor, "deployment.wake_refused")
        assert supervisor.state == "sleeping"
        ledger.free = 100
        api = supervisor.children["api"]
        supervisor.on_batch([Envelope(2, "api", api.incarnation, WakeWanted())])
        assert await ended(supervisor) == "" and supervisor.state == "ready"


async def test_a_rank_with_a_request_refuses_and_the_others_wake_again(logged_spec: Any, play: Play) -> None:
    play(worker_1={"busy": True})
    async with running(replicated(logged_spec)) as (supervisor, _):
        await ready(supervisor)
        supervisor.sleep.ledger = ledger = FakeLedger()
        with pytest.raises(StateConflict, match="requests are running"):
            await supervisor.sleep.refused(supervisor.sleep.sleep(nodes=["LLM"]))
        assert (supervisor.state, supervisor.sleep.ranks, ledger.moves) == ("ready", {}, [])


async def test_a_running_request_ends_the_pause_of_a_sleep(logged_spec: Any, play: Play) -> None:
    play(api={"drains": False})
    async with running(replicated(logged_spec, 1)) as (supervisor, _):
        await ready(supervisor)
        with pytest.raises(StateConflict, match="requests are running"):
            await supervisor.sleep.refused(supervisor.sleep.sleep())
        assert (supervisor.state, supervisor._pause) == ("ready", 0)


async def test_a_rank_that_dies_asleep_waits_for_room(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec)) as (supervisor, _):
        await ready(supervisor)
        supervisor.sleep.ledger = ledger = FakeLedger()
        supervisor.sleep.sleep()
        assert await ended(supervisor) == ""
        ledger.free = 0
        supervisor.children["worker-1"].signal(9)  # type: ignore[arg-type]
        await event(supervisor, "deployment.wake_refused")
        assert "too little memory" in await ended(supervisor)
        assert (supervisor.sleep.lost, supervisor.state) == ({"worker-1"}, "sleeping")
        assert supervisor.children["worker-1"].state == "ended"
        ledger.free = 200
        supervisor.sleep.wake()
        assert await ended(supervisor) == ""
        assert (supervisor.state, supervisor.children["worker-1"].incarnation) == ("ready", 2)
        assert supervisor.sleep.facts()["lost"] == [] and ledger.moves == [200, -200]


async def test_nodes_that_sleep_exclude_changes_of_the_deployment(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec)) as (supervisor, _):
        await ready(supervisor)
        with pytest.raises(UsageError, match="level 3"):
            supervisor.sleep.sleep(3)
        supervisor.sleep.sleep(nodes=["LLM"])
        assert await ended(supervisor) == ""
        assert (supervisor.state, supervisor._pause) == ("ready", 0)
        with pytest.raises(StateConflict, match="LLM sleeps"):
            supervisor.operations.restart()
        with pytest.raises(StateConflict, match="LLM sleeps"):
            supervisor.operations.check_serving()
        supervisor.on_batch([Envelope(2, "worker-0", supervisor.children["worker-0"].incarnation, WakeWanted())])
        assert await ended(supervisor) == "" and supervisor.sleep.ranks == {}


async def test_a_rank_that_dies_of_a_wake_loads_everything_and_requests_wait_for_it(
    logged_spec: Any, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, deployments = Child.watch, list[Supervisor]()

    async def noticed_late(child: Child) -> int:
        status = await watch(child)
        for _ in range(20):  # the other rank's answer comes before the death is handled
            deployments[0].changes.notify()
            await asyncio.sleep(0.01)
        return status

    monkeypatch.setattr(Child, "watch", noticed_late)
    play(worker_1={"wakes": False, "lives": 1})
    async with running(replicated(logged_spec)) as (supervisor, _):
        deployments.append(supervisor)
        await ready(supervisor)
        supervisor.sleep.ledger = ledger = FakeLedger()
        supervisor.sleep.sleep()
        assert await ended(supervisor) == ""
        passed: list[bool] = []
        supervisor.sleep.wake()

        def is_over() -> bool:
            is_ready = all(child.state == "ready" for child in supervisor.children.values())
            passed.append(is_ready or bool(supervisor._pause))
            return not supervisor.operations.is_running

        assert await supervisor.changes.until(is_over, LIMIT_S)
        assert all(passed) and supervisor._pause == 0
        await event(supervisor, "child.died", child="worker-1")
        assert (supervisor.state, supervisor.children["worker-1"].incarnation) == ("ready", 2)
        assert (supervisor.sleep.ranks, supervisor.sleep.lost, ledger.moves) == ({}, set(), [200, -200])
