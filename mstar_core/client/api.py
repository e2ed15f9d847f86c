"""ApiClient: one deployment's answers as plain lines, of whatever modality. Used by `mstarctl call`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from mstar_core.client.call import generate_call, get_call
from mstar_core.client.event import error_of
from mstar_core.client.line import Line, LineReader
from mstar_core.client.media import Upload
from mstar_core.client.stream import failure_of_event
from mstar_core.errors import TransportError

if TYPE_CHECKING:
    import httpx

SILENCE_S: Final = 60.0
"""Four of the blank lines that the api sends every 15 s while it has nothing else; after that the peer is gone."""


class ApiClient:
    """Speaks to one api. Closing it, or leaving a stream early, closes the connection, which cancels the request."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        """transport: for tests and ways other than TCP. Proxies of the environment are not used."""
        import httpx

        from mstar_core.client.http import Http  # here, as everywhere in this package: httpx is slow to load

        self.base_url = base_url
        self._session = httpx.Client(transport=transport, trust_env=False)
        self._http = Http(base_url, timeout_s=SILENCE_S, session=self._session, api_key=api_key)

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

        files: name and content of each. Raises the MStarError that the api tells of, also from the middle of the
        stream, and TransportError when the body ends without its `done` line. Close the iterator to cancel.
        """
        call = generate_call(
            text=text, output_modalities=outputs, stream=True, request_id=request_id, model_kwargs=params or {},
            uploads=[Upload(name, data, "tensor") for name, data in files], may_frame=False,
        )  # fmt: skip
        response = self._http.open(call)
        reader = LineReader()
        try:
            for data in self._http.chunks(response):
                for line in reader.push(data):
                    if line.modality == "error":
                        raise failure_of_event(error_of(line))
                    yield line
                    if line.modality == "done":
                        return
        finally:
            response.close()
        raise TransportError(
            "the answer broke off before its end", hint="mstarctl logs tells why; send it again", peer=self.base_url
        )

    def models(self) -> list[dict[str, Any]]:
        """What the deployment serves."""
        found: list[dict[str, Any]] = self._http.fetch(get_call("/v1/models")).json()["data"]
        return found

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
