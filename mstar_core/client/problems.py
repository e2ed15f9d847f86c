"""Answers and stream lines that tell of a failure, as the errors of the one tree. Used by ApiClient."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from mstar_core.errors import (
    BadMedia,
    Cancelled,
    Duplicate,
    EngineError,
    MstarError,
    NotFound,
    Overloaded,
    Refused,
    RequestError,
    TimedOut,
    TooLarge,
    Unavailable,
)

KINDS: Final[Mapping[int, type[MstarError]]] = {
    401: Refused,
    403: Refused,
    404: NotFound,
    409: Duplicate,
    413: TooLarge,
    422: BadMedia,
    429: Overloaded,
    499: Cancelled,
    503: Unavailable,
    504: TimedOut,
}
_RETRY_AFTER_DEFAULT_S: Final = 1


def problem_of(
    status: int,
    message: str,
    code: str | None,
    *,
    param: str | None = None,
    request_id: str = "",
    retry_after: str = "",
) -> MstarError:
    """The error for a status and what the api says of it. The api's sentence is the title: it names field and range."""
    kind = KINDS.get(status, RequestError if 400 <= status < 500 else EngineError)
    facts: dict[str, Any] = {"field": param} if param else {}
    if kind is Overloaded:
        facts["retry_after_s"] = int(retry_after) if retry_after.isdigit() else _RETRY_AFTER_DEFAULT_S
    hint = f"send it again in {retry_after} s" if retry_after.isdigit() and status in (429, 503) else ""
    detail = f"request {request_id}" if request_id else ""
    return kind(message or f"the api answered {status}", detail, hint, code=code, **facts)


def problem_of_body(status: int, body: bytes, *, request_id: str = "", retry_after: str = "") -> MstarError:
    """The error of an answer that is not 200, whatever its body is."""
    message, code, param = body[:200].decode("utf-8", "replace").strip(), None, None
    try:
        stated = json.loads(body)
    except ValueError:
        stated = None
    error = stated.get("error") if isinstance(stated, dict) else None
    if isinstance(error, dict):
        message, code, param = str(error.get("message", "")), error.get("code"), error.get("param")
    return problem_of(status, message, code, param=param, request_id=request_id, retry_after=retry_after)
