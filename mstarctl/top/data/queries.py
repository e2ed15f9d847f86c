"""Questions and actions that go to the deployment from the screen: spans, recordings, cancel, drain. Run in threads."""

from __future__ import annotations

from typing import Any, Final, Protocol
from urllib.parse import quote

from mstar_core.errors import MstarError
from mstar_core.observe.frames import RequestStatus
from mstarctl.top.data.session import Session
from mstarctl.top.data.spans import lanes
from mstarctl.top.layout.state import Trace

NO_SPANS: Final = "no spans are known of this request"


class Admin(Protocol):
    """What is asked of an admin client."""

    def get(self, path: str) -> dict[str, Any]: ...

    def post(self, path: str, **arguments: Any) -> dict[str, Any]: ...


class DeploymentQueries:
    """Owned by the app; without an admin client (a replay) answers come from the recording alone."""

    def __init__(self, admin: Admin | None, session: Session | None) -> None:
        self._admin, self._session = admin, session

    def trace(self, request: RequestStatus, t: float) -> Trace:
        """The spans of a request as lanes; why there are none, else."""
        path = f"/v1/requests/{quote(request.id, safe='')}/trace?handle={request.handle}"
        try:
            body = self._read(path)
        except MstarError as error:
            return Trace(request=request.id, why=error.title)
        if body is None:
            return Trace(request=request.id, why="this recording has no spans of it; open a request while it records")
        found = lanes(body, 1000 * request.age_s(t)) if isinstance(body, dict) else ()
        return Trace(request=request.id, lanes=found, why="" if found else NO_SPANS)

    def recordings(self) -> list[dict[str, object]]:
        """The load tests that record. Raises MstarError."""
        body = self._read("/v1/recordings")
        items = body.get("items", []) if isinstance(body, dict) else []
        return [item for item in items if isinstance(item, dict)]

    def cancel(self, request: RequestStatus) -> str:
        """Ask for the end of a request. Raises MstarError."""
        self._needed().post(f"/v1/requests/{quote(request.id, safe='')}/cancel", handle=request.handle)
        return f"{request.id} is being cancelled"

    def drain(self, is_draining: bool) -> str:
        """Stop taking requests, or take them again. Raises MstarError."""
        self._needed().post(f"/v1/deployment/{'resume' if is_draining else 'drain'}")
        return "requests are taken again" if is_draining else "no new requests are taken; those in flight go on"

    def _needed(self) -> Admin:
        if self._admin is None:
            raise MstarError("a replay has no deployment to act on")
        return self._admin

    def _read(self, path: str) -> Any:
        if self._admin is None:
            return None if self._session is None else self._session.answer(path)
        body = self._admin.get(path)
        if self._session is not None:
            self._session.note_answer(path, body)
        return body
