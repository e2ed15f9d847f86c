"""Http: sends calls with httpx, also by the caller's own session. Owned by MStarClient; loaded when one is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import httpx

from mstar_core.client.call import Call
from mstar_core.client.failure import MStarError, cut, failure_of, silent, unreachable
from mstar_core.client.requests_session import RequestsTransport, is_requests_session
from mstar_core.client.retry import wait_s
from mstar_core.version import __version__

CONNECT_S: Final = 10.0
LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=32)
"""No limit on what runs at once: the server's queue is the one that counts."""

AGENT: Final = f"mstar-python/{__version__}"


class Http:
    """One server, over one httpx.Client. A session that the caller gave stays open; one made here is closed."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        session: Any = None,
        api_key: str | None = None,
        retries: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """session: None, an httpx.Client, or a requests.Session. Raises TypeError for anything else."""
        self.base_url = base_url.rstrip("/")
        self._timeout = timeout_of(timeout_s)
        self._headers = headers_of(api_key)
        self._retries = retries
        self._sleep = sleep
        self._is_ours = not isinstance(session, httpx.Client)
        self._session = _session(session)

    def fetch(self, call: Call) -> httpx.Response:
        """A whole answer with status 200. Raises MStarError."""
        response = self.open(call)
        try:
            with self._told(has_begun=True):
                response.read()
        finally:
            response.close()
        return response

    def open(self, call: Call) -> httpx.Response:
        """An answer with status 200 whose body is still to be read; the caller closes it. Raises MStarError."""
        retries = 0 if call.is_probe else self._retries
        for attempt in count():
            try:
                return self._once(call)
            except MStarError as error:
                pause_s = wait_s(error, attempt, retries)
                if pause_s is None:
                    raise
            self._sleep(pause_s)
        raise AssertionError("count() has no end")

    def chunks(self, response: httpx.Response) -> Iterator[bytes]:
        """The body as it arrives. Raises MStarError when the connection breaks or falls silent."""
        with self._told(has_begun=True):
            yield from response.iter_bytes()

    def close(self) -> None:
        if self._is_ours:
            self._session.close()

    def _once(self, call: Call) -> httpx.Response:
        request = request_of(self._session, self.base_url, call, self._headers, self._timeout)
        with self._told(has_begun=False):
            response = self._session.send(request, stream=True)
            if response.status_code == 200:
                return response
            try:
                response.read()
            finally:
                response.close()
        raise failure_of(response)

    @contextmanager
    def _told(self, *, has_begun: bool) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise failure_from(error, self.base_url, self._timeout.read or 0.0) from error


def timeout_of(timeout_s: float) -> httpx.Timeout:
    """`timeout_s` for each wait on bytes; a connection is there within ten seconds or not at all."""
    return httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S))


def headers_of(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def request_of(
    session: httpx.Client | httpx.AsyncClient,
    base_url: str,
    call: Call,
    headers: dict[str, str],
    timeout: httpx.Timeout,
) -> httpx.Request:
    """The request of a call, made anew for each attempt."""
    return session.build_request(
        call.method, f"{base_url}{call.path}", files=call.parts or None, headers={**headers, "Accept": call.accept},
        timeout=timeout,
    )  # fmt: skip


def failure_from(error: httpx.HTTPError, url: str, limit_s: float) -> MStarError:
    """What httpx says, in our words. Only where no connection was made is it certain that nothing started."""
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout():
            return unreachable(url, str(error) or type(error).__name__)
        case httpx.TimeoutException():
            return silent(url, limit_s)
        case _:
            return cut(url, str(error) or type(error).__name__)


def _session(session: Any) -> httpx.Client:
    if session is None:
        return httpx.Client(limits=LIMITS, headers={"User-Agent": AGENT})
    if isinstance(session, httpx.Client):
        return session
    if is_requests_session(session):
        return httpx.Client(transport=RequestsTransport(session))
    raise TypeError(f"session is an httpx.Client or a requests.Session, not {type(session).__name__}")
