"""Comments of a load in the stream of a request that waits for it."""

from __future__ import annotations

import asyncio

from mstar_core.errors import Unavailable
from mstar_core.gateway.door.waiting import comment
from mstar_core.gateway.parts import LoadProgress, ModelState
from tests.fakes.deployments import FakeDeployment
from tests.fakes.gateway import Opened

CHAT = {"model": "llm", "messages": [], "stream": True}


def test_a_comment_is_one_line() -> None:
    progress = LoadProgress(state=ModelState.LOADING, text="weights\ndata: forged", share=0.4)
    assert comment(progress) == b": loading 40 % weights data: forged\n\n"


async def test_a_stream_shows_the_load_before_its_first_event(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"))
    gateway.fleet.wake = asyncio.Event()
    async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert await response.content.readany() == b": loading weights\n\n"
        gateway.fleet.wake.set()
        assert b'"by": "llm"' in await response.content.read()


async def test_a_failed_load_ends_the_stream_with_an_error(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"))
    gateway.fleet.wake = asyncio.Event()
    gateway.fleet.error = Unavailable("no memory is free", "omni holds it", "retry later", retry_after_s=7)
    async with gateway.session.post(f"{gateway.url}/v1/chat/completions", json=CHAT) as response:
        await response.content.readany()
        gateway.fleet.wake.set()
        assert (await response.content.read()).startswith(b'data: {"error":{"message":"no memory is free')


async def test_other_requests_wait_silently_and_keep_their_status(opened: Opened) -> None:
    gateway = await opened(FakeDeployment("llm"))
    gateway.fleet.wake = asyncio.Event()
    gateway.fleet.error = Unavailable("no memory is free", hint="retry later", retry_after_s=7)
    post = gateway.session.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": False})
    waiting = asyncio.ensure_future(post)
    await asyncio.sleep(0)
    gateway.fleet.wake.set()
    async with await waiting as response:
        assert response.status == 503 and response.headers["Retry-After"] == "7"
