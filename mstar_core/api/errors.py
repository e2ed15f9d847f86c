"""Errors of the HTTP API and their responses: status, type, code and message. Used by every route."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from mstar_core.errors import (
    Cancelled,
    MstarError,
    NotFound,
    Overloaded,
    RequestError,
    Unavailable,
    WorkerLost,
)
from mstar_core.messages.requests import ErrorInfo


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The browser origin or the host of the client may not use this."""

    status = 403
    code = "origin_not_allowed"


class PoisonRequest(WorkerLost):
    """A request that several deaths of processes of one kind have ended. A client must not repeat it by itself."""

    status = 500
    code = "poison_request"


class UpgradeRequired(RequestError):
    """A plain HTTP request for a WebSocket path."""

    status = 426
    code = "upgrade_required"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class SlowUpload(RequestError):
    status = 408
    code = "slow_upload"


class EventsGone(RequestError):
    """Events of a request that are no longer kept."""

    status = 410
    code = "events_gone"


class UnsupportedType(RequestError):
    """An unsupported body type or media type."""

    status = 415
    code = "unsupported_content_type"


class RangeNotSatisfiable(RequestError):
    """A byte range behind the end of a file. size: bytes of the file."""

    status = 416
    code = "range_not_satisfiable"


class Stalled(Cancelled):
    """The client stopped reading its response."""

    code = "stalled"


class PeerError(MstarError):
    """An error reported by another process, with its status, code and param."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message, info.detail, code=info.code, field=info.param)
        self.status = info.status


TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled"}
MESSAGE_CHARS: Final = 1000
PARAM_CHARS: Final = 200
RETRY_AFTER_S: Final = {"starting": 5, "draining": 30, "worker_lost": 2, "unavailable": 5, "sleeping": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """Error response. message: one sentence, without paths, prompts or tracebacks."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """Return the OpenAI error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def native_body(self) -> dict[str, Any]:
        """Return the body of /generate: the error object and the older `detail` key."""
        return {"detail": self.message, **self.body}

    def metadata(self, request_id: str) -> dict[str, Any]:
        """Return the metadata of the error line of a stream."""
        return {
            "status": self.status,
            "code": self.code,
            "type": self.type,
            "param": self.param,
            "request_id": request_id,
        }


def reply_of(error: BaseException, request_id: str) -> ErrorReply:
    """Return the response for an error. Foreign errors and unsafe messages give only the request id."""
    if not isinstance(error, MstarError):
        return _internal(request_id)
    status = error.status
    if status >= 500 and not isinstance(error, (Unavailable, PeerError)) and status != 504:
        return _internal(request_id, error.code, str(error.facts.get("node") or error.facts.get("peer") or "api"))
    message = error.public
    if status >= 500 and not _is_safe(message):
        return _internal(request_id, error.code)
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    field_name = error.facts.get("field")
    return ErrorReply(
        status=status,
        type=kind,
        code=error.code,
        message=_line(message, MESSAGE_CHARS),
        param=_line(str(field_name), PARAM_CHARS) if field_name is not None else None,
        headers=_headers(error),
    )


def _internal(request_id: str, code: str = "internal_error", part: str = "api") -> ErrorReply:
    message = f"the request failed in {part}; request id: {request_id}"
    return ErrorReply(status=500, type="server_error", code=code, message=message)


def _is_safe(text: str) -> bool:
    return "Traceback" not in text and "\n" not in text and 'File "' not in text


def _line(text: str, limit: int) -> str:
    """Return text as one line of limited length; it may quote input, such as a parameter name."""
    return "".join(char if char.isprintable() else " " for char in text[:limit])


def _headers(error: MstarError) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"Retry-After": str(min(60, max(1, error.retry_after_s)))}
    if error.status == 503:
        return {"Retry-After": str(RETRY_AFTER_S.get(error.code, 5))}
    if error.status == 426:
        return {"Upgrade": "websocket", "Connection": "Upgrade"}
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if error.status == 416:
        return {"Content-Range": f"bytes */{error.facts.get('size', '*')}"}
    if error.status == 405:
        return {"Allow": str(error.facts.get("allowed", ""))}
    return {}


def unsupported_endpoint(route: str, mapped: list[str]) -> NotFound:
    """Return the error for a route that the loaded model does not support."""
    return NotFound(
        f"the loaded model does not support {route}",
        hint=f"supported routes: {', '.join(mapped)}",
        code="unsupported_endpoint",
    )


def storage_full(error: Exception) -> Unavailable:
    """Return the error for a run directory that cannot be written: disk full, no permission, no inodes."""
    return Unavailable(
        "the server cannot store the data of this request", str(error), "retry later", code="storage_full"
    )


def lost(cause: str, reason: str = "") -> WorkerLost:
    """Return the error for a lost process that held the request. reason: why the request is not resumed."""
    title = f"{cause}, and {reason}" if reason else cause
    return WorkerLost(title, hint="send the request again", cause=cause)
