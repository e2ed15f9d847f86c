"""Cordons and rolling restarts: the real supervisor with real child processes that answer as if they had no request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mstar_core.config.deployment import DeploymentSpec, GroupPlan, NodePlacement, Plan, RankPlan
from mstar_core.errors import ConfigError, NotFound, StartError, StateConflict, Unavailable
from mstar_core.messages.life import Cordoned
from mstar_core.supervisor.operations.cordons import leaders_of
from mstar_core.supervisor.operations.rolling import has_other_replica
from mstar_core.supervisor.supervisor import Supervisor
from tests.supervisor.test_supervisor_life import LIMIT_S, event, running

Play = Callable[..., None]


def plan_of(*replicas: tuple[int, ...]) -> Plan:
    """One node on these replicas; those of several ranks are groups."""
    leaders = [replica[0] for replica in replicas]
    return Plan(
        ranks=tuple(
            RankPlan(
                rank=rank,
                device="cpu",
                nodes=("LLM",) if rank in leaders else (),
                follows=() if rank in leaders else ("LLM",),
            )
            for replica in replicas
            for rank in replica
        ),
        placements=(NodePlacement(node="LLM", replicas=replicas),),
        groups=tuple(GroupPlan(ranks=replica, nodes=("LLM",)) for replica in replicas if len(replica) > 1),
    )


def replicated(logged_spec: Any, count: int = 2, **fields: Any) -> DeploymentSpec:
    spec: DeploymentSpec = logged_spec(**fields)
    return msgspec.structs.replace(spec, plan=plan_of(*((rank,) for rank in range(count))))


async def ready(supervisor: Supervisor) -> None:
    await event(supervisor, "deployment.ready")
    assert await supervisor.changes.until(lambda: supervisor.operations.cordons.is_known, LIMIT_S)


async def loads_read(supervisor: Supervisor) -> None:
    """Wait until the memory of every rank is known, which is read once a second."""
    async with asyncio.timeout(LIMIT_S):
        while not all(rank.resident_bytes for rank in supervisor.ranks().values()):
            await asyncio.sleep(0.05)
            supervisor.publisher.refresh(now_all=True)


def test_a_cordon_of_a_follower_is_that_of_its_group() -> None:
    plan = plan_of((0, 1), (2, 3))
    assert leaders_of(plan, 0) == leaders_of(plan, 1) == {0}
    assert leaders_of(plan, 3) == {2}
    with pytest.raises(NotFound, match="no rank 7"):
        leaders_of(plan, 7)


def test_a_rank_is_dispensable_if_each_of_its_nodes_has_another_ready_replica() -> None:
    plan = Plan(
        ranks=(),
        placements=(
            NodePlacement(node="thinker", replicas=((0,), (1,))),
            NodePlacement(node="talker", replicas=((1,),)),
        ),
    )
    assert has_other_replica(plan, 0, {0, 1})
    assert not has_other_replica(plan, 0, {0})
    assert not has_other_replica(plan, 1, {0, 1})


async def test_a_cordon_is_a_level_that_a_new_conductor_receives_too(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec)) as (supervisor, _):
        await ready(supervisor)
        cordons = supervisor.operations.cordons
        assert supervisor.operations.cordon(1) == {"ranks": [1], "cordoned": [1]}
        assert await supervisor.changes.until(lambda: cordons.idle == {1}, LIMIT_S)
        supervisor.children["conductor"].signal(9)  # type: ignore[arg-type]
        await event(supervisor, "child.died", child="conductor")
        cordons.take(Cordoned(number=-1, ranks=[]))
        await event(supervisor, "deployment.ready", 2)
        assert await supervisor.changes.until(lambda: cordons.idle == {1}, LIMIT_S)
        assert supervisor.cordoned == {1}
        supervisor.publisher.refresh(now_all=True)
        ranks = supervisor.hub.store.ranks
        assert [getattr(ranks[key], "state") for key in ("0", "1")] == ["ready", "cordoned"]  # noqa: B009
        assert supervisor.operations.uncordon(1) == {"ranks": [1], "cordoned": []}
        await event(supervisor, "rank.uncordoned", ranks=[1])


async def test_the_last_ready_replica_cannot_be_cordoned(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec)) as (supervisor, _):
        await ready(supervisor)
        supervisor.operations.cordon(0)
        with pytest.raises(StateConflict, match="rank 1 has no other replica"):
            supervisor.operations.cordon(1)
        with pytest.raises(NotFound):
            supervisor.operations.cordon(2)
        assert supervisor.cordoned == {0}


async def test_requests_on_a_cordoned_rank_end_at_the_drain_limit(logged_spec: Any, play: Play) -> None:
    play(conductor={"drains": False})
    async with running(replicated(logged_spec, drain_timeout_s=0.2)) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        supervisor.operations.cordon(1)
        assert (await event(supervisor, "rank.evicted"))["ranks"] == [1]


async def test_a_rolling_restart_renews_every_process_one_after_the_other(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec)) as (supervisor, _):
        await ready(supervisor)
        pids = {name: child.pid for name, child in supervisor.children.items()}
        least = len(pids)
        operation = supervisor.operations.restart()
        assert (operation["state"], operation["total"]) == ("running", 4)
        with pytest.raises(StateConflict, match="a rolling restart is in progress"):
            supervisor.operations.restart()
        with pytest.raises(StateConflict, match="a rolling restart is in progress"):
            supervisor.ask_restart()

        def has_ended() -> bool:
            nonlocal least
            least = min(least, sum(child.state == "ready" for child in supervisor.children.values()))
            return not supervisor.operations.is_running

        assert await supervisor.changes.until(has_ended, LIMIT_S)
        assert supervisor.operations.latest is not None and supervisor.operations.latest.state == "done"
        assert least == len(pids) - 1
        assert not {name for name, child in supervisor.children.items() if child.pid == pids[name]}
        assert (supervisor.state, supervisor.deaths) == ("ready", [])
        spawned = [item["child"] for item in supervisor.events.ring if item["type"] == "child.spawned"]
        assert spawned[-4:] == ["worker-0", "worker-1", "conductor", "api"]
        assert supervisor.cordoned == frozenset()


async def test_a_worker_without_another_replica_makes_requests_wait_for_it(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec, 1)) as (supervisor, _):
        await ready(supervisor)
        paused: list[tuple[str, int]] = []
        send = supervisor._send_state

        def note() -> None:
            paused.append(
                (supervisor.operations.latest.step if supervisor.operations.latest else "", supervisor._pause)
            )
            send()

        supervisor._send_state = note  # type: ignore[method-assign]
        supervisor.operations.restart()
        assert await supervisor.changes.until(lambda: not supervisor.operations.is_running, LIMIT_S)
    assert {step for step, pause in paused if pause} == {"worker-0", "conductor"}
    assert supervisor._pause == 0


async def test_a_rolling_restart_ends_at_the_first_process_that_does_not_come_back(
    logged_spec: Any, play: Play
) -> None:
    async with running(replicated(logged_spec)) as (supervisor, _):
        await ready(supervisor)
        play(worker_0={"phase": "kv", "how": "error"})
        before = supervisor.children["worker-1"].pid
        supervisor.operations.restart()
        assert await supervisor.changes.until(lambda: not supervisor.operations.is_running, LIMIT_S)
        latest = supervisor.operations.latest
        assert latest is not None
        assert (latest.state, latest.done, latest.step) == ("failed", 0, "worker-0")
        assert "worker-0 did not come back" in latest.error
        assert supervisor.children["worker-1"].pid == before
        assert supervisor.cordoned == frozenset()
        await event(supervisor, "operation.failed")


async def test_an_operation_is_refused_unless_all_processes_are_ready(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec)) as (supervisor, _):
        with pytest.raises(Unavailable, match="not all processes are ready"):
            supervisor.operations.restart()
        await ready(supervisor)
        supervisor.drain()
        with pytest.raises(Unavailable, match="draining"):
            supervisor.operations.restart()


async def test_a_drain_ends_a_rolling_restart(logged_spec: Any, play: Play) -> None:
    play(conductor={"drains": False})
    async with running(replicated(logged_spec, drain_timeout_s=60.0)) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        begun = time.monotonic()
        supervisor.operations.restart()
        await asyncio.sleep(0)
        supervisor.drain()
        assert await supervisor.changes.until(lambda: not supervisor.operations.is_running, LIMIT_S)
        assert time.monotonic() - begun < 30
        assert supervisor.operations.latest is not None and "draining" in supervisor.operations.latest.error
        assert supervisor.cordoned == frozenset()


async def settled(supervisor: Supervisor) -> str:
    """Wait for the end of an operation. Returns its error."""
    assert await supervisor.changes.until(lambda: not supervisor.operations.is_running, LIMIT_S)
    assert supervisor.operations.latest is not None
    return supervisor.operations.latest.error


async def test_replicas_join_and_leave_while_the_others_run(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec, 1, max_concurrent_requests=8)) as (supervisor, _):
        await ready(supervisor)
        kept = {name: child.pid for name, child in supervisor.children.items()}
        assert supervisor.operations.scale(3, [])["total"] == 1
        assert await settled(supervisor) == "" and supervisor.state == "ready"
        assert set(supervisor.children) - kept.keys() == {"worker-1", "worker-2"}
        assert DeploymentSpec.load(supervisor.run_dir.spec).plan == supervisor.spec.plan
        supervisor.operations.set_values({"max_concurrent_requests": 24})
        supervisor.publisher.refresh(now_all=True)
        assert set(supervisor.hub.store.ranks) == {"0", "1", "2"}
        assert supervisor.operations.scale(1, [])["total"] == 2
        assert await settled(supervisor) == "" and supervisor.state == "ready"
        assert {name: child.pid for name, child in supervisor.children.items()} == kept
        assert (supervisor.spec.max_concurrent_requests, supervisor.cordoned) == (8, frozenset())
        supervisor.publisher.refresh(now_all=True)
        assert set(supervisor.hub.store.ranks) == {"0"}
        supervisor.operations.scale(2, [])
        assert await settled(supervisor) == ""
        supervisor.operations.cordon(3)
        supervisor.operations.scale(1, [])
        assert (await settled(supervisor), supervisor.cordoned) == ("", frozenset())
        assert "worker-3" in supervisor.logs, "a number that has left does not come back"
        assert supervisor.deaths == []


async def test_a_replica_that_does_not_start_is_taken_back(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec, 1)) as (supervisor, _):
        await ready(supervisor)
        plan = supervisor.spec.plan
        play(worker_1={"phase": "kv", "how": "error"})
        supervisor.operations.scale(2, [])
        assert "worker-1 did not start" in await settled(supervisor)
        assert "worker-1" not in supervisor.children
        assert (supervisor.spec.plan, supervisor.state, supervisor.cause) == (plan, "ready", None)
        assert DeploymentSpec.load(supervisor.run_dir.spec).plan == plan


async def test_a_scale_that_cannot_be_is_refused_before_it_begins(logged_spec: Any, play: Play) -> None:
    async with running(replicated(logged_spec, 1)) as (supervisor, _):
        await ready(supervisor)
        with pytest.raises(ConfigError, match="cannot have 0 replicas"):
            supervisor.operations.scale(0, [])
        with pytest.raises(ConfigError, match="cannot have 1000000 replicas"):
            supervisor.operations.scale(1_000_000, [])
        await loads_read(supervisor)
        supervisor.host_free = lambda host: 1  # type: ignore[method-assign]
        with pytest.raises(StartError, match="do not fit into the memory of the host"):
            supervisor.operations.scale(2, [])
        assert supervisor.operations.latest is None
