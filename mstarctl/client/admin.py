"""Client of a supervisor's admin socket: HTTP and JSON, streams as lines. Used by every life-cycle command.

It uses http.client, which loads in a third of the time of httpx and closes its socket if the peer is silent.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode

from mstar_core.errors import MstarError, NotFound, Refused, TimedOut, Unavailable, Unreachable, UsageError
from mstar_core.host.run_dir import RunDirectory

TIMEOUT_S: Final = 6.0
"""Three heartbeats of a stream; a supervisor that is silent for longer is unreachable."""

API: Final = 1
MIN_API: Final = 1
"""Supported versions of the admin API."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("mstar", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Open the socket. Raises OSError and leaves nothing open."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self._timeout_s)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            raise
        self.sock = sock


class AdminClient:
    """Client of one supervisor, with one connection per request. Owned by the command that created it."""

    def __init__(self, path: Path, name: str = "", timeout_s: float = TIMEOUT_S, *, through: str = "") -> None:
        """through: the context whose ssh forwards the socket; empty for a socket of this host."""
        self._name = name or path.parent.name
        self._through = through
        self._path = path
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """The deployment's name, for messages."""
        return self._name

    @property
    def run(self) -> RunDirectory | None:
        """The run directory of a deployment of this host; None behind another socket."""
        run = RunDirectory(self._path.parent)
        return run if not self._through and run.admin_socket == self._path else None

    @classmethod
    def of(cls, run: RunDirectory, timeout_s: float = TIMEOUT_S) -> AdminClient:
        """Return the client for a run directory."""
        return cls(run.admin_socket, run.name, timeout_s)

    def head(self) -> dict[str, Any]:
        """Return name, state, endpoint and cause. Raises Unreachable, and UsageError if one side must be updated."""
        facts = self.get("/v1/")
        check_api(self._name, int(facts.get("api", API)), int(facts.get("min_api", API)))
        return facts

    def snapshot(self, parts: Sequence[str] = ("children", "ranks")) -> dict[str, Any]:
        """Return a consistent view: the deployment and the given parts, as objects by key, and flat `values`."""
        return self.get("/v1/snapshot", parts=",".join(parts))

    def act(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Send an action on the deployment: stop, drain, resume or restart."""
        return self._json("POST", f"/v1/deployment/{verb}", arguments)

    def get(self, path: str, **arguments: Any) -> dict[str, Any]:
        """Read one path. Raises Unreachable, or the error that the supervisor reports."""
        return self._json("GET", path, arguments)

    def lines(self, path: str, **arguments: Any) -> Iterator[dict[str, Any] | None]:
        """Yield the objects of a stream, and None for a heartbeat, so that the caller can check its clock."""
        with self._answer("GET", path, arguments) as response:
            yield from (_object(line) for line in response if line.strip())

    def text(self, path: str, **arguments: Any) -> str:
        """Read one path as text, such as metrics. Raises as `get`."""
        with self._answer("GET", path, arguments) as response:
            return response.read().decode("utf-8", "replace")

    def raw(self, method: str, path: str, body: bytes = b"") -> tuple[int, str, Iterator[bytes]]:
        """Send one request; return status, content type and the body as it arrives. Raises only Unreachable."""
        connection = UnixConnection(self._path, self._timeout_s)
        headers = {"Content-Type": "application/json"} if body else {}
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._unreachable(error) from error
        return response.status, response.getheader("Content-Type") or "", self._pieces(connection, response)

    def _pieces(self, connection: UnixConnection, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            while piece := response.read1():
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def raw_lines(self, path: str, **arguments: Any) -> Iterator[bytes]:
        """Yield the raw lines of a stream, heartbeats included, split only at newlines."""
        with self._answer("GET", path, arguments) as response:
            yield from response

    def post(self, path: str, **arguments: Any) -> dict[str, Any]:
        """Send an action by its path. Raises as `get`."""
        return self._json("POST", path, arguments)

    def delete(self, path: str) -> dict[str, Any]:
        """Delete what a path names. Raises as `get`."""
        return self._json("DELETE", path, {})

    def send(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send an action with a JSON body. Raises as `get`."""
        with self._answer("POST", path, {}, json.dumps(body).encode()) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: no connection stays open between requests."""

    def _json(self, method: str, path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with self._answer(method, path, arguments) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    @contextmanager
    def _answer(
        self, method: str, path: str, arguments: Mapping[str, Any], body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = UnixConnection(self._path, self._timeout_s)
        try:
            connection.request(method, f"{path}?{urlencode(arguments)}" if arguments else path, body)
            response = connection.getresponse()
            if response.status >= 400:
                raise error_of(response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _unreachable(self, error: Exception) -> Unreachable:
        if self._through and isinstance(error, ConnectionRefusedError | FileNotFoundError):
            title, hint = f"the connection to {self._through!r} is broken", "run the command again"
            return Unreachable(title, "ssh has ended", hint, context=self._through)
        detail = f"its supervisor did not answer: {error}" if str(error) else "its supervisor did not answer"
        return Unreachable(
            f"deployment {self._name!r} does not answer", detail, f"mstarctl logs {self._name} --from supervisor"
        )


def check_api(name: str, api: int, least: int) -> None:
    """Raise UsageError if the supervisor's API version is not supported; the hint names the side to update."""
    if least > API:
        raise UsageError(
            f"{name} supports admin API {least} to {api}, mstarctl supports {API}",
            hint="update mstarctl on this machine",
        )
    if api < MIN_API:
        raise UsageError(
            f"{name} supports admin API {api}, mstarctl supports {MIN_API} to {API}",
            hint=f"update the host of {name}, or use the mstarctl of its version",
        )


def _object(line: bytes) -> dict[str, Any] | None:
    message: dict[str, Any] = json.loads(line)
    return None if message.get("beat") is True and len(message) == 1 else message


def error_of(status: int, body: bytes) -> MstarError:
    """Return the error of a failed response of the admin socket."""
    try:
        facts = json.loads(body)
    except ValueError:
        facts = {"title": f"the supervisor answered {status}", "detail": body[:200].decode("utf-8", "replace")}
    kinds: dict[int, type[MstarError]] = {
        400: UsageError,
        403: Refused,
        404: NotFound,
        405: UsageError,
        409: Unavailable,
        413: UsageError,
        503: Unavailable,
        504: TimedOut,
    }
    kind = kinds.get(status, MstarError)
    return kind(
        str(facts.get("title", "")), str(facts.get("detail", "")), str(facts.get("hint", "")), code=facts.get("code")
    )
