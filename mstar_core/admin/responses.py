"""Errors as the admin socket tells them: code, title, detail, hint, with the right status."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sanic.exceptions import SanicException
from sanic.response import json as json_response

from mstar_core.errors import MstarError, NotFound, did_you_mean

if TYPE_CHECKING:
    from sanic.request import Request
    from sanic.response import HTTPResponse

log = logging.getLogger(__name__)


class StateConflict(MstarError):
    """What is asked for does not fit the state that things are in."""

    status = 409
    code = "conflict"


def problem(error: Exception) -> tuple[int, dict[str, str]]:
    """Status and body of an error. What is not ours keeps its words for the log."""
    if isinstance(error, MstarError):
        return error.status, {"code": error.code, "title": error.title, "detail": error.detail, "hint": error.hint}
    if isinstance(error, SanicException):
        status = int(error.status_code or 500)
        return status, {"code": f"http_{status}", "title": str(error) or "refused", "detail": "", "hint": ""}
    log.error("a read of the admin socket failed", exc_info=error)
    title = "the supervisor could not answer"
    return 500, {"code": "internal_error", "title": title, "detail": type(error).__name__, "hint": "see its log"}


async def answer(request: Request, error: Exception) -> HTTPResponse:
    """Sanic's exception handler."""
    status, body = problem(error)
    return json_response(body, status=status)


def no_route(path: str, known: Iterable[str]) -> NotFound:
    """The error of a path that is not there."""
    return NotFound(f"there is no {path}", hint=did_you_mean(path, known), kind="path", name=path)


def as_json(value: Any) -> str:
    """JSON of anything that is shown: what JSON does not know is shown as text."""
    return json.dumps(value, default=str)
