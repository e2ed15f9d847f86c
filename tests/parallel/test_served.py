"""Tensor parallelism over HTTP on two CPU ranks: the same answers as one rank, failures with their cause, recovery."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from mstar_core.config.deployment import GroupPlan, NodePlacement, Plan, RankPlan
from tests.runtime.client import SURE, Streams, new_client, request, speak
from tests.runtime.deployment import LLM, SNAC, Deployment, until

LONG = request(**SURE, max_output_tokens=2000)
TOLD_S = 8.0
"""Clients are promised 2 s on a machine that has time."""

SHORT = request(**SURE, max_output_tokens=60)
TP2 = Plan(
    ranks=(
        RankPlan(rank=0, device="cpu", nodes=(LLM, SNAC), memory_fraction=0.4),
        RankPlan(rank=1, device="cpu", nodes=(), follows=(LLM,), memory_fraction=0.4),
    ),
    placements=(
        NodePlacement(node=LLM, replicas=((0, 1),), tp_size=2), NodePlacement(node=SNAC, replicas=((0,),)),
    ),
    groups=(GroupPlan(ranks=(0, 1), nodes=(LLM,)),),
)  # fmt: skip


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(where=TP2, hang_s=10.0) as made:
        yield made


async def test_two_ranks_speak_as_one_does(deployment: Deployment) -> None:
    with Deployment() as one:
        wanted = await serves(one)
    assert await serves(deployment) == wanted
    assert set(deployment.pids()) == {"supervisor", "conductor", "api", "worker-0", "follower-1"}
    assert deployment.complaints() == []


async def serves(deployment: Deployment) -> bytes:
    async with new_client(deployment.url) as client:
        heard = await speak(client, SHORT)
    assert heard.is_whole, heard.body
    return heard.pcm


@pytest.mark.parametrize("victim", ["follower-1", "worker-0"])
async def test_a_killed_member_ends_its_group_with_the_cause(deployment: Deployment, victim: str) -> None:
    wanted, before = await serves(deployment), int(deployment.admin("/v1")["restarts"])
    async with Streams(deployment.url, [LONG] * 2) as streams:
        await streams.all_begun()
        killed_s = time.monotonic()
        deployment.kill(deployment.pids()[victim])
        heard = await streams.all_ended()
    for each in heard:
        assert [error["code"] for error in each.errors] == ["worker_lost"]
        assert "worker 0" in each.errors[0]["message"] and each.done is None
        assert each.ended_s - killed_s < TOLD_S
    died = [event for event in deployment.events() if event["type"] == "child.died"]
    assert died[-1]["child"] == victim and "SIGKILL" in died[-1]["cause"]
    deployment.wait_again_ready(before + 1)
    assert await serves(deployment) == wanted
    deployment.assert_clean()


async def test_a_stalled_follower_ends_its_group(deployment: Deployment) -> None:
    wanted, before = await serves(deployment), int(deployment.admin("/v1")["restarts"])
    async with Streams(deployment.url, [LONG]) as streams:
        await streams.all_begun()
        deployment.kill(deployment.pids()["follower-1"], signal.SIGSTOP)
        (heard,) = await streams.all_ended()
    assert [error["code"] for error in heard.errors] == ["worker_lost"]
    deployment.wait_again_ready(before + 1)
    assert await serves(deployment) == wanted


def test_ranks_show_their_group(deployment: Deployment) -> None:
    ranks = deployment.snapshot()["ranks"]
    assert (ranks["0"]["group"], ranks["1"]["group"]) == ([0, 1], [0, 1])
    assert ranks["1"]["follows"] == [LLM] and ranks["1"].get("nodes", []) == [] and ranks["1"]["state"] == "ready"
    assert ranks["0"]["epoch"] == ranks["1"]["epoch"] >= 1
    assert until(lambda: deployment.snapshot()["ranks"]["1"].get("plans", 0), "plans of the follower") > 0
