"""Operations without a gap on real processes: under constant load every request ends whole, and none is refused.

A test leaves a shared deployment as it found it.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.parallel.test_failures import PAIRS
from tests.runtime.client import SURE, Streams, new_client, request, speak
from tests.runtime.deployment import LLM, PATIENT_S, SNAC, Deployment, plan, until
from tests.runtime.steady_load import SteadyLoad

REPLICAS = plan({0: (LLM, SNAC), 1: (LLM, SNAC)})


@pytest.fixture(scope="module")
def one() -> Iterator[Deployment]:
    """One replica."""
    with Deployment() as running:
        yield running


@pytest.fixture(scope="module")
def two() -> Iterator[Deployment]:
    """Two replicas."""
    with Deployment(where=REPLICAS) as running:
        yield running


def operation(deployment: Deployment) -> int:
    """Return the number of the latest operation, 0 before the first."""
    return int((deployment.admin("/v1/")["operation"] or {"number": 0})["number"])


async def ended(deployment: Deployment, number: int) -> dict[str, Any]:
    """Wait for the end of an operation and return its record."""

    def look() -> dict[str, Any] | None:
        latest = deployment.admin("/v1/")["operation"]
        return latest if latest and latest["number"] == number and latest["state"] != "running" else None

    return await asyncio.to_thread(until, look, "the end of the operation")


@pytest.mark.parametrize("replicas", ["one", "two"])
async def test_a_rolling_restart_under_load_fails_no_request(replicas: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(replicas)
    before, number = deployment.pids(), operation(deployment)
    async with SteadyLoad(deployment.url) as load:
        deployment.admin("/v1/deployment/restart?rolling=1", "POST")
        assert (await ended(deployment, number + 1))["error"] == ""
        await load.some_more(8)
    after = deployment.pids()
    assert not {name for name, pid in before.items() if name != "supervisor" and after[name] == pid}
    assert load.outcomes.keys() == {"whole"}
    assert len({heard.pcm for heard in load.heard}) == 1
    deployment.assert_clean()


def left(deployment: Deployment, rank: int) -> bool:
    """Return whether a cordoned rank has no request any more."""
    drained: list[int] = deployment.admin("/v1/")["drained_ranks"]
    return drained == [rank]


async def test_a_cordoned_rank_gets_no_request_until_it_is_uncordoned(two: Deployment) -> None:
    async with SteadyLoad(two.url) as load:
        two.admin("/v1/ranks/1/cordon", "POST")
        await asyncio.to_thread(until, lambda: two.admin("/v1/")["drained_ranks"] == [1], "an idle rank")
        steps, before = two.value("worker-1.steps"), -1.0
        while steps != before:  # the rank's last report comes a moment after its last step
            await load.some_more(12)
            before, steps = steps, two.value("worker-1.steps")
        await load.some_more(20)
        assert "cordoned" in two.shown("describe", "rank/1")
        assert two.admin("/v1/")["drained_ranks"] == [1]
        assert two.value("worker-1.steps") == steps
        two.admin("/v1/ranks/1/uncordon", "POST")
        await asyncio.to_thread(until, lambda: two.value("conductor.load.1"), "a request on rank 1")
    assert load.outcomes.keys() == {"whole"}


async def test_streams_beyond_the_drain_limit_go_on_at_another_replica() -> None:
    body = request(**SURE, max_output_tokens=700)
    with Deployment(where=REPLICAS, drain_timeout_s=0.3, hang_s=PATIENT_S) as deployment:
        async with new_client(deployment.url) as client:
            whole = await speak(client, body)
        pid = deployment.pids()["worker-1"]
        while not deployment.has_event("request.resumed"):  # all may have ended before the process was suspended
            async with Streams(deployment.url, [body] * 4) as streams:
                await streams.all_begun()
                deployment.kill(pid, signal.SIGSTOP)
                deployment.admin("/v1/ranks/1/cordon", "POST")
                await asyncio.to_thread(until, lambda: left(deployment, 1) or streams.have_ended, "an idle rank")
                deployment.kill(pid, signal.SIGCONT)
                heard = await streams.all_ended()
            deployment.admin("/v1/ranks/1/uncordon", "POST")
        assert deployment.has_event("rank.evicted", ranks=[1])
        assert [each.pcm == whole.pcm and each.is_whole for each in heard] == [True] * 4
        deployment.assert_clean()


async def test_groups_are_restarted_as_one_without_a_failed_request() -> None:
    with Deployment(where=PAIRS, hang_s=PATIENT_S) as deployment:
        async with SteadyLoad(deployment.url, clients=2) as load:
            deployment.admin("/v1/deployment/restart?rolling=1", "POST")
            record = await ended(deployment, 1)
            assert (record["error"], record["total"]) == ("", 4)
            await load.some_more(4)
        assert load.outcomes.keys() == {"whole"}
        spawned = [event["child"] for event in deployment.events() if event["type"] == "child.spawned"]
        assert spawned[-6:] == ["worker-0", "follower-1", "worker-2", "follower-3", "conductor", "api"]


async def test_replicas_that_join_and_leave_under_load_fail_no_request(one: Deployment) -> None:
    async with SteadyLoad(one.url) as load:
        await asyncio.to_thread(one.shown, "scale", one.name, "--replicas", "3")
        await load.some_more(40)
        for steps in ("worker-1.steps", "worker-2.steps"):
            await asyncio.to_thread(until, partial(one.value, steps), f"the first of {steps}")
        await asyncio.to_thread(one.shown, "set", "max_concurrent_requests=40")
        await asyncio.to_thread(one.shown, "scale", one.name, "--replicas", "1")
        await load.some_more(8)
    assert set(one.pids()) == {"supervisor", "conductor", "worker-0", "api"}
    assert load.outcomes.keys() == {"whole"}
    await asyncio.to_thread(until, lambda: one.admin("/v1/")["slots"] == 32, "the slots of one replica")
    settings = one.admin("/v1/config")["settings"]
    assert settings["max_concurrent_requests"]["source"] == "lowered from 40 as replicas left"
    one.assert_clean()
