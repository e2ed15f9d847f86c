"""Requests and responses of the admin socket: arguments, JSON, errors, idempotent answers."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec
from sanic.exceptions import SanicException

from mstar_core.errors import MstarError, NotFound, StateConflict, UsageError, did_you_mean, did_you_mean_one_of
from mstar_core.observe.frames import RequestStatus as RequestItem
from mstar_core.observe.request_log import RequestLog, RequestRecord, request_item

if TYPE_CHECKING:
    from sanic.request import Request

LIMIT: int = 1000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
SORTABLE = (*RequestItem.__struct_fields__, "age_s", "rtf", "missed_ticks")


def whole(request: Request, name: str, default: int, most: int | None = None) -> int:
    """Return an integer parameter. Raises UsageError."""
    text = request.args.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 18 or (most is not None and int(text) > most):
        limit = "" if most is None else f" of at most {most}"
        raise UsageError(f"{name} is {text!r}", hint=f"send a whole number{limit}")
    return int(text)


def rank(text: str) -> int:
    """Return the number of a rank in a path. Raises UsageError."""
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UsageError(f"the rank is {text!r}", hint="send its number")
    return int(text)


def number(request: Request, name: str, default: float | None) -> float | None:
    """Return a parameter that is a non-negative number, or `default`. Raises UsageError."""
    text = request.args.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e12:
        raise UsageError(f"{name} is {text!r}", hint="send a number")
    return value


def flag(request: Request, name: str) -> bool:
    """Return whether a parameter is `1` or `true`."""
    return request.args.get(name, "") in ("1", "true")


def parts(request: Request) -> list[str]:
    """Return the requested parts."""
    return [part for part in request.args.get("parts", "").split(",") if part]


def body(request: Request, fields: dict[str, type]) -> dict[str, Any]:
    """Return a JSON object that has only these fields. Raises UsageError."""
    values = json_object(request)
    for name, value in values.items():
        if name not in fields:
            raise UsageError(f"unknown field {name!r}", hint=did_you_mean(name, fields))
        if not isinstance(value, fields[name]) or isinstance(value, bool):
            raise UsageError(f"{name} must be of type {fields[name].__name__}", hint="see /v1/openapi.json")
    return values


def node_names(fields: dict[str, Any]) -> list[str]:
    """Return the field `nodes` of a body, empty without it. Raises UsageError."""
    names = fields.get("nodes", [])
    if not all(isinstance(name, str) for name in names):
        raise UsageError("nodes must be names", hint='send {"nodes": ["talker"]}')
    return list(names)


def json_object(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object, empty for an empty body. Raises UsageError."""
    if not request.body:
        return {}
    try:
        value = msgspec.json.decode(request.body)
    except msgspec.DecodeError as error:
        raise UsageError("the body is not JSON", str(error), "send a JSON object") from error
    if not isinstance(value, dict):
        raise UsageError("the body is not a JSON object", hint="send a JSON object")
    return value


def find_request(log: RequestLog, request: Request, name: str) -> RequestRecord:
    """Return the newest request with that client id, or the one of `handle`. Raises NotFound with the nearest id."""
    handle = whole(request, "handle", 0) if "handle" in request.args else None
    record = log.find(name, handle)
    if record is None:
        ids = {other.api.id for other in log.all() if other.api.id}
        known = "1 request" if len(ids) == 1 else f"{len(ids)} requests"
        hint = did_you_mean_one_of(name, ids) or f"it knows {known}; mstarctl requests lists them"
        raise NotFound(f"no request {name!r}", hint=hint, kind="request", name=name, code="request_not_found")
    return record


def ordered(requests: list[RequestItem], sort: str, now: float) -> list[dict[str, Any]]:
    """Return requests with every field, sorted by a field (`-` before it: descending). Raises UsageError."""
    items = [request_item(request, now) for request in requests]
    field = sort.removeprefix("-")
    if not field:
        return items
    name = field if field in SORTABLE else next((n for n in (f"{field}_ms", f"{field}_s") if n in SORTABLE), "")
    if not name:
        raise UsageError(f"requests have no field {field!r}", hint=did_you_mean(field, SORTABLE))
    has = [item for item in items if item[name] is not None]
    rest = [item for item in items if item[name] is None]  # unknown values come last in both orders
    return [*sorted(has, key=lambda item: _key(item[name]), reverse=sort.startswith("-")), *rest]


def _key(value: Any) -> Any:
    return value if isinstance(value, int | float) else str(value)


log = logging.getLogger(__name__)


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
