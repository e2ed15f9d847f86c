"""Sleep and wake of a real deployment: the answers before and after are equal, and the memory is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.runtime.client import SURE, Streams, new_client, request, speak
from tests.runtime.deployment import LLM, PATIENT_S, SNAC, Deployment, plan, until

BODY = request(**SURE, max_output_tokens=40)


@pytest.fixture(scope="module")
def slept() -> Iterator[Deployment]:
    """Two ranks: the language model on one, the codec on the other."""
    with Deployment(where=plan({0: (LLM,), 1: (SNAC,)}), hang_s=PATIENT_S) as running:
        yield running


def order(deployment: Deployment, verb: str, **body: Any) -> dict[str, Any]:
    """Send an order, wait for its end, and return the head."""
    number = deployment.admin(f"/v1/deployment/{verb}", "POST", body)["operation"]["number"]

    def ended() -> dict[str, Any] | None:
        head: dict[str, Any] = deployment.admin("/v1/")
        latest = head["operation"]
        return head if latest["number"] != number or latest["state"] != "running" else None

    head = until(ended, f"the end of {verb}")
    assert head["operation"]["error"] == ""
    return head


async def said(deployment: Deployment) -> bytes:
    async with new_client(deployment.url) as client:
        heard = await speak(client, BODY)
    assert heard.is_whole, (heard.body, heard.errors)
    return heard.pcm


@pytest.mark.parametrize("level", [1, 2])
async def test_a_request_wakes_a_deployment_and_gets_the_same_answer(slept: Deployment, level: int) -> None:
    before = await said(slept)
    head = await asyncio.to_thread(order, slept, "sleep", level=level)
    assert (head["state"], head["sleep_level"], head["asleep"]) == ("sleeping", level, [LLM, SNAC])
    ranks = slept.snapshot()["ranks"]
    assert {rank["state"] for rank in ranks.values()} == {"sleeping"}
    assert all(rank["given_back_bytes"] > 0 for rank in ranks.values())
    assert head["given_back_bytes"] == sum(rank["given_back_bytes"] for rank in ranks.values())
    assert all((rank["kept_bytes"] > 0) == (level == 1) for rank in ranks.values())
    async with new_client(slept.url) as client:
        assert (await client.get("/ready")).json()["status"] == "sleeping"
    assert "sleeping" in slept.shown("ps")
    assert await said(slept) == before

    def awake() -> dict[str, Any] | None:  # the answer may come before the end of the operation
        head: dict[str, Any] = slept.admin("/v1/")
        facts = [head[name] for name in ("state", "asleep", "given_back_bytes", "sleep_level")]
        return head if facts == ["ready", [], 0, 0] else None

    head = await asyncio.to_thread(until, awake, "the end of the wake")
    assert head["woke_at"] >= head["slept_at"]
    slept.assert_clean()


async def test_nodes_sleep_and_wake_alone(slept: Deployment) -> None:
    before = await said(slept)
    head = await asyncio.to_thread(order, slept, "sleep", nodes=[SNAC])
    assert (head["state"], head["asleep"]) == ("ready", [SNAC])
    states = {key: rank["state"] for key, rank in slept.snapshot()["ranks"].items()}
    assert states == {"0": "ready", "1": "sleeping"}
    wakes = head["wakes"]
    assert await said(slept) == before
    await asyncio.to_thread(until, lambda: slept.admin("/v1/")["asleep"] == [], "the end of the wake")
    assert slept.admin("/v1/")["wakes"] == wakes + 1
    slept.assert_clean()


async def test_a_running_request_refuses_a_sleep_by_name(slept: Deployment) -> None:
    body = request(**SURE, max_output_tokens=2000, request_id="long-1")

    def is_known() -> bool:  # to the supervisor, which hears of requests ten times a second
        return any(item["id"] == "long-1" and item["ended"] is None for item in slept.admin("/v1/requests")["items"])

    async with Streams(slept.url, [body]) as streams:
        await streams.all_begun()
        await asyncio.to_thread(until, is_known, "the request")
        for order_body in ({}, {"nodes": [LLM]}):
            with pytest.raises(httpx.HTTPStatusError) as refused:
                slept.admin("/v1/deployment/sleep", "POST", order_body)
            assert refused.value.response.status_code == 409
            assert "long-1" in refused.value.response.json()["detail"]
    slept.assert_clean()


async def test_a_worker_that_dies_asleep_comes_back_awake(slept: Deployment) -> None:
    before = await said(slept)
    head = await asyncio.to_thread(order, slept, "sleep")
    restarts = head["restarts"]
    slept.kill(slept.pids()["worker-0"])
    await asyncio.to_thread(slept.wait_again_ready, restarts + 1)
    assert slept.admin("/v1/")["asleep"] == []
    assert await said(slept) == before
    slept.assert_clean()
