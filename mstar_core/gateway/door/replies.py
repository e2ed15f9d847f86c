"""Errors of the gateway in the forms of a deployment's api: the OpenAI error object, with the native key beside it."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from aiohttp import web

from mstar_core.errors import MstarError, NotFound, Overloaded, Refused, RequestError, Unavailable, did_you_mean_one_of

TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 499: "cancelled"}
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
JSON: Final = "application/json; charset=utf-8"
LONGEST_MESSAGE: Final = 1000
RETRY_S: Final = 5
LONGEST_RETRY_S: Final = 3600
SHOWN_NAMES: Final = 8


class UnknownKey(Refused):
    """The key of a request is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class UnknownMethod(RequestError):
    """The method of a request is none that any route has."""

    status = 405
    code = "method_not_allowed"


class UpstreamLost(Unavailable):
    """A deployment ended the connection before its answer began. The request may have run."""

    status = 502
    code = "upstream_lost"


class SlowBody(RequestError):
    """The body of a request did not arrive in time."""

    status = 408
    code = "slow_upload"


def check_method(method: str) -> None:
    """Refuse methods such as TRACE. Raises UnknownMethod."""
    if method not in METHODS:
        allowed = ", ".join(METHODS)
        raise UnknownMethod(f"the method {method[:20]} is not supported", hint=f"use {allowed}", allowed=allowed)


def error_body(error: MstarError) -> dict[str, Any]:
    """Return the error object that clients get. It has no paths and no traceback."""
    status = error.status
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message = "".join(char if char.isprintable() else " " for char in error.public[:LONGEST_MESSAGE])
    return {"message": message, "type": kind, "param": error.facts.get("field"), "code": error.code}


def error_reply(error: MstarError, request_id: str, *, is_native: bool = False) -> web.Response:
    """Return the response for an error. is_native: with the key `detail` of native routes."""
    body = error_body(error)
    answer = {"detail": body["message"], "error": body} if is_native else {"error": body}
    return json_reply(answer, error.status, {"X-Request-ID": request_id, **_headers(error)})


def internal(request_id: str) -> MstarError:
    """Return the error of a failure that has no error of its own."""
    return MstarError(f"the request failed in the gateway; request id: {request_id}")


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a complete JSON response."""
    fixed = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Server": "mstar"}
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers={**fixed, "Content-Type": JSON, **(headers or {})}
    )


def event(error: MstarError) -> bytes:
    """Return the server-sent event that ends a stream which had begun before the request failed."""
    return b"data: " + msgspec.json.encode({"error": error_body(error)}) + b"\n\n"


def unknown_model(name: str, names: list[str]) -> NotFound:
    """Return the error for a model that does not exist, or that the tenant may not see."""
    hint = did_you_mean_one_of(name, names) or _listed(names)
    return NotFound(f"the model {name[:80]!r} does not exist", hint=hint, code="model_not_found", field="model")


def no_model(names: list[str]) -> RequestError:
    """Return the error for a request that names none of several models."""
    return RequestError("the request names no model", hint=_listed(names), field="model", code="missing_field")


def _listed(names: list[str]) -> str:
    if not names:
        return "no model is served; start one with: mstarctl up MODEL"
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"choose one of: {', '.join(names[:SHOWN_NAMES])}{more}"


def _headers(error: MstarError) -> dict[str, str]:
    if isinstance(error, Overloaded) or error.status == 503 or "retry_after_s" in error.facts:
        seconds = int(error.facts.get("retry_after_s", RETRY_S if error.status == 503 else 1))
        return {"Retry-After": str(min(LONGEST_RETRY_S, max(1, seconds)))}
    if error.status == 405:
        return {"Allow": ", ".join(METHODS)}
    return {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
