"""How deployments end: asked to, with streams under way, or without their supervisor; and that they can start again."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.client import SURE, Streams, new_client, request, speak
from tests.runtime.deployment import Deployment, until

LONG = request(**SURE, max_output_tokens=500)
STREAMS, SLOTS = 32, 8
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
            first.kill(first.pids()["supervisor"])
            until(lambda: not first.processes(), "the end of every process", 5.0)
            heard = await streams.all_ended(5)
        assert all(each.cut and each.done is None for each in heard)
        assert first.run.path.exists(), "nobody was left to take it away"
    with Deployment(root=root, max_concurrent_requests=SLOTS, max_queue=STREAMS) as second:
        second.assert_clean()
        await drains(second)
    second.assert_gone()


async def drains(deployment: Deployment) -> None:
    """SIGTERM in the middle of streams: they end whole, queued ones too, new ones are refused, the exit status is 0."""
    body = request(**SURE, max_output_tokens=80)
    async with Streams(deployment.url, [body] * STREAMS) as streams, new_client(deployment.url) as client:
        until_all = asyncio.create_task(streams.all_begun())
        await asyncio.wait([asyncio.create_task(streams.heard[0].first.wait())])
        await asyncio.to_thread(until, lambda: deployment.value("api.requests_waiting") >= STREAMS // 4, "a queue")
        assert deployment.process is not None
        deployment.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(deployment.wait_event, "deployment.draining", 5.0)
        ready = await client.get("/ready")
        late = await speak(client, request(**SURE, max_output_tokens=30))
        heard = await streams.all_ended()
        await until_all
    assert ready.status_code == 503
    assert (late.status, late.code) == (503, "draining") and int(late.headers["retry-after"]) > 0
    assert all(each.is_whole for each in heard) and len({each.pcm for each in heard}) == 1
    assert await asyncio.to_thread(deployment.wait_ended) == 0
    assert deployment.outcome()["exit_code"] == 0 and deployment.outcome()["cause"] is None


async def test_a_second_sigterm_ends_at_once_and_tells_the_clients() -> None:
    with Deployment() as deployment:
        async with Streams(deployment.url, [LONG] * 3) as streams:
            await streams.all_begun()
            assert deployment.process is not None
            deployment.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(deployment.wait_event, "deployment.draining", 5.0)
            deployment.process.send_signal(signal.SIGTERM)
            heard = await streams.all_ended(10)
        assert all(each.done is None and (each.errors or each.cut) for each in heard)
        assert all(error["code"] == "draining" for each in heard for error in each.errors)
        assert await asyncio.to_thread(deployment.wait_ended) == 0
        deployment.assert_gone()
