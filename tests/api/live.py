"""An api in a separate thread, for tests that cannot be coroutines: property tests and blocking clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from mstar_core.plugin.spec import ModelSpec
from tests.api.conftest import LIMIT_S, Api, running
from tests.fakes.conductor import Script
from tests.fakes.tls import NO_AUTHORITIES


class LiveApi:
    """The api under test, reached over its port. client: for ordinary requests."""

    def __init__(self, api: Api, loop: asyncio.AbstractEventLoop) -> None:
        self.url = api.url
        self.client = httpx.Client(base_url=api.url, timeout=LIMIT_S, verify=NO_AUTHORITIES)
        self._api = api
        self._loop = loop

    def drop_connections(self) -> None:
        """Abort all connections, as a broken network does. Called in the loop of the api."""
        listener = self._api.process._listener
        assert listener is not None
        for connection in list(listener.connections):
            connection.drop()

    def end_sessions(self) -> None:
        """End all realtime sessions. Called in the loop of the api."""
        service = self._api.process._service
        assert service is not None
        for session in list(service.sessions):
            service.sessions.end(session.id)

    def assert_good(self) -> None:
        """Check that it serves a valid request and holds nothing of others."""
        answer = self.client.post("/generate", data={"text": "ok", "streaming": "false"})
        assert answer.status_code == 200, answer.text
        asyncio.run_coroutine_threadsafe(self._api.clean(), self._loop).result(LIMIT_S)


@contextmanager
def live_api(script: Script, model: ModelSpec, **changes: Any) -> Iterator[LiveApi]:
    """Run an api during the block."""
    started: list[LiveApi] = []
    failed: list[BaseException] = []
    is_up, ends = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with running(script, model=model, **changes) as api:
            started.append(LiveApi(api, asyncio.get_running_loop()))
            is_up.set()
            await ends.wait()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 raised in the test
            failed.append(error)
        finally:
            is_up.set()

    thread = threading.Thread(target=run, name="live-api")
    thread.start()
    is_up.wait(LIMIT_S)
    try:
        if failed:
            raise failed[0]
        yield started[0]
    finally:
        if started:
            started[0].client.close()
            started[0]._loop.call_soon_threadsafe(ends.set)
        thread.join(LIMIT_S)
    if failed:
        raise failed[0]
