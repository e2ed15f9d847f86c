"""HTTP exchange of the clients over httpx: requests, retries, errors. Loaded when a client is made.

`Http` is written once, as coroutines. On an `AsyncSession` they wait in the caller's event loop. On a `SyncSession` no
await ever suspends, so `sync_client.run` drives them to their end without a loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final, TypeVar

import httpx

from mstar_core.client.calls import HttpCall
from mstar_core.client.errors import ClientError, cut, error_of_response, retry_delay_s, silent, unreachable
from mstar_core.version import __version__

T = TypeVar("T")
CONNECT_S: Final = 10.0
LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=32)
"""Connections are not limited here; the server's queue limits concurrency."""

HEADERS: Final = {"User-Agent": f"mstar-python/{__version__}"}

CHUNK_BYTES: Final = 64 * 1024
HTTPX_HEADERS: Final = frozenset(
    ("accept-encoding", "connection", "content-length", "host", "transfer-encoding", "user-agent")
)
"""Headers that httpx adds by itself; the session sends its own instead."""

CONNECT_REASONS: Final = frozenset(("NewConnectionError", "NameResolutionError", "ConnectTimeoutError"))
"""Reasons of urllib3 inside a requests.ConnectionError that mean that nothing was sent."""


class SyncSession:
    """An httpx.Client, or a requests.Session behind one. A caller's session stays open; one made here is closed."""

    def __init__(self, session: Any = None, sleep: Callable[[float], None] = time.sleep) -> None:
        """session: None, an httpx.Client, or a requests.Session. Raises TypeError for anything else."""
        self._is_ours = not isinstance(session, httpx.Client)
        self._sleep = sleep
        if session is None:
            session = httpx.Client(limits=LIMITS, headers=HEADERS)
        elif is_requests_session(session):
            session = httpx.Client(transport=RequestsTransport(session))
        elif self._is_ours:
            raise TypeError(f"session must be an httpx.Client or a requests.Session, not {type(session).__name__}")
        self.client: httpx.Client = session

    async def send(self, request: httpx.Request) -> httpx.Response:
        """Send a request and return the response, its body still to be read."""
        return self.client.send(request, stream=True)

    async def read(self, response: httpx.Response) -> None:
        """Read the whole body."""
        response.read()

    def body(self, response: httpx.Response) -> Iterator[bytes]:
        """Return an iterator of the body for `next_chunk`."""
        return response.iter_bytes()

    async def next_chunk(self, body: Iterator[bytes]) -> bytes | None:
        """Return the next bytes of a body, None at its end."""
        return next(body, None)

    async def close_response(self, response: httpx.Response) -> None:
        response.close()

    def drop(self, response: httpx.Response) -> None:
        """Close a response that has no owner left; called by the garbage collector, from any thread."""
        response.close()

    async def call_in_thread(self, make: Callable[[], T]) -> T:
        """Call a function that reads files, without blocking an event loop."""
        return make()

    async def sleep(self, seconds: float) -> None:
        self._sleep(seconds)

    async def close(self) -> None:
        if self._is_ours:
            self.client.close()


class AsyncSession:
    """An httpx.AsyncClient, for one event loop. A caller's session stays open; one made here is closed."""

    def __init__(self, session: Any = None, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """session: None or an httpx.AsyncClient. Raises TypeError for anything else."""
        if session is not None and not isinstance(session, httpx.AsyncClient):
            raise TypeError(f"session must be an httpx.AsyncClient, not {type(session).__name__}")
        self._is_ours = session is None
        self._sleep = sleep
        self.client: httpx.AsyncClient = session or httpx.AsyncClient(limits=LIMITS, headers=HEADERS)
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the first request
        self._closing: set[asyncio.Task[None]] = set()

    async def send(self, request: httpx.Request) -> httpx.Response:
        self._loop = asyncio.get_running_loop()
        return await self.client.send(request, stream=True)

    async def read(self, response: httpx.Response) -> None:
        await response.aread()

    def body(self, response: httpx.Response) -> AsyncIterator[bytes]:
        return response.aiter_bytes()

    async def next_chunk(self, body: AsyncIterator[bytes]) -> bytes | None:
        return await anext(body, None)

    async def close_response(self, response: httpx.Response) -> None:
        await response.aclose()

    def drop(self, response: httpx.Response) -> None:
        if not response.is_closed and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._close_soon, response)

    async def call_in_thread(self, make: Callable[[], T]) -> T:
        return await asyncio.to_thread(make)

    async def sleep(self, seconds: float) -> None:
        await self._sleep(seconds)

    async def close(self) -> None:
        if self._closing:
            await asyncio.wait(set(self._closing))
        if self._is_ours:
            await self.client.aclose()

    def _close_soon(self, response: httpx.Response) -> None:
        task = asyncio.ensure_future(response.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


HttpSession = SyncSession | AsyncSession
"""Blocking or asynchronous exchange: the same operations, as coroutines."""


class Http:
    """One server. Sends calls through a session, retries what has not started, raises ClientError."""

    def __init__(
        self, session: HttpSession, base_url: str, *, timeout_s: float, api_key: str | None = None, retries: int = 0
    ) -> None:
        """timeout_s: for each wait on bytes; a connection attempt ends after ten seconds at the latest."""
        self.session = session
        self.base_url = base_url.rstrip("/")
        self._timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S))
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._retries = retries

    async def fetch(self, call: HttpCall) -> httpx.Response:
        """Return a whole response of status 200. Raises ClientError."""
        response = await self.open(call)
        try:
            with self._translated_errors():
                await self.session.read(response)
        finally:
            await self.session.close_response(response)
        return response

    async def open(self, call: HttpCall) -> httpx.Response:
        """Return a response of status 200, its body still to be read; the caller closes it. Raises ClientError."""
        retries = 0 if call.is_probe else self._retries
        for attempt in count():
            try:
                return await self._send(call)
            except ClientError as error:
                delay_s = retry_delay_s(error, attempt, retries)
                if delay_s is None:
                    raise
            await self.session.sleep(delay_s)
        raise AssertionError("count() has no end")

    async def next_chunk(self, body: Any) -> bytes | None:
        """Return the next bytes of a body, None at its end. Raises ClientError for a broken or silent connection."""
        with self._translated_errors():
            return await self.session.next_chunk(body)

    async def _send(self, call: HttpCall) -> httpx.Response:
        request = self.session.client.build_request(
            call.method,
            f"{self.base_url}{call.path}",
            files=call.parts or None,
            json=call.body,
            headers={**self._headers, "Accept": call.accept, **dict(call.headers)},
            timeout=self._timeout,
        )
        with self._translated_errors():
            response = await self.session.send(request)
            if response.status_code == 200:
                return response
            try:
                await self.session.read(response)
            finally:
                await self.session.close_response(response)
        raise error_of_response(response)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Turn errors of httpx into ours. Only a connection that was never made is certain to have started nothing."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise unreachable(self.base_url, str(error) or type(error).__name__) from error
        except httpx.TimeoutException as error:
            raise silent(self.base_url, self._timeout.read or 0.0) from error
        except httpx.HTTPError as error:
            raise cut(self.base_url, str(error) or type(error).__name__) from error


def is_requests_session(session: object) -> bool:
    """Return whether the object is a requests.Session or of a subclass."""
    requests = sys.modules.get("requests")
    return requests is not None and isinstance(session, requests.Session)


class RequestsTransport(httpx.BaseTransport):
    """Sends the requests of httpx through a session that the caller owns and closes."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._errors = sys.modules["requests"].exceptions

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions.get("timeout", {})
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HTTPX_HEADERS}
        try:
            answer = self._session.request(
                request.method,
                str(request.url),
                headers=headers,
                data=request.read() or None,
                stream=True,
                timeout=(limits.get("connect"), limits.get("read")),
            )
        except self._errors.RequestException as error:
            raise self._translated(error) from error
        return httpx.Response(
            answer.status_code, headers=list(answer.raw.headers.items()), stream=_ResponseBody(answer), request=request
        )

    def _translated(self, error: Exception) -> httpx.TransportError:
        """Return the error as one of httpx: a failed connection if that is certain, else a broken one."""
        errors = self._errors
        if isinstance(error, errors.ReadTimeout):
            return httpx.ReadTimeout(str(error))
        reason = getattr(error.args[0] if error.args else None, "reason", None)
        is_connect = isinstance(error, errors.ConnectTimeout) or type(reason).__name__ in CONNECT_REASONS
        return httpx.ConnectError(str(reason or error)) if is_connect else httpx.ReadError(str(error))


class _ResponseBody(httpx.SyncByteStream):
    """The raw body of a requests.Response. Closing it before its end closes the connection."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        # decode_content=False: httpx decodes the content itself, by the header.
        try:
            yield from self._answer.raw.stream(CHUNK_BYTES, decode_content=False)
        except Exception as error:
            # Errors of urllib3 arrive here. They are matched by name, because urllib3 is never loaded here.
            if type(error).__module__.partition(".")[0] != "urllib3":
                raise
            is_silent = type(error).__name__ == "ReadTimeoutError"
            raise httpx.ReadTimeout(str(error)) if is_silent else httpx.ReadError(str(error)) from error

    def close(self) -> None:
        self._answer.close()
