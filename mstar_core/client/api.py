"""The api's client: native generation as a stream of lines, speech, models. Synchronous, httpx only. Used by `call`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

import httpx

from mstar_core.client.frames import Line, read_lines
from mstar_core.client.problems import problem_of, problem_of_body
from mstar_core.errors import MstarError, TransportError, Unreachable

CONNECT_S: Final = 5.0
SILENCE_S: Final = 60.0
"""Four of the blank lines that the api sends every 15 s while it has nothing else; after that the peer is gone."""

Upload = tuple[str, bytes]
"""Name and content of a file."""


class ApiClient:
    """Speaks to one api. Closing it, or leaving a stream early, closes the connection, which cancels the request."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        """transport: for tests and for connections that go another way than TCP."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url
        self._http = httpx.Client(
            base_url=base_url, headers=headers, transport=transport, trust_env=False,
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
        )  # fmt: skip

    def generate(
        self,
        *,
        outputs: Sequence[str],
        text: str | None = None,
        files: Sequence[Upload] = (),
        params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Iterator[Line]:
        """Stream one request: a `start` line, output lines as they are made, a `done` line.

        Raises the MstarError that the api tells of, also from the middle of the stream, and TransportError when the
        body ends without its `done` line. Close the iterator to cancel.
        """
        fields = {
            "output_modalities": ",".join(outputs),
            "stream_events": "full",
            "model_kwargs": json.dumps(dict(params or {})),
        }
        fields |= {} if text is None else {"text": text}
        parts: list[tuple[str, Any]] = [(name, (None, value)) for name, value in fields.items()]
        parts += [("files", upload) for upload in files]
        with self._stream("POST", "/generate", request_id, files=parts) as response:
            for line in read_lines(response.iter_bytes()):
                if line.modality == "error":
                    raise _line_problem(line)
                yield line
                if line.modality == "done":
                    return
            raise TransportError(
                "the answer broke off before its end", hint="mstarctl logs tells why; send it again", peer=self.base_url
            )

    def speech(
        self,
        text: str,
        *,
        voice: str | None = None,
        form: str = "wav",
        is_streamed: bool = True,
        params: Mapping[str, Any] | None = None,
    ) -> Iterator[bytes]:
        """The sound of `text` in the form asked for, as it arrives. Raises as `generate`."""
        body: dict[str, Any] = {**(params or {}), "input": text, "response_format": form, "stream": is_streamed}
        if voice is not None:
            body["voice"] = voice
        with self._stream("POST", "/v1/audio/speech", None, json=body) as response:
            yield from response.iter_bytes()

    def models(self) -> list[dict[str, Any]]:
        """What the deployment serves."""
        with self._stream("GET", "/v1/models", None) as response:
            response.read()
            found: list[dict[str, Any]] = response.json()["data"]
            return found

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _stream(self, method: str, path: str, request_id: str | None, **content: Any) -> Iterator[httpx.Response]:
        headers = {"X-Request-ID": request_id} if request_id else {}
        try:
            with self._http.stream(method, path, headers=headers, **content) as response:
                if response.status_code != 200:
                    response.read()
                    raise problem_of_body(
                        response.status_code, response.content, request_id=response.headers.get("X-Request-ID", ""),
                        retry_after=response.headers.get("Retry-After", ""),
                    )  # fmt: skip
                yield response
        except httpx.ConnectError as error:
            raise Unreachable(
                f"nothing answers at {self.base_url}", str(error), "mstarctl ps shows what runs"
            ) from error
        except httpx.TimeoutException as error:
            raise Unreachable(
                f"{self.base_url} fell silent", f"no byte for {SILENCE_S:g} s", "mstarctl ps; mstarctl logs"
            ) from error
        except httpx.TransportError as error:
            raise TransportError(
                "the connection to the api broke", str(error), "mstarctl logs tells why", peer=self.base_url
            ) from error


def _line_problem(line: Line) -> MstarError:
    facts = line.metadata
    status = facts.get("status")
    return problem_of(
        status if isinstance(status, int) else 500, line.data.decode("utf-8", "replace"), facts.get("code"),
        param=facts.get("param"), request_id=str(facts.get("request_id") or ""),
    )  # fmt: skip
