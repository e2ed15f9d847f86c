"""Requests with random ends over a deployment whose caches and streams cross ranks: afterwards nothing is held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import pytest

from mstar_core.config.deployment import NodePlacement, Plan, RankPlan
from tests.runtime.crowd import Crowd, descriptors
from tests.runtime.deployment import LLM, SNAC, Deployment, until

SEED: Final = 18
WARM: Final = 30
"""Requests after which every connection of the processes is open."""

APART: Final = Plan(
    ranks=(
        RankPlan(rank=0, device="cpu", nodes=(LLM,)),
        RankPlan(rank=1, device="cpu", nodes=(LLM,)),
        RankPlan(rank=2, device="cpu", nodes=(SNAC,)),
    ),
    placements=(
        NodePlacement(node=LLM, replicas=((0,),), walks=("prefill",)),
        NodePlacement(node=LLM, replicas=((1,),), walks=("decode",)),
        NodePlacement(node=SNAC, replicas=((2,),)),
    ),
)
"""Prefill, decode and vocoder on ranks of their own: caches move, and streams cross ranks."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(name="apart", where=APART, max_concurrent_requests=8, max_queue=8) as made:
        yield made


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [90, pytest.param(1000, marks=pytest.mark.slow)])
async def test_requests_with_random_ends_leave_nothing(count: int, deployment: Deployment) -> None:
    crowd = Crowd(deployment, SEED)
    await crowd.run(WARM)
    await asyncio.to_thread(deployment.assert_clean)
    open_before = descriptors(deployment)
    await crowd.run(count - WARM)
    await asyncio.to_thread(deployment.assert_clean)

    def has_closed() -> bool:
        return all(now <= open_before[name] + 4 for name, now in descriptors(deployment).items())

    await asyncio.to_thread(until, has_closed, "the end of every connection")
    print(f"seed {SEED}, {count} requests, outcomes {dict(crowd.outcomes)}")
    assert sum(crowd.outcomes.values()) == count
    assert {"whole", "left", "cancelled"} <= crowd.outcomes.keys(), crowd.outcomes
    assert deployment.value("worker-0.moves_sent") >= deployment.value("worker-1.moves_received") > 0
    assert deployment.admin("/v1")["restarts"] == 0
    assert deployment.complaints() == [], "no end of a request is an error of the server"
