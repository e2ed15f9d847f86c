"""AsyncHttp: sends calls with httpx on an event loop. Owned by AsyncMStarClient; loaded when one is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import httpx

from mstar_core.client.call import Call
from mstar_core.client.failure import MStarError, failure_of
from mstar_core.client.http import AGENT, LIMITS, failure_from, headers_of, request_of, timeout_of
from mstar_core.client.retry import wait_s


class AsyncHttp:
    """One server, over one httpx.AsyncClient. A session that the caller gave stays open; one made here is closed."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        session: Any = None,
        api_key: str | None = None,
        retries: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """session: None or an httpx.AsyncClient. Raises TypeError for anything else."""
        if session is not None and not isinstance(session, httpx.AsyncClient):
            raise TypeError(f"session is an httpx.AsyncClient, not {type(session).__name__}")
        self.base_url = base_url.rstrip("/")
        self._timeout = timeout_of(timeout_s)
        self._headers = headers_of(api_key)
        self._retries = retries
        self._sleep = sleep
        self._is_ours = session is None
        self._session: httpx.AsyncClient = session or httpx.AsyncClient(limits=LIMITS, headers={"User-Agent": AGENT})
        self._loop: asyncio.AbstractEventLoop | None = None  # of the calls; set by the first
        self._closing: set[asyncio.Task[None]] = set()

    async def fetch(self, call: Call) -> httpx.Response:
        """A whole answer with status 200. Raises MStarError."""
        response = await self.open(call)
        try:
            await response.aread()
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        finally:
            await response.aclose()
        return response

    async def open(self, call: Call) -> httpx.Response:
        """An answer with status 200 whose body is still to be read; the caller closes it. Raises MStarError."""
        self._loop = asyncio.get_running_loop()
        retries = 0 if call.is_probe else self._retries
        for attempt in count():
            try:
                return await self._once(call)
            except MStarError as error:
                pause_s = wait_s(error, attempt, retries)
                if pause_s is None:
                    raise
            await self._sleep(pause_s)
        raise AssertionError("count() has no end")

    async def chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises MStarError when the connection breaks or falls silent."""
        try:
            async for data in response.aiter_bytes():
                yield data
        except httpx.HTTPError as error:
            raise self._failure(error) from error

    async def on_thread(self, make: Callable[[], Call]) -> Call:
        """A call whose making reads files, which would hold up the loop."""
        return await asyncio.to_thread(make)

    def drop(self, response: httpx.Response) -> None:
        """Close an answer that nobody holds any more; safe from any thread, and after the loop has ended."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_soon, response)

    async def close(self) -> None:
        if self._closing:
            await asyncio.wait(set(self._closing))
        if self._is_ours:
            await self._session.aclose()

    def _close_soon(self, response: httpx.Response) -> None:
        task = asyncio.ensure_future(response.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _once(self, call: Call) -> httpx.Response:
        request = request_of(self._session, self.base_url, call, self._headers, self._timeout)
        try:
            response = await self._session.send(request, stream=True)
            if response.status_code == 200:
                return response
            try:
                await response.aread()
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise self._failure(error) from error
        raise failure_of(response)

    def _failure(self, error: httpx.HTTPError) -> MStarError:
        return failure_from(error, self.base_url, self._timeout.read or 0.0)
