"""httpx transport over a caller's requests.Session, which applies its proxies, adapters, certificates and headers.

requests is never loaded here: a caller that passes a session has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import httpx

CHUNK_BYTES: Final = 64 * 1024
HTTPX_HEADERS: Final = frozenset(
    ("accept-encoding", "connection", "content-length", "host", "transfer-encoding", "user-agent")
)
"""Headers that httpx adds by itself; the session sends its own instead."""


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
                request.method, str(request.url), headers=headers, data=request.read() or None, stream=True,
                timeout=(limits.get("connect"), limits.get("read")),
            )  # fmt: skip
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


CONNECT_REASONS: Final = frozenset(("NewConnectionError", "NameResolutionError", "ConnectTimeoutError"))
"""Reasons of urllib3 inside a requests.ConnectionError that mean that nothing was sent."""


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
