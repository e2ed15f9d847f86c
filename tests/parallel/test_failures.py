"""Two tensor-parallel groups as replicas: choice by prefix and load; if one loses a member, the other one goes on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from mstar_core.config.deployment import GroupPlan, NodePlacement, Plan, RankPlan
from tests.parallel.test_served import serves
from tests.runtime.client import SURE, Heard, Streams, new_client, request, speak
from tests.runtime.deployment import LLM, SNAC, Deployment, until

LONG = request(**SURE, max_output_tokens=200)
HANG_S = 8.0

GROUPS = ((0, 1), (2, 3))
PAIRS = Plan(
    ranks=tuple(
        rank
        for leader, follower in GROUPS
        for rank in (
            RankPlan(rank=leader, device="cpu", nodes=(LLM, SNAC), memory_fraction=0.2),
            RankPlan(rank=follower, device="cpu", nodes=(), follows=(LLM,), memory_fraction=0.2),
        )
    ),
    placements=(
        NodePlacement(node=LLM, replicas=GROUPS, tp_size=2),
        NodePlacement(node=SNAC, replicas=tuple((leader,) for leader, _ in GROUPS)),
    ),
    groups=tuple(GroupPlan(ranks=ranks, nodes=(LLM,)) for ranks in GROUPS),
)
"""Two replicas, each of which is a group of two ranks."""

FIRST, SECOND = {"worker-0", "follower-1"}, {"worker-2", "follower-3"}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(where=PAIRS, hang_s=HANG_S) as made:
        yield made


@pytest.fixture
def pairs(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment with every process ready; probed for leaks afterwards."""
    until(lambda: deployment.admin("/v1")["state"] == "ready", "ready")
    yield deployment
    deployment.assert_clean()


def restarts(deployment: Deployment) -> int:
    return int(deployment.admin("/v1")["restarts"])


def renewed(deployment: Deployment, before: dict[str, int]) -> set[str]:
    """Return the processes that have been started again."""
    return {name for name, pid in deployment.pids().items() if before[name] != pid}


async def wanted_of(deployment: Deployment) -> bytes:
    """Return the sound of a long request."""
    async with new_client(deployment.url) as client:
        heard = await speak(client, LONG)
    assert heard.is_whole, heard.body
    return heard.pcm


def resumed(deployment: Deployment) -> int:
    """Return how many requests have been resumed so far."""
    return sum(event["type"] == "request.resumed" for event in deployment.events())


def deaths(deployment: Deployment, name: str) -> int:
    """Return how many times a process has been killed so far."""
    died = [event for event in deployment.events() if event["type"] == "child.died"]
    return sum(event["child"] == name and event["status"] == -signal.SIGKILL for event in died)


def are_whole(heard: list[Heard], sound: bytes) -> bool:
    """Return whether all requests have this sound and no error."""
    return all(each.is_whole and each.pcm == sound for each in heard)


async def test_equal_short_prompts_at_once_use_every_replica(pairs: Deployment) -> None:
    names = ["again-0", "again-1"]
    text = {"text": "a long story about a quick fox"}
    async with new_client(pairs.url) as client:
        assert (await speak(client, {**LONG, **text, "max_output_tokens": 1})).is_whole
    async with Streams(pairs.url, [{**LONG, **text, "request_id": name} for name in names]) as streams:
        heard = await streams.all_ended()
    assert len({each.pcm for each in heard}) == 1 and all(each.is_whole for each in heard)
    placed = [str(pairs.admin(f"/v1/requests/{name}/trace")["request"]["placed"]) for name in names]
    assert sorted(why.partition(":")[0] for why in placed) == ["rank 0", "rank 2"], placed
    assert "placed on rank " in pairs.shown("trace", names[0])
    assert "rank 2: least loaded" in pairs.shown("requests", "-o", "wide")


@pytest.mark.parametrize("victim", sorted(FIRST))
async def test_a_killed_member_ends_its_group_only_and_the_cause_is_shown(pairs: Deployment, victim: str) -> None:
    sound, before, pids, seen = await wanted_of(pairs), restarts(pairs), pairs.pids(), resumed(pairs)
    ranks, kills, known = pairs.snapshot()["ranks"], 0, deaths(pairs, victim)
    epochs = {rank: ranks[rank]["epoch"] for rank in ("0", "1", "2", "3")}
    while resumed(pairs) == seen:  # where this test had to wait for the processor, all may have ended before the kill
        async with Streams(pairs.url, [LONG] * 4) as streams:
            await streams.all_begun()
            pairs.kill(pairs.pids()[victim])
            kills += 1
            await asyncio.to_thread(until, lambda: deaths(pairs, victim) == known + kills, "the death")  # noqa: B023
            screens = [
                await asyncio.to_thread(pairs.shown, *words)
                for words in (
                    ("top", pairs.name, "--once"),
                    ("describe", f"deployment/{pairs.name}"),
                    ("events", pairs.name),
                )
            ]
            heard = await streams.all_ended()
        assert all(f"{victim} was killed by SIGKILL" in screen for screen in screens), screens
        assert are_whole(heard, sound)
        ranks = pairs.wait_again_ready(before + kills)["ranks"]
    assert resumed(pairs) <= seen + 2, "the other group takes the two of the lost one"
    assert renewed(pairs, pids) == FIRST
    moved = {rank: ranks[rank]["epoch"] - epoch for rank, epoch in epochs.items()}
    assert moved == {"0": kills, "1": kills, "2": 0, "3": 0}


@pytest.mark.parametrize("victim", ["follower-1", pytest.param("worker-0", marks=pytest.mark.slow)])
async def test_a_suspended_member_is_named_although_the_whole_group_waits(pairs: Deployment, victim: str) -> None:
    sound, before, pids, seen = await wanted_of(pairs), restarts(pairs), pairs.pids(), resumed(pairs)
    pairs.kill(pids[victim], signal.SIGSTOP)
    async with Streams(pairs.url, [LONG] * 4) as streams:
        heard = await streams.all_ended()
    assert are_whole(heard, sound)
    await asyncio.to_thread(until, lambda: resumed(pairs) == seen + 2, "the events of two requests")
    (hung,) = [event for event in pairs.events() if event["type"] == "child.hangs"][-1:]
    assert hung["child"] == victim
    died = [event for event in pairs.events() if event["type"] == "child.died"][-1]
    assert died["child"] == victim and "hung and was killed" in died["cause"]
    pairs.wait_again_ready(before + 1)
    assert renewed(pairs, pids) == FIRST


async def test_requests_are_served_while_an_idle_group_starts_again(pairs: Deployment) -> None:
    sound, before, pids = await serves(pairs), restarts(pairs), pairs.pids()
    pairs.kill(pids["follower-3"])
    await asyncio.to_thread(pairs.wait_event, "child.died", child="follower-3")
    assert await serves(pairs) == sound
    pairs.wait_again_ready(before + 1)
    assert renewed(pairs, pids) == SECOND


@pytest.mark.slow
async def test_groups_outlive_the_conductor_and_stay_in_lockstep(pairs: Deployment) -> None:
    sound, before, pids = await wanted_of(pairs), restarts(pairs), pairs.pids()
    async with Streams(pairs.url, [LONG] * 4) as streams:
        await streams.all_begun()
        pairs.kill(pids["conductor"])
        heard = await streams.all_ended()
    assert are_whole(heard, sound)
    pairs.wait_again_ready(before + 1)
    assert renewed(pairs, pids) == {"conductor"}
    async with Streams(pairs.url, [LONG] * 4) as streams:
        assert [each.pcm for each in await streams.all_ended()] == [sound] * 4
