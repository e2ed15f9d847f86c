"""Tensor parallelism over HTTP on two CPU ranks: the same answers as one rank, and what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mstar_core.config.deployment import GroupPlan, NodePlacement, Plan, RankPlan
from tests.runtime.client import SURE, new_client, request, speak
from tests.runtime.deployment import LLM, SNAC, Deployment, until
from tests.runtime.test_sleep import order

SHORT = request(**SURE, max_output_tokens=60)
TP2 = Plan(
    ranks=(
        RankPlan(rank=0, device="cpu", nodes=(LLM, SNAC), memory_fraction=0.4),
        RankPlan(rank=1, device="cpu", nodes=(), follows=(LLM,), memory_fraction=0.4),
    ),
    placements=(
        NodePlacement(node=LLM, replicas=((0, 1),), tp_size=2),
        NodePlacement(node=SNAC, replicas=((0,),)),
    ),
    groups=(GroupPlan(ranks=(0, 1), nodes=(LLM,)),),
)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(where=TP2) as made:
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


def test_ranks_show_their_group(deployment: Deployment) -> None:
    ranks = deployment.snapshot()["ranks"]
    assert (ranks["0"]["group"], ranks["1"]["group"]) == ([0, 1], [0, 1])
    assert ranks["1"]["follows"] == [LLM] and ranks["1"].get("nodes", []) == [] and ranks["1"]["state"] == "ready"
    assert ranks["0"]["epoch"] == ranks["1"]["epoch"] >= 1
    assert until(lambda: deployment.snapshot()["ranks"]["1"].get("plans", 0), "plans of the follower") > 0


@pytest.mark.parametrize("level", [1, 2])
async def test_a_group_sleeps_and_wakes_as_one(deployment: Deployment, level: int) -> None:
    before = await serves(deployment)
    head = await asyncio.to_thread(order, deployment, "sleep", level=level, nodes=[LLM])
    ranks = deployment.snapshot()["ranks"]
    assert head["asleep"] == ranks["0"]["asleep"] == ranks["1"]["asleep"] == [LLM]
    assert (ranks["0"]["state"], ranks["1"]["state"]) == ("ready", "sleeping")
    assert ranks["0"]["given_back_bytes"] and ranks["1"]["given_back_bytes"]
    assert await serves(deployment) == before
    assert deployment.admin("/v1/")["asleep"] == []
