"""Client of one API for `mstarctl call` and `api`, which shows the lines of an answer as they arrive."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from mstar_core.client import Line, StreamError
from mstar_core.client.calls import HttpCall, generate_call, get_call
from mstar_core.client.media import MediaFile
from mstar_core.client.reader import LineReader, error_event
from mstar_core.client.results import ModelSample, json_object, samples_of
from mstar_core.client.streams import error_of_event
from mstar_core.client.sync_client import run
from mstar_core.closing import Closing
from mstar_core.errors import TransportError

if TYPE_CHECKING:
    import httpx

SILENCE_S: Final = 60.0
"""Four of the heartbeats that the server sends every 15 s; a longer silence means that the peer is gone."""


class ApiClient(Closing):
    """Client of one API. Closing it, or leaving a stream early, closes the connection, which cancels the request."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """transport: replaces TCP, for tunnels, TLS and tests. Proxies of the environment are not used.

        silence_s: longest time without data; a gateway that loads a model is silent for longer than a deployment.
        """
        import httpx

        from mstar_core.client.http import Http, SyncSession  # here, because httpx is slow to import

        self.base_url = base_url
        has_tls = base_url.startswith("https:")  # reading the system's certificates takes 17 ms
        self._client = httpx.Client(transport=transport, trust_env=False, verify=has_tls)
        self._http = Http(SyncSession(self._client), base_url, timeout_s=silence_s, api_key=api_key)

    def generate(
        self,
        *,
        outputs: Sequence[str],
        text: str | None = None,
        files: Sequence[tuple[str, bytes]] = (),
        params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Iterator[Line]:
        """Stream one request: a `start` line, output lines as they are made, a `done` line.

        files: name and content of each. Raises the error that the API reports, also in the middle of the stream, and
        TransportError if the body ends without a `done` line. Close the iterator to cancel.
        """
        call = generate_call(
            text=text,
            output_modalities=outputs,
            stream=True,
            request_id=request_id,
            model_kwargs=params or {},
            files=[MediaFile(name, data, "tensor") for name, data in files],
            may_frame=False,
        )
        response = run(self._http.open(call))
        body = self._http.session.body(response)
        reader = LineReader()
        try:
            while (data := run(self._http.next_chunk(body))) is not None:
                for line in reader.push(data):
                    if line.modality == "error":
                        raise error_of_event(error_event(line))
                    yield line
                    if line.modality == "done":
                        return
        finally:
            response.close()
        raise TransportError(
            "the response broke off before its end",
            hint="see mstarctl logs for the cause, then send it again",
            peer=self.base_url,
        )

    def chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Stream POST /v1/chat/completions: its events as they arrive. body: with `messages` and `stream: true`.

        Raises the error that the API reports. Close the iterator to cancel.
        """
        call = HttpCall(method="POST", path="/v1/chat/completions", body=dict(body), accept="text/event-stream")
        response = run(self._http.open(call))
        chunks, rest = self._http.session.body(response), b""
        try:
            while (data := run(self._http.next_chunk(chunks))) is not None:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data: "):
                        continue
                    text = line[6:].strip()
                    if text == b"[DONE]":
                        return
                    event: dict[str, Any] = json.loads(text)
                    if "error" in event:
                        facts = event["error"]
                        raise StreamError(str(facts.get("message")), code=facts.get("code"), status=500)
                    yield event
        finally:
            response.close()
        raise TransportError("the answer broke off before its end", hint="see mstarctl logs", peer=self.base_url)

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the deployment serves."""
        models: list[dict[str, Any]] = run(self._http.fetch(get_call("/v1/models"))).json()["data"]
        return models

    def samples(self) -> list[ModelSample]:
        """Return inputs that fit the served model; the one to try first is the first."""
        return samples_of(json_object(run(self._http.fetch(get_call("/v1/samples")))))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
