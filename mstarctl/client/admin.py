"""Talks to a supervisor over its unix socket: HTTP and JSON, streams as lines. Used by every life-cycle verb.

By the standard library's client: it loads in a third of httpx's time, and closes its socket when nobody answers.
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
"""Three beats of a stream; a supervisor that is silent for longer does not answer."""

API: Final = 1
MIN_API: Final = 1
"""Versions of the admin socket that are understood here."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("mstar", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Open the socket. Raises OSError; nothing stays open then."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(self._timeout_s)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            raise
        self.sock = sock


class AdminClient:
    """Speaks to one supervisor, one connection a request. Owned by the command that made it."""

    def __init__(self, path: Path, name: str = "", timeout_s: float = TIMEOUT_S, *, through: str = "") -> None:
        """through: the context whose ssh the path leads to; empty when the socket is on this host."""
        self._name = name or path.parent.name
        self._through = through
        self._path = path
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """The deployment's name, for messages."""
        return self._name

    @classmethod
    def of(cls, run: RunDirectory, timeout_s: float = TIMEOUT_S) -> AdminClient:
        """The client of a deployment's run directory."""
        return cls(run.admin_socket, run.name, timeout_s)

    def head(self) -> dict[str, Any]:
        """Name, state, endpoint, cause. Raises Unreachable, and UsageError when one side must be updated."""
        facts = self.get("/v1/")
        check_api(self._name, int(facts.get("api", API)), int(facts.get("min_api", API)))
        return facts

    def snapshot(self, parts: Sequence[str] = ("children", "ranks")) -> dict[str, Any]:
        """One consistent view: the deployment, and the parts asked for as objects by key. values: flat readings."""
        return self.get("/v1/snapshot", parts=",".join(parts))

    def act(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """POST one action on the deployment: stop, drain, resume or restart."""
        return self._json("POST", f"/v1/deployment/{verb}", arguments)

    def get(self, path: str, **arguments: Any) -> dict[str, Any]:
        """One read. Raises Unreachable when nobody answers, the error of the answer when it is one."""
        return self._json("GET", path, arguments)

    def lines(self, path: str, **arguments: Any) -> Iterator[dict[str, Any] | None]:
        """The objects of a stream; None for a beat, so that the reader may look at a clock. Ends with the stream."""
        with self._answer("GET", path, arguments) as response:
            yield from (_object(line) for line in response if line.strip())

    def text(self, path: str, **arguments: Any) -> str:
        """One answer that is no JSON: metrics. Raises as `get`."""
        with self._answer("GET", path, arguments) as response:
            return response.read().decode("utf-8", "replace")

    def raw(self, method: str, path: str, body: bytes = b"") -> tuple[int, str, Iterator[bytes]]:
        """One call as typed: status, content type, the body in pieces as they come. Raises Unreachable alone."""
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
        """The lines of a stream as they came, beats included, split at newlines alone. Ends with the stream."""
        with self._answer("GET", path, arguments) as response:
            yield from response

    def post(self, path: str, **arguments: Any) -> dict[str, Any]:
        """One action by its path. Raises as `get`."""
        return self._json("POST", path, arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing stays open between requests."""

    def _json(self, method: str, path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with self._answer(method, path, arguments) as response:
            found: dict[str, Any] = json.loads(response.read())
            return found

    @contextmanager
    def _answer(self, method: str, path: str, arguments: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = UnixConnection(self._path, self._timeout_s)
        try:
            connection.request(method, f"{path}?{urlencode(arguments)}" if arguments else path)
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
            title, hint = f"the connection to {self._through!r} is broken", "the command again"
            return Unreachable(title, "its ssh has ended", hint, context=self._through)
        detail = f"its supervisor gave no answer: {error}" if str(error) else "its supervisor gave no answer"
        return Unreachable(
            f"deployment {self._name!r} does not answer", detail, f"mstarctl logs {self._name} --from supervisor"
        )


def check_api(name: str, api: int, least: int) -> None:
    """Raises UsageError when the supervisor's version is not ours, saying which side to update."""
    if least > API:
        raise UsageError(
            f"{name} speaks admin API {least} to {api}, mstarctl speaks {API}", hint="update mstarctl on this machine"
        )
    if api < MIN_API:
        raise UsageError(
            f"{name} speaks admin API {api}, mstarctl speaks {MIN_API} to {API}",
            hint=f"update the host of {name}, or use the mstarctl of its version",
        )


def _object(line: bytes) -> dict[str, Any] | None:
    found: dict[str, Any] = json.loads(line)
    return None if found.get("beat") is True and len(found) == 1 else found


def error_of(status: int, body: bytes) -> MstarError:
    """The error that an answer of the admin socket tells of."""
    try:
        facts = json.loads(body)
    except ValueError:
        facts = {"title": f"the supervisor answered {status}", "detail": body[:200].decode("utf-8", "replace")}
    kinds: dict[int, type[MstarError]] = {
        400: UsageError, 403: Refused, 404: NotFound, 405: UsageError, 409: Unavailable, 413: UsageError,
        503: Unavailable, 504: TimedOut,
    }  # fmt: skip
    kind = kinds.get(status, MstarError)
    return kind(
        str(facts.get("title", "")), str(facts.get("detail", "")), str(facts.get("hint", "")), code=facts.get("code")
    )
