"""Deployments on several hosts: the real supervisor and real agents, with fake children that fail on purpose."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mstar_core.config.deployment import GroupPlan, HostPlan, NodePlacement, Plan, RankPlan
from mstar_core.errors import ExitCode
from mstar_core.host.gpu_locks import FOLDER_VARIABLE, acquire_gpus, release
from mstar_core.messages.life import LinkBroken
from mstar_core.messages.wire import WIRE_VERSION, Envelope
from mstar_core.supervisor.child import Child, Pace
from mstar_core.supervisor.deaths import public_sentence
from mstar_core.supervisor.supervisor import Supervisor
from mstar_core.transport import LinkBreak
from tests.fakes.child import WEIGHTS
from tests.fakes.deployment import LIMIT_S, event, running
from tests.fakes.placer import ProcessPlacer, exists

Play = Callable[..., None]
QUICK: Final = Pace(
    watch_s=0.1, ping_s=0.2, backoff_s=(0.01,), stop_s=10.0, stacks_s=0.2, host_silence_s=LIMIT_S, host_retry_s=(0.05,)
)
HASTY: Final = dataclasses.replace(QUICK, host_silence_s=3.0)
"""The pace while a test waits for the loss of a host. Otherwise a busy machine might seem to have lost one."""

HOSTS: Final = (HostPlan(name="", address="127.0.0.1"), HostPlan(name="b", address="127.0.0.1"))


def two_hosts(device: str = "cpu", *more: RankPlan) -> dict[str, Any]:
    """Return the fields of a spec with a replica on each of two hosts."""
    ranks = (
        RankPlan(rank=0, device="cpu", nodes=("LLM",)),
        RankPlan(rank=1, device=device, nodes=("LLM",), host="b"),
        *more,
    )
    replicas = tuple((rank.rank,) for rank in ranks)
    plan = Plan(ranks=ranks, placements=(NodePlacement(node="LLM", replicas=replicas),))
    return {"plan": plan, "hosts": HOSTS}


@pytest.fixture
def placer() -> Iterator[ProcessPlacer]:
    """Start agents here; kill those that are left."""
    made = ProcessPlacer()
    yield made
    made.close()


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds. Fails if it does not."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():  # noqa: ASYNC110 processes and files of others give no event
            await asyncio.sleep(0.05)


async def gone(is_alive: Callable[[], bool]) -> None:
    """Wait until a process is gone. Fails if it stays."""
    await until(lambda: not is_alive())


async def lost(supervisor: Supervisor, placer: ProcessPlacer, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the agent, and wait until its silence has lost the host."""
    supervisor.hosts._pace = HASTY
    placer.signal("b", number)
    why = (await event(supervisor, "host.lost"))["why"]
    supervisor.hosts._pace = QUICK
    assert why.startswith("its agent has been silent")


def agent_folders(runtime: Path) -> list[Path]:
    """Return the run directories of agents."""
    return [path for path in runtime.iterdir() if path.name.startswith(".fake@")]


async def test_a_start_on_two_hosts_becomes_ready_and_ends_with_nothing_left(
    logged_spec: Any, play: Play, placer: ProcessPlacer, runtime: Path
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, task):
        await event(supervisor, "deployment.ready")
        ready = await event(supervisor, "host.ready")
        assert ready["host"] == "b"
        remote = supervisor.children["worker-1"]
        assert remote.host == "b" and remote.remote_endpoint.startswith("tcp://127.0.0.1:")
        assert exists(remote.pid) and remote.pid != supervisor.children["worker-0"].pid
        (folder,) = agent_folders(runtime)
        assert (folder / "curve.json").stat().st_mode & 0o777 == 0o600
        store = supervisor.hub.store
        await until(lambda: "b" in store.hosts and bool(store.hosts["b"].cores))
        supervisor.publisher.refresh(now_all=True)
        assert (store.hosts["b"].state, store.ranks["1"].host, store.children["worker-1"].host) == ("ready", "b", "b")
        supervisor.stop()
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.DONE
    await gone(lambda: placer.is_alive("b", 1))
    assert placer.released and not exists(remote.pid)
    assert not agent_folders(runtime)


async def test_the_output_and_the_fatal_record_of_a_process_reach_the_supervisor(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    play(worker_1={"phase": "weights", "how": "error"})
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, task):
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.INVALID
        cause = supervisor.record()["cause"]
        log = supervisor.children["worker-1"].log.path.read_text()
    assert cause["message"] == "worker-1 lacks a file on host b" and cause["phase"] == "weights"
    assert cause["monotonic"] <= time.monotonic() and "lacks a file" in log


async def test_a_worker_that_dies_on_another_host_comes_back_there(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        worker = supervisor.children["worker-1"]
        os.kill(worker.pid or 0, signal.SIGKILL)
        died = await event(supervisor, "child.died")
        assert (died["cause"], died["host"]) == ("worker-1 was killed by SIGKILL on host b", "b")
        await event(supervisor, "deployment.ready", 2)
        assert worker.incarnation == 2 and exists(worker.pid) and len(placer.started["b"]) == 1


async def test_a_deployment_that_ends_replaces_no_lost_host(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    play(api={"stubborn": True})  # the end takes as long as it may
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, task):
        await event(supervisor, "deployment.ready")
        placer.full = "all are in use"
        await lost(supervisor, placer)
        await event(supervisor, "host.waiting", 2)
        supervisor.stop(now=True)
        await event(supervisor, "deployment.stopping")
        await asyncio.sleep(0)
        asked, placer.full = placer.asked, ""
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.DONE
        assert placer.asked <= asked + 1 and len(placer.started["b"]) == 1, "no agent was started while it ended"


async def test_a_lost_host_is_replaced_and_its_ranks_start_there(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        placer.full = "all are in use"
        await lost(supervisor, placer)
        died = await event(supervisor, "child.died", child="worker-1")
        assert died["cause"] == "host b was lost" and public_sentence(supervisor.deaths[-1]) == "a host was lost"
        waiting = await event(supervisor, "host.waiting", 2)
        assert "all are in use" in waiting["why"] and supervisor.state == "degraded"
        assert supervisor.children["worker-0"].state == "ready", "the other replica serves on"
        placer.full = ""
        replaced = await event(supervisor, "host.replaced")
        assert replaced["incarnation"] == 2
        await event(supervisor, "deployment.ready", 2)
        assert supervisor.children["worker-1"].incarnation == 2


async def test_an_agent_that_was_given_up_ends_with_its_processes_when_it_runs_again(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        placer.full = "all are in use"
        old = supervisor.children["worker-1"].pid
        await lost(supervisor, placer, signal.SIGSTOP)
        placer.signal("b", signal.SIGCONT)
        await event(supervisor, "host.fenced", incarnation=1)
        await gone(lambda: placer.is_alive("b", 1) or exists(old))


async def test_a_new_agent_on_the_same_host_ends_a_suspended_one(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        old = supervisor.children["worker-1"].pid
        await lost(supervisor, placer, signal.SIGSTOP)
        await event(supervisor, "deployment.ready", 2)
        assert not placer.is_alive("b", 1) and not exists(old)
        assert placer.is_alive("b", 2) and exists(supervisor.children["worker-1"].pid)


async def test_agents_end_by_themselves_when_the_supervisor_is_silent(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        worker = supervisor.children["worker-1"].pid
        supervisor.hosts.ping = lambda message: None  # type: ignore[method-assign]
        await gone(lambda: placer.is_alive("b", 1) or exists(worker))


async def test_a_placer_that_fails_fails_the_start_with_its_words(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    placer.full = "2 CPUs are needed, none is free"
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, task):
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.START_FAILED
        cause = supervisor.record()["cause"]
    assert cause["message"] == "no host of the cluster has room" and cause["detail"] == placer.full


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"mstarctl": "0.0.1"}, "host b has another version of mstarctl"),
        ({"wire": "1"}, "host b has another version of the wire format of mstarctl"),
    ],
)
async def test_another_version_is_refused_with_the_name_of_the_host(
    versions: dict[str, str], words: str, logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    placer.versions = versions
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, task):
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.START_FAILED
        assert supervisor.record()["cause"]["message"] == words
    await gone(lambda: placer.is_alive("b", 1))


async def test_a_mixture_of_weights_is_refused_with_the_name_of_the_host(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    placer.environments["b"] = {WEIGHTS: "other"}
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, task):
        assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.START_FAILED
        assert supervisor.record()["cause"]["message"].startswith("host b has other weights")


async def test_a_gpu_in_use_is_refused_with_host_and_number(
    logged_spec: Any, play: Play, placer: ProcessPlacer, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(runtime / "locks"))
    placer.gpus["b"] = (3,)
    held = acquire_gpus({"cuda:3": "cuda:3"}, "other")
    try:
        async with running(logged_spec(**two_hosts("cuda:0")), QUICK, placer=placer) as (supervisor, task):
            assert await asyncio.wait_for(task, LIMIT_S) is ExitCode.START_FAILED
            cause = supervisor.record()["cause"]
            assert supervisor.spec.plan.ranks[1].device == "cuda:3", "the reserved one"
    finally:
        release(held)
    assert cause["message"] == "GPU 3 is in use on host b" and "'other'" in cause["detail"]


async def test_a_restart_renews_the_processes_of_all_hosts(logged_spec: Any, play: Play, placer: ProcessPlacer) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        supervisor.ask_restart()
        await event(supervisor, "deployment.ready", 2)
        assert {child.incarnation for child in supervisor.children.values()} == {2}
        supervisor.operations.restart()
        await until(lambda: not supervisor.operations.is_running)
        assert {child.incarnation for child in supervisor.children.values()} == {3} and supervisor.deaths == []


def places(supervisor: Supervisor, name: str) -> list[str]:
    """Return where each life of a member of a group was to meet the others."""
    lines = supervisor.children[name].log.path.read_text().splitlines()
    return [line.removeprefix("meets at ") for line in lines if line.startswith("meets at ")]


async def test_a_group_over_two_hosts_meets_at_its_leader_and_restarts_as_one(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    ranks = (
        RankPlan(rank=0, device="cpu", nodes=(), follows=("LLM",)),
        RankPlan(rank=1, device="cpu", nodes=("LLM",), host="b"),
    )
    group = GroupPlan(ranks=(1, 0), nodes=("LLM",))
    plan = Plan(ranks=ranks, groups=(group,), placements=(NodePlacement(node="LLM", replicas=((1, 0),), tp_size=2),))
    async with running(logged_spec(plan=plan, hosts=HOSTS), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        leader, follower = supervisor.children["worker-1"], supervisor.children["follower-0"]
        assert (leader.host, follower.host) == ("b", "")
        os.kill(follower.pid or 0, signal.SIGKILL)
        await event(supervisor, "deployment.ready", 2)
        await until(lambda: len(places(supervisor, "worker-1")) == 2)  # a lost host takes lines on their way with it
        await lost(supervisor, placer)
        await event(supervisor, "deployment.ready", 3)
        await until(lambda: len(places(supervisor, "worker-1")) == 3)
        assert leader.incarnation == follower.incarnation == 3
        met = places(supervisor, "follower-0")
        assert met == places(supervisor, "worker-1") and len(set(met)) == 3
        assert all(place.startswith("127.0.0.1:") and place.count(":") == 2 for place in met)


async def test_scale_reserves_a_host_for_a_new_replica_and_gives_it_back(
    logged_spec: Any, play: Play, placer: ProcessPlacer, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(runtime / "locks"))
    placer.gpus = {"b": (0,), "host-1": (5,)}
    ranks = (RankPlan(rank=0, device="cuda:0", nodes=("LLM",), host="b"),)
    plan = Plan(ranks=ranks, placements=(NodePlacement(node="LLM", replicas=((0,),)),))
    async with running(logged_spec(plan=plan, hosts=HOSTS), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        placer.full = "all are in use"
        supervisor.operations.scale(2, [])
        await until(lambda: not supervisor.operations.is_running)
        assert supervisor.operations.latest is not None and "has room" in supervisor.operations.latest.error
        assert [host.name for host in supervisor.spec.hosts] == ["", "b"] and len(supervisor.spec.plan.ranks) == 1
        placer.full = ""
        supervisor.operations.scale(2, [])
        await until(lambda: not supervisor.operations.is_running)
        assert supervisor.operations.latest.state == "done", supervisor.operations.latest.error
        new = supervisor.spec.plan.ranks[-1]
        assert (new.host, new.device) == ("host-1", "cuda:5")
        assert supervisor.children[f"worker-{new.rank}"].state == "ready"
        supervisor.operations.scale(1, [])
        await until(lambda: not supervisor.operations.is_running)
        await gone(lambda: placer.is_alive("host-1", len(placer.started["host-1"])))
        assert set(supervisor.hosts.links) == {"b"} and supervisor.state == "ready"


@pytest.mark.parametrize(
    ("peer", "reporter"),
    [("worker-1", "api"), ("api", "worker-1"), ("worker-1", "worker-0"), ("worker-0", "worker-1")],
)
async def test_the_process_of_the_other_host_restarts_when_a_link_has_lost_messages(
    peer: str, reporter: str, logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        for _ in range(3):  # a link that breaks both ways is one break
            report(supervisor, reporter, peer, 1)
        broken = await event(supervisor, "link.broken")
        assert (broken["child"], broken["lost"]) == ("worker-1", 7)
        assert (broken["sender"], broken["receiver"]) == (peer, reporter)
        assert {broken["sender_host"], broken["receiver_host"]} == {"", "b"}
        assert supervisor.state == "degraded"
        assert supervisor.reason == f"messages between {peer} and {reporter} were lost"
        await event(supervisor, "deployment.ready", 2)
        incarnations = {name: child.incarnation for name, child in supervisor.children.items()}
        assert incarnations == {"conductor": 1, "worker-0": 1, "worker-1": 2, "api": 1}
        report(supervisor, "api", "worker-1", 1)  # of the incarnation that has ended
        await asyncio.sleep(0.5)
        assert supervisor.children["worker-1"].incarnation == 2
        kinds = [item["type"] for item in supervisor.events.ring]
        assert kinds.count("link.broken") == 1 and "child.died" not in kinds


def report(supervisor: Supervisor, reporter: str, peer: str, incarnation: int, silent_s: float = 0.0) -> None:
    """Let a child report a break, or a silence."""
    message = LinkBroken(peer=peer, incarnation=incarnation, lost=0 if silent_s else 7, silent_s=silent_s)
    supervisor.on_batch([Envelope(WIRE_VERSION, reporter, supervisor.children[reporter].incarnation, message)])


async def test_a_link_that_breaks_again_and_again_restarts_its_process_later_each_time(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    pace = dataclasses.replace(QUICK, host_retry_s=(0.2, 60.0))
    async with running(logged_spec(**two_hosts()), pace, placer=placer) as (supervisor, _):
        for number in (1, 2, 3):
            await event(supervisor, "deployment.ready", number)
            worker = supervisor.children["worker-1"]
            report(supervisor, "api", "worker-1", number)
            broken = await event(supervisor, "link.broken", number)
            assert broken["after_s"] == (0.0, 0.2, 60.0)[number - 1]
        await until(lambda: not worker.is_running)
        for _ in range(50):
            report(supervisor, "worker-0", "worker-1", 3)
        await asyncio.sleep(0.5)
        assert worker.incarnation == 3 and supervisor.state == "degraded"
        assert [item["type"] for item in supervisor.events.ring].count("link.broken") == 3


async def test_a_link_that_brings_nothing_restarts_its_process_if_the_sender_runs(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        began, worker = time.monotonic(), supervisor.children["worker-1"]
        await until(lambda: worker.beats_since > 0)
        report(supervisor, "api", "worker-1", 1, silent_s=time.monotonic() - began + 15.0)
        assert supervisor.state == "ready", "it has not sent heartbeats for so long: its start explains the silence"
        worker.beat_at = time.monotonic()  # on a busy machine the last one may be too old
        worker.beats_since = worker.beat_at - 60.0
        report(supervisor, "api", "worker-1", 1, silent_s=15.0)
        broken = await event(supervisor, "link.broken")
        assert (broken["child"], broken["lost"], broken["silent_s"]) == ("worker-1", 0, 15.0)
        assert supervisor.reason == "messages between worker-1 and api do not arrive"
        await event(supervisor, "deployment.ready", 2)


async def test_a_process_whose_reports_were_lost_restarts(logged_spec: Any, play: Play, placer: ProcessPlacer) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        supervisor.on_break(LinkBreak("worker-1", 1, 2))
        broken = await event(supervisor, "link.broken")
        assert (broken["child"], broken["receiver"]) == ("worker-1", "supervisor")
        await event(supervisor, "deployment.ready", 2)
        assert supervisor.children["worker-1"].incarnation == 2


async def test_an_agent_whose_reports_were_lost_is_a_lost_host(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        reported = deaths_reported(supervisor)
        supervisor.on_break(LinkBreak("agent-b", 1, 2))
        lost = await event(supervisor, "host.lost")
        assert lost["why"] == "2 messages of its agent were lost with a connection"
        await event(supervisor, "host.fenced", incarnation=1)
        await event(supervisor, "deployment.ready", 2)
        assert placer.is_alive("b", 2) and supervisor.children["worker-1"].incarnation == 2
        assert reported == [("worker-1", True)], "no request can be the cause"
        os.kill(supervisor.children["worker-1"].pid, signal.SIGKILL)
        await event(supervisor, "deployment.ready", 3)
        assert reported[1:] == [("worker-1", False)]


def deaths_reported(supervisor: Supervisor) -> list[tuple[str, bool]]:
    """Return a list that grows with each reported death: the process, and whether it is excused."""
    reported: list[tuple[str, bool]] = []
    part = supervisor._outbound.part

    def noted(child: Child, cause: str, public: str, *, is_excused: bool = False) -> None:
        reported.append((child.name, is_excused))
        part(child, cause, public, is_excused=is_excused)

    supervisor._outbound.part = noted  # type: ignore[method-assign]
    return reported


async def test_an_agent_that_lacks_an_order_ends_and_is_a_lost_host(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        supervisor.hosts._courier._peers["agent-b"].link.sent()  # type: ignore[union-attr]  # a message that never left
        lost = await event(supervisor, "host.lost")
        assert lost["why"] in ("its agent has ended", "1 messages of its agent were lost with a connection")
        await event(supervisor, "deployment.ready", 2)


async def test_a_process_that_lacks_a_message_of_the_supervisor_restarts(
    logged_spec: Any, play: Play, placer: ProcessPlacer
) -> None:
    async with running(logged_spec(**two_hosts()), QUICK, placer=placer) as (supervisor, _):
        await event(supervisor, "deployment.ready")
        supervisor.hosts._courier._peers["worker-1"].link.sent()  # type: ignore[union-attr]  # a message that never left
        broken = await event(supervisor, "link.broken")
        assert (broken["child"], broken["sender"], broken["receiver"]) == ("worker-1", "supervisor", "worker-1")
        assert broken["lost"] == 1
        await event(supervisor, "deployment.ready", 2)
