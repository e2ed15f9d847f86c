"""Processes that die or stop in the middle of streams: requests that are resumed, other requests, leftovers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from tests.runtime.client import SURE, Heard, Streams, new_client, request, speak
from tests.runtime.deployment import LLM, SNAC, Deployment, plan, until

HANG_S = 10.0
"""The watchdog's patience."""

PAUSE_S = 1.0

SOME = request(**SURE, max_output_tokens=300)
SHORT = request(**SURE, max_output_tokens=60)
TWO = plan({0: (LLM, SNAC), 1: (LLM, SNAC)})
"""Two workers, each with a replica of everything."""


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment(where=TWO, hang_s=HANG_S) as made:
        yield made


@pytest.fixture
def whole(deployment: Deployment) -> Iterator[Deployment]:
    """The deployment with every process ready; probed for leaks afterwards."""
    until(lambda: deployment.admin("/v1")["state"] == "ready", "ready")
    yield deployment
    deployment.assert_clean()


def restarts(deployment: Deployment) -> int:
    return int(deployment.admin("/v1")["restarts"])


def resumed_requests(deployment: Deployment) -> int:
    """Return how many requests have been resumed so far."""
    return sum(event["type"] == "request.resumed" for event in deployment.events())


async def serves(deployment: Deployment) -> bytes:
    async with new_client(deployment.url) as client:
        heard = await speak(client, SHORT)
    assert heard.is_whole, heard.body
    return heard.pcm


async def test_kill_a_worker(whole: Deployment) -> None:
    wanted, before, resumed = await serves(whole), restarts(whole), 0
    while not resumed:  # where this test had to wait for the processor, all may have ended before the kill
        pid, seen = whole.wait_again_ready(before)["children"]["worker-1"]["pid"], resumed_requests(whole)
        async with Streams(whole.url, [SOME] * 6) as streams:
            await streams.all_begun()
            whole.kill(pid)
            heard = await streams.all_ended()
        before += 1
        assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
        resumed = resumed_requests(whole) - seen
    assert resumed <= 3, "the other worker's requests go on"
    after = whole.wait_again_ready(before)
    assert after["children"]["worker-1"]["incarnation"] >= 2
    assert await serves(whole) == wanted


async def test_kill_the_conductor(whole: Deployment) -> None:
    wanted, before, resumed, pids = await serves(whole), restarts(whole), 0, dict[str, int]()
    while not resumed:  # where this test had to wait for the processor, all may have ended before the kill
        pids, seen = whole.pids(), resumed_requests(whole)
        async with Streams(whole.url, [SOME] * 6) as streams:
            await streams.all_begun()
            whole.kill(pids["conductor"])
            heard = await streams.all_ended()
        before += 1
        assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
        whole.wait_again_ready(before)
        resumed = resumed_requests(whole) - seen
    assert {name: pid for name, pid in whole.pids().items() if pids[name] != pid}.keys() == {"conductor"}
    assert await serves(whole) == wanted


async def test_kill_the_api(whole: Deployment) -> None:
    wanted, before = await serves(whole), restarts(whole)
    async with Streams(whole.url, [SOME] * 6) as streams:
        await streams.all_begun()
        whole.kill(whole.pids()["api"])
        heard = await streams.all_ended()
    assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
    whole.wait_again_ready(before + 1)
    assert await serves(whole) == wanted


async def test_kill_a_pool_process(whole: Deployment) -> None:
    wanted, pids = await serves(whole), whole.pids()
    pool = [p.pid for p in whole.processes() if p.parent == pids["api"] and "spawn_main" in p.command]
    assert pool
    for pid in pool:
        whole.kill(pid)
    heard = Heard(status=0)
    while not heard.is_whole:  # a request that meets the death itself may be refused, never left hanging
        async with new_client(whole.url) as client:
            heard = await speak(client, SHORT)
        assert heard.is_whole or heard.code, heard.body
    assert heard.pcm == wanted and whole.pids() == pids


@pytest.mark.parametrize("name", ["api", "conductor", "worker-0"])
async def test_a_process_that_pauses_does_no_harm(name: str, whole: Deployment) -> None:
    wanted, pids = await serves(whole), whole.pids()
    async with Streams(whole.url, [request(**SURE, max_output_tokens=120)] * 3) as streams:
        await streams.all_begun()
        whole.kill(pids[name], signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        whole.kill(pids[name], signal.SIGCONT)
        heard = await streams.all_ended()
    assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
    assert whole.pids() == pids and await serves(whole) == wanted


@pytest.mark.parametrize("name", ["api", "conductor"])
async def test_a_process_that_stops_for_good_is_replaced(name: str, whole: Deployment) -> None:
    wanted, before, pids = await serves(whole), restarts(whole), whole.pids()
    async with Streams(whole.url, [SOME] * 2) as streams:
        await streams.all_begun()
        whole.kill(pids[name], signal.SIGSTOP)
        heard = await streams.all_ended()
    assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
    await asyncio.to_thread(whole.wait_event, "child.hangs", child=name)  # the streams may have ended before it stopped
    whole.wait_again_ready(before + 1)
    assert {child for child, pid in whole.pids().items() if pids[child] != pid} == {name}
    assert await serves(whole) == wanted


async def test_a_stopped_worker_is_seen_as_a_hang(whole: Deployment) -> None:
    wanted, before = await serves(whole), restarts(whole)
    pid = whole.pids()["worker-0"]
    whole.kill(pid, signal.SIGSTOP)
    async with Streams(whole.url, [SOME] * 2) as streams:
        heard = await streams.all_ended()
    assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
    await asyncio.to_thread(whole.wait_event, "child.hangs", child="worker-0")
    whole.wait_again_ready(before + 1)
    assert pid not in {process.pid for process in whole.processes()}
    assert await serves(whole) == wanted
