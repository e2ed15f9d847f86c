"""RequestsTransport: httpx over a requests.Session, so that its proxies, adapters, certificates and headers count.

requests is never loaded here: whoever passes a session has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import httpx

CHUNK_BYTES: Final = 64 * 1024
OF_HTTPX: Final = frozenset(
    ("accept-encoding", "connection", "content-length", "host", "transfer-encoding", "user-agent")
)
"""Headers that httpx adds by itself; the session's own stand instead."""


def is_requests_session(session: object) -> bool:
    """Whether it is a requests.Session, or of a class made from one."""
    requests = sys.modules.get("requests")
    return requests is not None and isinstance(session, requests.Session)


class RequestsTransport(httpx.BaseTransport):
    """Sends httpx's requests by a session that the caller owns and closes."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._errors = sys.modules["requests"].exceptions

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions.get("timeout", {})
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_HTTPX}
        try:
            answer = self._session.request(
                request.method, str(request.url), headers=headers, data=request.read() or None, stream=True,
                timeout=(limits.get("connect"), limits.get("read")),
            )  # fmt: skip
        except self._errors.RequestException as error:
            raise self._told(error) from error
        return httpx.Response(
            answer.status_code, headers=list(answer.raw.headers.items()), stream=_Body(answer), request=request
        )

    def _told(self, error: Exception) -> httpx.TransportError:
        """The same error in httpx's tree; what is not surely a failed connection is a broken one."""
        errors = self._errors
        if isinstance(error, errors.ReadTimeout):
            return httpx.ReadTimeout(str(error))
        why = getattr(error.args[0] if error.args else None, "reason", None)
        is_connect = isinstance(error, errors.ConnectTimeout) or type(why).__name__ in CONNECT_REASONS
        return httpx.ConnectError(str(why or error)) if is_connect else httpx.ReadError(str(error))


CONNECT_REASONS: Final = frozenset(("NewConnectionError", "NameResolutionError", "ConnectTimeoutError"))
"""Of urllib3, inside requests.ConnectionError: nothing was sent."""


class _Body(httpx.SyncByteStream):
    """The body of a requests.Response as it comes off the wire. Closing it closes the connection unless it was read."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        # decode_content=False: httpx undoes the content's encoding itself, by the header.
        try:
            yield from self._answer.raw.stream(CHUNK_BYTES, decode_content=False)
        except Exception as error:
            # urllib3's own errors come through here; its tree is known by name only, because it is never loaded.
            if type(error).__module__.partition(".")[0] != "urllib3":
                raise
            is_silent = type(error).__name__ == "ReadTimeoutError"
            raise httpx.ReadTimeout(str(error)) if is_silent else httpx.ReadError(str(error)) from error

    def close(self) -> None:
        self._answer.close()
