"""Errors of the client, made from the words of the API. Raised by both clients.

ClientError                status, code, param, request_id, retry_after, response
├─ BadRequestError         400, 404, 405, 408, 413, 415, 422: the request can never work as written
├─ AuthError               401, 403
├─ ConflictError           409: the request id is in flight
├─ OverloadedError         429: the queue is full; see retry_after
├─ UnavailableError        503, or nothing answers (code `unreachable`), or the connection broke first (`cut`)
├─ RequestTimeoutError     504, or no byte within the client's timeout (code `silent`)
├─ RequestCancelledError   499: cancelled by its id
└─ StreamError             a response that had begun failed or broke off
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import ExitCode, MstarError

if TYPE_CHECKING:
    import httpx

UNREACHABLE: Final = "unreachable"
SILENT: Final = "silent"
CUT: Final = "cut"
FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 8.0


class ClientError(MstarError):
    """A failed request. The title is the API's sentence.

    status: HTTP status of the response or of the error event. response: the httpx.Response, None if no response came
    or if it had begun. retry_after: seconds to wait, as the server asks.
    """

    def __init__(
        self,
        title: str,
        detail: str = "",
        hint: str = "",
        *,
        status: int = 500,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        response: httpx.Response | None = None,
    ) -> None:
        super().__init__(title, detail, hint, code=code, **({"field": param} if param else {}))
        self.status = status
        self.param = param
        self.request_id = request_id
        self.retry_after = retry_after
        self.response = response
        self.exit_code = _outcome(status)[1]

    def __reduce__(self) -> tuple[Any, ...]:
        # A response holds a connection, which cannot be pickled; every other field is kept.
        facts = {
            "status": self.status,
            "code": self.code,
            "param": self.param,
            "request_id": self.request_id,
            "retry_after": self.retry_after,
        }
        return (_rebuild, (_plain(type(self)), (self.title, self.detail, self.hint), facts))

    @property
    def has_not_started(self) -> bool:
        """Whether the server certainly did no work for the request, so that a retry is safe."""
        return self.code == UNREACHABLE or (self.response is not None and self.status in (429, 503))


class BadRequestError(ClientError):
    """The request can never work as written."""


class AuthError(ClientError):
    """The API key is missing or wrong."""


class ConflictError(ClientError):
    """A request with this id is in flight."""


class OverloadedError(ClientError):
    """The queue is full."""


class UnavailableError(ClientError):
    """The deployment is starting, draining or has lost a process, or nothing answers."""


class RequestTimeoutError(ClientError):
    """A deadline of the server or of the client passed."""


class RequestCancelledError(ClientError):
    """The request was cancelled by its id."""


class StreamError(ClientError):
    """A response that had begun failed, or broke off before its end."""


# Names of earlier versions, for scripts that catch them.
MStarError = ClientError
BadRequest = BadRequestError
Conflict = ConflictError
Overloaded = OverloadedError
Unavailable = UnavailableError
TimedOut = RequestTimeoutError
Cancelled = RequestCancelledError

OUTCOMES: Final[Mapping[int, tuple[type[ClientError], ExitCode]]] = {
    401: (AuthError, ExitCode.REFUSED),
    403: (AuthError, ExitCode.REFUSED),
    404: (BadRequestError, ExitCode.NOT_FOUND),
    409: (ConflictError, ExitCode.USAGE),
    429: (OverloadedError, ExitCode.UNREACHABLE),
    499: (RequestCancelledError, ExitCode.CANCELLED),
    503: (UnavailableError, ExitCode.UNREACHABLE),
    504: (RequestTimeoutError, ExitCode.TIMED_OUT),
}


def _outcome(status: int) -> tuple[type[ClientError], ExitCode]:
    """Return the class of a response's error and its exit code."""
    usual = (BadRequestError, ExitCode.USAGE) if 400 <= status < 500 else (ClientError, ExitCode.INTERNAL)
    return OUTCOMES.get(status, usual)


def error_of_response(response: httpx.Response) -> ClientError:
    """Return the error for a response whose status is not 200. The body must have been read."""
    message, code, param = _message_code_param(response.content)
    status = response.status_code
    kind, _ = _outcome(status)
    after = _seconds(response.headers.get("Retry-After"))
    request_id = response.headers.get("X-Request-ID")
    return like_requests(kind, "HTTPError")(
        message or f"the server answered {status}",
        f"request {request_id}" if request_id else "",
        f"send it again in {after:g} s" if after is not None and status in (429, 503) else "",
        status=status,
        code=code,
        param=param,
        request_id=request_id,
        retry_after=after,
        response=response,
    )


def unreachable(url: str, why: str) -> ClientError:
    """Return the error for a connection that could not be made. Nothing was sent."""
    kind = like_requests(UnavailableError, "ConnectionError")
    hint = "is the deployment running, and is this its address?"
    return kind(f"nothing answers at {url}", why, hint, status=503, code=UNREACHABLE)


def silent(url: str, limit_s: float) -> ClientError:
    """Return the error for a server that sent no byte in time. Closing the connection cancels the request."""
    kind = like_requests(RequestTimeoutError, "ReadTimeout")
    return kind(
        f"{url} sent nothing for {limit_s:g} s", hint="give the client a larger timeout", status=504, code=SILENT
    )


def cut(url: str, why: str) -> ClientError:
    """Return the error for a connection that broke before a response. The request may have run."""
    kind = like_requests(UnavailableError, "ConnectionError")
    return kind(f"the connection to {url} broke", why, "see the server's log", status=503, code=CUT)


def retry_delay_s(error: ClientError, attempt: int, retries: int) -> float | None:
    """Return the seconds to wait before attempt number `attempt` + 1 (from 0), or None if it must not be retried.

    A delay that the server names is used as it is. Otherwise the delay doubles from half a second.
    """
    if attempt >= retries or not error.has_not_started:
        return None
    if error.retry_after is not None:
        return error.retry_after
    return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**attempt))


def _message_code_param(body: bytes) -> tuple[str, str | None, str | None]:
    """Parse an error body. A body of another kind gives its first 200 bytes as the message."""
    try:
        stated = json.loads(body)
    except ValueError:
        stated = None
    error = stated.get("error") if isinstance(stated, dict) else None
    if isinstance(error, dict):
        return str(error.get("message") or ""), error.get("code"), error.get("param")
    if isinstance(stated, dict) and (words := stated.get("message") or stated.get("detail")):
        return str(words), stated.get("reason"), None
    return body[:200].decode("utf-8", "replace").strip(), None, None


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def like_requests(kind: type[ClientError], name: str) -> type[ClientError]:
    """Return `kind`, made a subclass of `requests.<name>` too if the program has loaded requests.

    Programs written for the earlier client catch the errors of requests. Such a program has imported requests itself,
    so this module never loads it.
    """
    if "requests" not in sys.modules:
        return kind
    hashable: Any = kind  # a class is hashable, which mypy does not see
    joined: type[ClientError] = _joined(hashable, name)
    return joined


@cache
def _joined(kind: Any, name: str) -> Any:
    base = vars(sys.modules["requests"])[name]
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain": kind})


def _plain(kind: type[ClientError]) -> type[ClientError]:
    """Return the class of this module that `kind` was made from."""
    plain: type[ClientError] = vars(kind).get("_plain", kind)
    return plain


def _rebuild(kind: type[ClientError], words: tuple[str, str, str], facts: dict[str, Any]) -> ClientError:
    return kind(*words, **facts)
