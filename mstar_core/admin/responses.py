"""Responses of the admin socket: JSON, errors with code, title, detail and hint, and idempotent answers."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from sanic.exceptions import SanicException
from sanic.response import json as json_response

from mstar_core.errors import MstarError, NotFound, UsageError, did_you_mean

if TYPE_CHECKING:
    from sanic.request import Request
    from sanic.response import HTTPResponse

log = logging.getLogger(__name__)


class StateConflict(MstarError):
    """The request conflicts with the current state of the deployment."""

    status = 409
    code = "conflict"


def problem(error: Exception) -> tuple[int, dict[str, str]]:
    """Return status and body of an error. The text of unexpected errors goes to the log alone."""
    if isinstance(error, MstarError):
        return error.status, {"code": error.code, "title": error.title, "detail": error.detail, "hint": error.hint}
    if isinstance(error, SanicException):
        status = int(error.status_code or 500)
        return status, {"code": f"http_{status}", "title": str(error) or "refused", "detail": "", "hint": ""}
    log.error("a call of the admin socket failed", exc_info=error)
    title = "the supervisor could not answer"
    return 500, {"code": "internal_error", "title": title, "detail": type(error).__name__, "hint": "see its log"}


async def answer(request: Request, error: Exception) -> HTTPResponse:
    """Answer with an error, as Sanic's exception handler."""
    status, body = problem(error)
    return json_response(body, status=status)


def no_route(path: str, known: Iterable[str]) -> NotFound:
    """Return the error of an unknown path."""
    return NotFound(f"unknown path {path}", hint=did_you_mean(path, known), kind="path", name=path)


def as_json(value: Any) -> str:
    """Encode as JSON; values of other types become text."""
    return json.dumps(value, default=str)


KEPT: Final = 256
LONGEST: Final = 200


class IdempotentAnswers:
    """Answers of the last 256 idempotency keys. Owned by the admin server."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()

    def run(self, key: str | None, what: str, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer of `act`, or its earlier answer under this key. Raises StateConflict for a reused key."""
        if not key:
            return act()
        if len(key) > LONGEST:
            raise UsageError("the Idempotency-Key is too long", f"{len(key)} characters", f"at most {LONGEST}")
        if key in self._answers:
            before, answer = self._answers[key]
            if before != what:
                raise StateConflict(
                    "this Idempotency-Key was used for another call", before, "use a new key for each call"
                )
            return answer
        answer = act()
        self._answers[key] = (what, answer)
        if len(self._answers) > KEPT:
            self._answers.popitem(last=False)
        return answer
