"""Bodies: limits, slow ones, and those that are held in memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import pytest

from mstar_core.gateway.door import ask
from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Opened

JSON = {"Content-Type": "application/json"}


async def test_a_body_over_the_limit_is_refused_before_it_is_read(opened: Opened) -> None:
    fake = FakeDeployment("llm")
    gateway = await opened(fake, max_body_bytes=2048)
    status, answer = await gateway.json("POST", "/v1/completions", data=b"x" * 4096, headers=JSON)
    assert (status, answer["error"]["code"]) == (413, "over_capacity")
    assert not fake.received


async def test_a_body_without_a_length_is_cut_at_the_limit(opened: Opened) -> None:
    fake = FakeDeployment("llm")
    gateway = await opened(fake, max_body_bytes=300_000)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    status, answer = await gateway.json("POST", "/v1/completions", data=endless(), headers=JSON)
    assert (status, answer["error"]["code"]) == (413, "over_capacity")


async def test_a_large_body_streams_to_the_deployment_while_it_arrives(opened: Opened) -> None:
    fake = FakeDeployment("llm")
    begun = asyncio.Event()
    echo = fake.echo

    async def answer(request):  # type: ignore[no-untyped-def]  # passes the request on
        begun.set()
        return await echo(request)

    fake.handler = answer
    gateway = await opened(fake)

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": "llm", "pad": "' + b"x" * 100_000
        await asyncio.wait_for(begun.wait(), 60)  # the deployment has the beginning before the client sends the end
        yield b'"}'

    status, answer = await gateway.json("POST", "/v1/completions", data=body(), headers=JSON)
    assert (status, answer["size"]) == (200, 100_027)


async def test_a_body_that_does_not_arrive_ends_with_408(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "LOOK_S", 0.05)
    gateway = await opened(FakeDeployment("llm"))

    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    status, answer = await gateway.json("POST", "/v1/completions", data=stuck(), headers=JSON)
    assert (status, answer["error"]["code"]) == (408, "slow_upload")


async def test_held_bodies_have_a_budget(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "HELD_BYTES", 100_000)
    gateway = await opened(FakeDeployment("llm"), FakeDeployment("omni"))
    body = io.BytesIO(b'{"pad": "' + b"x" * 4_000_000 + b'", "model": "llm"}')
    status, answer = await gateway.json("POST", "/v1/completions", data=body, headers=JSON)
    assert (status, answer["error"]["code"]) == (503, "bodies_held")
    assert gateway.door.held.now == 0


async def test_expect_100_continue_is_answered(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"))
    status, answer = await gateway.json("POST", "/v1/completions", data=b"{}", headers=JSON, expect100=True)
    assert (status, answer["size"]) == (200, 2)
