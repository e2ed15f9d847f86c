"""A caller's httpx.Client or requests.Session, and the bytes that are sent through them."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import requests

from mstar_core.client import (
    AudioChunk,
    BadRequestError,
    MStarClient,
    RequestTimeoutError,
    StreamError,
    UnavailableError,
)
from tests.api.conftest import Api
from tests.fakes.any_model import PIXELS, SOUND, WORDS, png
from tests.fakes.conductor import begin
from tests.sdk.conftest import SHARED
from tests.sdk.test_failure import nobody


@SHARED
async def test_a_requests_session_carries_everything(api: Api) -> None:
    def work(url: str) -> None:
        with requests.Session() as session:
            session.headers["X-Request-ID"] = "from-the-session"
            with MStarClient(url, session=session) as client:
                got = client.generate(text="hi", images=png(PIXELS), output_modalities=("text", "image"))
                assert (got.text, got.images, got.request_id) == (WORDS, [png(PIXELS)], "from-the-session")
                with client.stream(text="hi", output_modalities="audio") as stream:
                    events = list(stream)
                assert b"".join(event.data for event in events if isinstance(event, AudioChunk)) == SOUND.tobytes()
                assert stream.finish_reason == "stop"
                with pytest.raises(BadRequestError, match="colour"):
                    client.generate(text="hi", colour=1)
                assert client.health() and client.cancel("nobody") is False
            assert session.get(f"{url}/health").status_code == 200  # the session is still the caller's

    await asyncio.to_thread(work, api.url)


@SHARED
async def test_closing_a_stream_over_a_requests_session_cancels(api: Api) -> None:
    def work(url: str) -> object:
        client = MStarClient(url, session=requests.Session())
        with client.stream(text="hi", output_modalities="audio") as stream:
            assert isinstance(next(stream), AudioChunk)  # while the request still runs: nothing is held back
        return client, stream

    api.fake.script = begin
    held = await asyncio.to_thread(work, api.url)
    await api.fake.until(lambda: bool(api.fake.cancels))
    del held  # closing did it, not the end of the last name


def test_failures_of_requests_are_ours() -> None:
    with nobody() as url, pytest.raises(UnavailableError) as gone:
        MStarClient(url, session=requests.Session()).generate(text="hi")
    assert gone.value.code == "unreachable"
    with answering(b"") as url, pytest.raises(RequestTimeoutError) as late:
        MStarClient(url, timeout=0.2, session=requests.Session()).generate(text="hi")
    assert late.value.code == "silent"
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with answering(head + b"5\r\nabc", close=True) as url, pytest.raises(StreamError) as cut:
        list(MStarClient(url, session=requests.Session()).stream(text="hi"))
    assert cut.value.code == "broken_off"
    with answering(b"", close=True) as url, pytest.raises(UnavailableError) as closed:
        MStarClient(url, session=requests.Session(), retries=2).generate(text="hi")
    assert closed.value.code == "cut"


@contextmanager
def answering(data: bytes, *, close: bool = False) -> Iterator[str]:
    """A server that reads a request's head and writes `data`, whatever was asked; then it waits, or closes."""
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.wfile.write(data)
            self.wfile.flush()
            self.close_connection = True
            if not close:
                over.wait(60)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            over.set()
            server.shutdown()


def test_an_httpx_client_is_used_as_it_is_and_stays_open() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"data": []})

    session = httpx.Client(transport=httpx.MockTransport(answer), headers={"X-Team": "arms"})
    with MStarClient("http://api:9/base/", session=session, api_key="k", timeout=3) as client:
        client.models()
    assert str(seen[0].url) == "http://api:9/base/v1/models"
    assert (seen[0].headers["X-Team"], seen[0].headers["Authorization"]) == ("arms", "Bearer k")
    assert seen[0].extensions["timeout"]["read"] == 3
    assert not session.is_closed


@pytest.mark.parametrize("wrong", ["http://api", object(), httpx.AsyncClient()], ids=["text", "object", "async"])
def test_anything_else_is_no_session(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"an httpx\.Client or a requests\.Session"):
        MStarClient(session=wrong)
