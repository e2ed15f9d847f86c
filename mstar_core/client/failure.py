"""What can go wrong for a client. Raised by MStarClient and AsyncMStarClient, made from the api's own words.

MStarError                 status, code, param, request_id, retry_after, response
├─ BadRequest              400, 404, 405, 408, 413, 415, 422: it can never work as written
├─ AuthError               401, 403
├─ Conflict                409: the request id is in flight
├─ Overloaded              429: the queue is full; see retry_after
├─ Unavailable             503, or nothing answers (code `unreachable`, no response)
├─ TimedOut                504, or no byte within the client's time-out (code `silent`, no response)
├─ Cancelled               499: cancelled by its id
└─ StreamError             an answer that had begun failed or broke off
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from mstar_core.errors import ExitCode, MstarError

if TYPE_CHECKING:
    import httpx

UNREACHABLE: Final = "unreachable"
SILENT: Final = "silent"
CUT: Final = "cut"
EXIT_CODES: Final[Mapping[int, ExitCode]] = {
    401: ExitCode.REFUSED,
    403: ExitCode.REFUSED,
    404: ExitCode.NOT_FOUND,
    429: ExitCode.UNREACHABLE,
    499: ExitCode.INTERRUPTED,
    503: ExitCode.UNREACHABLE,
    504: ExitCode.TIMED_OUT,
}


class MStarError(MstarError):
    """A request failed. The title is the api's sentence.

    status: HTTP status, of the answer or of the error event. response: the answer as httpx gives it, None where no
    answer came or where it had begun. retry_after: seconds that the server asks to wait.
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
        self.exit_code = EXIT_CODES.get(status, ExitCode.USAGE if 400 <= status < 500 else ExitCode.INTERNAL)

    def __reduce__(self) -> tuple[Any, ...]:
        # An answer holds a connection, which does not travel between processes; everything else does.
        facts = (self.status, self.code, self.param, self.request_id, self.retry_after)
        return (_rebuild, (plain(type(self)), self.title, self.detail, self.hint, *facts))

    @property
    def has_not_started(self) -> bool:
        """Whether the server surely did nothing for the request, so that it may be sent again."""
        return self.code == UNREACHABLE or (self.response is not None and self.status in (429, 503))


class BadRequest(MStarError):
    """The request can never work as written."""


class AuthError(MStarError):
    """The API key is missing or wrong."""


class Conflict(MStarError):
    """A request with this id is in flight."""


class Overloaded(MStarError):
    """The queue is full."""


class Unavailable(MStarError):
    """The deployment starts, drains or has lost a process, or nothing answers."""


class TimedOut(MStarError):
    """A deadline passed: the server's, or the client's."""


class Cancelled(MStarError):
    """The request was cancelled by its id."""


class StreamError(MStarError):
    """An answer that had begun failed, or broke off before its end."""


KINDS: Final[Mapping[int, type[MStarError]]] = {
    401: AuthError,
    403: AuthError,
    409: Conflict,
    429: Overloaded,
    499: Cancelled,
    503: Unavailable,
    504: TimedOut,
}


ALL: Final[Sequence[type[MStarError]]] = (MStarError, BadRequest, StreamError, *KINDS.values())


def failure_of(response: httpx.Response) -> MStarError:
    """The error of an answer that is not 200, whatever its body is. The body must have been read."""
    message, code, param = _words(response.content)
    status = response.status_code
    kind = KINDS.get(status, BadRequest if 400 <= status < 500 else MStarError)
    after = _seconds(response.headers.get("Retry-After"))
    request_id = response.headers.get("X-Request-ID")
    return like_requests(kind, "HTTPError")(
        message or f"the server answered {status}",
        f"request {request_id}" if request_id else "",
        f"send it again in {after:g} s" if after is not None and status in (429, 503) else "",
        status=status, code=code, param=param, request_id=request_id, retry_after=after, response=response,
    )  # fmt: skip


def unreachable(url: str, why: str) -> MStarError:
    """No connection could be made: nothing was sent."""
    kind = like_requests(Unavailable, "ConnectionError")
    return kind(
        f"nothing answers at {url}", why, "is it running, and is this its address?", status=503, code=UNREACHABLE
    )


def silent(url: str, limit_s: float) -> MStarError:
    """No byte came for too long; the connection is closed, which cancels the request."""
    kind = like_requests(TimedOut, "ReadTimeout")
    return kind(
        f"{url} sent nothing for {limit_s:g} s", hint="give the client a larger timeout", status=504, code=SILENT
    )


def cut(url: str, why: str) -> MStarError:
    """The connection broke before the answer began; whether the request ran is not known."""
    kind = like_requests(Unavailable, "ConnectionError")
    return kind(f"the connection to {url} broke", why, "the server's log tells why", status=503, code=CUT)


def _words(body: bytes) -> tuple[str, str | None, str | None]:
    """Message, code and param out of an error body; of a body of another kind its first words."""
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


def like_requests(kind: type[MStarError], name: str) -> type[MStarError]:
    """`kind`, made a subclass of `requests.<name>` too when the program has loaded requests.

    Programs written for the earlier client catch requests' errors. Whoever names them has imported requests, so the
    module need never be loaded here.
    """
    return kind if "requests" not in sys.modules else _joined(kind.__name__, name)


@cache
def _joined(own: str, name: str) -> type[MStarError]:
    kind = next(each for each in ALL if each.__name__ == own)
    base = vars(sys.modules["requests"])[name]
    return type(kind.__name__, (kind, base), {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain": kind})


def plain(kind: type[MStarError]) -> type[MStarError]:
    """The class of this module that stands for `kind`."""
    found: type[MStarError] = vars(kind).get("_plain", kind)
    return found


def _rebuild(
    kind: type[MStarError],
    title: str,
    detail: str,
    hint: str,
    status: int,
    code: str | None,
    param: str | None,
    request_id: str | None,
    retry_after: float | None,
) -> MStarError:
    return kind(
        title, detail, hint, status=status, code=code, param=param, request_id=request_id, retry_after=retry_after
    )
