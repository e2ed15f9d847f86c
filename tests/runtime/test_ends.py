"""Ends of deployments: on request, with open streams, or without their supervisor; and a new start afterwards."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tests.runtime.client import LIMIT_S, SURE, Streams, new_client, request, speak
from tests.runtime.deployment import PATIENT_S, Deployment, until

LONG = request(**SURE, max_output_tokens=2000)
"""Longer than any test here waits: what ends it is the end of the deployment."""

STREAMS, SLOTS = 24, 8
"""Of the streams that a drain meets, all but so many wait in the queue."""


@pytest.fixture
def root() -> Iterator[Path]:
    """A runtime folder that several starts share."""
    made = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


async def test_a_killed_supervisor_takes_everything_along_and_the_name_is_free(root: Path) -> None:
    with Deployment(root=root) as first:
        async with Streams(first.url, [LONG] * 3) as streams:
            await streams.all_begun()
            with first.paused("worker-0"):  # so that no stream ends before
                first.kill(first.pids()["supervisor"])
                await asyncio.to_thread(until, lambda: not first.processes(), "the end of every process")
            heard = await streams.all_ended()
        assert all(each.cut and each.done is None for each in heard)
        assert first.run.path.exists(), "no process was left to remove it"
    with Deployment(root=root, max_concurrent_requests=SLOTS, max_queue=STREAMS, hang_s=PATIENT_S) as second:
        second.assert_clean()
        await drains(second)
    second.assert_gone()


async def drains(deployment: Deployment) -> None:
    """SIGTERM in the middle of streams: they end whole, queued ones too, new ones are refused, the exit status is 0."""
    body, long = request(**SURE, max_output_tokens=48), request(**SURE, max_output_tokens=200)
    async with Streams(deployment.url, [long]) as begun, AsyncExitStack() as stack:
        await begun.all_begun()
        with deployment.paused("worker-0"):  # so that no stream ends before the drain has been looked at
            streams = await stack.enter_async_context(Streams(deployment.url, [body] * STREAMS))
            client = await stack.enter_async_context(new_client(deployment.url))
            await asyncio.to_thread(
                until, lambda: deployment.value("api.requests_waiting") >= STREAMS - SLOTS, "a queue"
            )
            assert deployment.process is not None
            deployment.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(deployment.wait_event, "deployment.draining")
            ready = f"{deployment.url}/ready"  # the api learns of it a moment after the event is written
            await asyncio.to_thread(until, lambda: httpx.get(ready, timeout=LIMIT_S).status_code == 503, "refusal")
            late = await speak(client, request(**SURE, max_output_tokens=30))
        heard = await streams.all_ended()
        assert (await begun.all_ended())[0].is_whole
    assert (late.status, late.code) == (503, "draining") and int(late.headers["retry-after"]) > 0
    assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
    assert await asyncio.to_thread(deployment.wait_ended) == 0
    assert deployment.outcome()["exit_code"] == 0 and deployment.outcome()["cause"] is None


async def test_a_second_sigterm_ends_at_once_and_tells_the_clients() -> None:
    with Deployment(hang_s=PATIENT_S) as deployment:
        async with Streams(deployment.url, [LONG] * 3) as streams:
            await streams.all_begun()
            assert deployment.process is not None
            with deployment.paused("worker-0"):  # so that no stream ends before
                deployment.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(deployment.wait_event, "deployment.draining")
                deployment.process.send_signal(signal.SIGTERM)
                await asyncio.to_thread(deployment.wait_event, "deployment.stopping")
            heard = await streams.all_ended()
        assert all(each.done is None and (each.errors or each.cut) for each in heard)
        assert all(error["code"] == "draining" for each in heard for error in each.errors)
        assert await asyncio.to_thread(deployment.wait_ended) == 0
        deployment.assert_gone()
