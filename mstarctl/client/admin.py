"""Talks to a deployment's supervisor over its unix socket: HTTP and JSON, streams as lines. Used by every life-cycle verb."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from mstar_core.config.run_dir import RunDirectory
from mstar_core.errors import MstarError, NotFound, Refused, Unavailable, Unreachable, UsageError

TIMEOUT_S: Final = 6.0
"""Three beats of a stream; a supervisor that is silent for longer does not answer."""

API: Final = 1


class AdminClient:
    """One connection to one supervisor. Owned by the command that opened it."""

    def __init__(self, socket: Path, name: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._name = name or socket.parent.name
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://mstar", timeout=timeout_s, trust_env=False
        )

    @classmethod
    def of(cls, run: RunDirectory, timeout_s: float = TIMEOUT_S) -> AdminClient:
        """The client of a deployment's run directory."""
        return cls(run.admin_socket, run.name, timeout_s)

    def head(self) -> dict[str, Any]:
        """Name, state, endpoint, cause. Raises Unreachable, and UsageError when one side must be updated."""
        facts = self.get("/v1")
        if int(facts.get("min_api", API)) > API:
            raise UsageError(f"{self._name} speaks admin API {facts['min_api']}, this is {API}", hint="update mstarctl")
        if int(facts.get("api", API)) < API:
            raise UsageError(
                f"{self._name} speaks admin API {facts['api']}, this is {API}", hint=f"mstarctl restart {self._name}"
            )
        return facts

    def snapshot(self) -> dict[str, Any]:
        """One consistent view: deployment, children, ranks, values."""
        return self.get("/v1/snapshot")

    def act(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """POST one action on the deployment: stop, drain, resume or restart."""
        return self._json("POST", f"/v1/deployment/{verb}", arguments)

    def get(self, path: str) -> dict[str, Any]:
        """One read. Raises Unreachable when nobody answers, the error of the answer when it is one."""
        return self._json("GET", path, {})

    def lines(self, path: str, **arguments: Any) -> Iterator[dict[str, Any] | None]:
        """The objects of a stream; None for a beat, so that the reader may look at a clock. Ends with the stream."""
        try:
            with self._http.stream("GET", path, params=arguments) as response:
                if response.status_code >= 400:
                    response.read()
                    raise error_of(response.status_code, response.content)
                yield from (_object(line) for line in split_lines(response.iter_bytes()))
        except (httpx.TransportError, OSError) as error:
            raise self._unreachable(error) from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _json(self, method: str, path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, params=arguments)
        except (httpx.TransportError, OSError) as error:
            raise self._unreachable(error) from error
        if response.status_code >= 400:
            raise error_of(response.status_code, response.content)
        found: dict[str, Any] = json.loads(response.content)
        return found

    def _unreachable(self, error: Exception) -> Unreachable:
        detail = f"its supervisor gave no answer: {error}" if str(error) else "its supervisor gave no answer"
        return Unreachable(
            f"deployment {self._name!r} does not answer", detail, f"mstarctl logs {self._name} --from supervisor"
        )


def _object(line: bytes) -> dict[str, Any] | None:
    found: dict[str, Any] = json.loads(line)
    return None if found.get("beat") is True and len(found) == 1 else found


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines of a byte stream, split at LF alone: JSON text may hold every other line separator."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line for line in lines if line)
    if rest:
        yield rest


def error_of(status: int, body: bytes) -> MstarError:
    """The error that an answer of the admin socket tells of."""
    try:
        facts = json.loads(body)
    except ValueError:
        facts = {"title": f"the supervisor answered {status}", "detail": body[:200].decode("utf-8", "replace")}
    kinds: dict[int, type[MstarError]] = {400: UsageError, 403: Refused, 404: NotFound, 503: Unavailable}
    kind = kinds.get(status, MstarError)
    return kind(
        str(facts.get("title", "")), str(facts.get("detail", "")), str(facts.get("hint", "")), code=facts.get("code")
    )
