"""Calls of the admin socket by the screen: traces, recordings, cancel, drain. Run in threads."""

from __future__ import annotations

from typing import Any, Final, Protocol
from urllib.parse import quote

from mstar_core.errors import MstarError
from mstar_core.observe.frames import RequestStatus
from mstarctl.top.data.session import Session
from mstarctl.top.data.spans import Trace, lanes, records

NO_SPANS: Final = "this request has no recorded spans"


class Admin(Protocol):
    """The part of an admin client that is used here."""

    def get(self, path: str) -> dict[str, Any]: ...

    def post(self, path: str, **arguments: Any) -> dict[str, Any]: ...


class DeploymentQueries:
    """Calls one deployment. Owned by the app. Without an admin client, answers come from the recording."""

    def __init__(self, admin: Admin | None, session: Session | None) -> None:
        self._admin, self._session = admin, session

    def trace(self, request: RequestStatus, t: float) -> Trace:
        """Return the spans of a request as lanes, or the reason why there are none."""
        path = f"/v1/requests/{quote(request.id, safe='')}/trace?handle={request.handle}"
        try:
            body = self._read(path)
        except MstarError as error:
            return Trace(request=request.id, why=error.title, status=request)
        if body is None:
            return Trace(request=request.id, why="the recording has no spans of it; open the request while recording")
        if not isinstance(body, dict):
            return Trace(request=request.id, why=NO_SPANS, status=request)
        trace_lanes = lanes(body, 1000 * request.age_s(t))
        parts = tuple(records(body, "parts"))
        return Trace(
            request=request.id, lanes=trace_lanes, parts=parts, why="" if trace_lanes else NO_SPANS, status=request
        )

    def recordings(self) -> list[dict[str, object]]:
        """Return the recordings of load tests. Raises MstarError."""
        body = self._read("/v1/recordings")
        items = body.get("items", []) if isinstance(body, dict) else []
        return [item for item in items if isinstance(item, dict)]

    def cancel(self, request: RequestStatus) -> str:
        """Cancel a request. Returns a notice. Raises MstarError."""
        self._required().post(f"/v1/requests/{quote(request.id, safe='')}/cancel", handle=request.handle)
        return f"{request.id} is being cancelled"

    def drain(self, is_draining: bool) -> str:
        """Drain, or resume if `is_draining`. Returns a notice. Raises MstarError."""
        self._required().post(f"/v1/deployment/{'resume' if is_draining else 'drain'}")
        return "requests are accepted again" if is_draining else "new requests are refused; those in flight continue"

    def _required(self) -> Admin:
        if self._admin is None:
            raise MstarError("a replay has no deployment to control")
        return self._admin

    def _read(self, path: str) -> Any:
        if self._admin is None:
            return None if self._session is None else self._session.answer(path)
        body = self._admin.get(path)
        if self._session is not None:
            self._session.note_answer(path, body)
        return body
