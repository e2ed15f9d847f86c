"""Connections cut at every position of a request and of a response, on every route: the request is cancelled.

`MSTAR_CUTS=1` tries every byte; by default every seventh, which reaches every state of the parsers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import httpx

from mstar_core.messages.requests import NewRequest
from tests.api.conftest import Api, running
from tests.fakes import media
from tests.fakes.conductor import FakeDeployment, echo
from tests.fakes.omni_model import SPEC

STEP: Final = int(os.environ.get("MSTAR_CUTS", "7"))
AT_ONCE: Final = 32
Note = Callable[[str, object], None]

SAY: Final = [{"role": "user", "content": "hi"}]
PNG: Final = media.image(4, 4)
ROUTES: dict[str, dict[str, Any]] = {
    "generate-multipart": {"url": "/generate", "data": {"text": "x"}, "files": {"files": ("a.png", PNG)}},
    "generate-form": {"url": "/generate", "data": {"text": "x", "output_modalities": "audio"}},
    "generate-json": {"url": "/generate", "json": {"text": "x", "output_modalities": ["audio"], "stream": False}},
    "speech-whole": {"url": "/v1/audio/speech", "json": {"input": "x"}},
    "speech-stream": {"url": "/v1/audio/speech", "json": {"input": "x", "stream": True}},
    "speech-events": {"url": "/v1/audio/speech", "json": {"input": "x", "stream_format": "sse"}},
    "chat-whole": {"url": "/v1/chat/completions", "json": {"messages": SAY, "n": 2}},
    "chat-stream": {"url": "/v1/chat/completions", "json": {"messages": SAY, "stream": True}},
    "responses-whole": {"url": "/v1/responses", "json": {"input": "hi"}},
    "responses-stream": {"url": "/v1/responses", "json": {"input": "hi", "stream": True}},
    "image": {"url": "/v1/images/generations", "json": {"prompt": "x"}},
    "edit": {"url": "/v1/images/edits", "data": {"prompt": "x"}, "files": {"image": ("a.png", PNG)}},
    "transcription": {"url": "/v1/audio/transcriptions", "files": {"file": ("a.wav", media.wav(0.01))}},
}


def bytes_of(request: httpx.Request) -> bytes:
    """Return a request as bytes on the wire."""
    lines = [f"{request.method} {request.url.raw_path.decode()} HTTP/1.1".encode()]
    lines += [name + b": " + value for name, value in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n" + request.read()


class Cutter:
    """Sends a request of one route and cuts it. names: ids of the requests sent."""

    def __init__(self, api: Api, route: str) -> None:
        self.api = api
        self.route = route
        self.names: list[str] = []
        self._what = ROUTES[route]
        self._slots = asyncio.Semaphore(AT_ONCE)

    def raw(self, name: str) -> bytes:
        """Return the whole request with its own id."""
        headers = {"X-Request-ID": name}
        return bytes_of(self.api.client.build_request("POST", **self._what, headers=headers))

    async def cut(self, *, send: int | None = None, read: int = 0, until: bytes = b"", is_reset: bool = False) -> bytes:
        """Send `send` bytes (None: all), read up to `until` and `read` more bytes, and cut: by FIN or by RST."""
        async with self._slots:
            name = f"cut-{self.route}-{len(self.names)}"
            self.names.append(name)
            data = self.raw(name)
            reader, writer = await asyncio.open_connection("127.0.0.1", self.api.process.port)
            writer.write(data if send is None else data[:send])
            await writer.drain()
            got = await reader.readuntil(until) if until else b""
            with suppress(asyncio.IncompleteReadError):  # times in a response change its length by a few bytes
                got += await reader.readexactly(read) if read else b""
            if is_reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort() if is_reset else writer.close()
            return got

    def outcomes(self) -> list[str]:
        """Return one outcome per request that ran."""
        registry = self.api.process.registry
        found = [registry.outcome(name, "") for name in self.names]
        return [outcome["status"] for outcome in found if outcome is not None]


class Neighbour:
    """An audio stream that runs beside the cut connections. Its chunks arrive when `feed` is called."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._count = 0
        self._task: asyncio.Task[httpx.Response] | None = None
        self._request: NewRequest | None = None

    async def begin(self) -> None:
        body = {"text": "neighbour", "output_modalities": "audio", "request_id": f"neighbour-{id(self)}"}
        seen = len(self._api.fake.requests)
        self._api.fake.script = None
        self._task = asyncio.create_task(self._api.client.post("/generate", data=body))
        self._request = await self._api.fake.next_request(seen + 1)

    def feed(self) -> None:
        assert self._request is not None
        self._count += 1
        self._api.fake.audio(self._request.handle, value=self._count)

    async def whole(self) -> bool:
        """End it and return whether every chunk arrived in order and unchanged."""
        assert self._request is not None and self._task is not None
        self._api.fake.finish(self._request.handle)
        lines = [json.loads(line) for line in (await self._task).text.splitlines() if line]
        wanted = [number.to_bytes(2, "little") * 2048 for number in range(1, self._count + 1)]
        return [base64.b64decode(line["data"]) for line in lines] == wanted


async def clean(api: Api, held: int = 0) -> None:
    await api.until(lambda: len(api.process.registry) == held)
    await api.fake.until(lambda: api.fake.live_loans == 0)


async def test_a_request_that_is_cut_anywhere_never_runs(record_property: Note) -> None:
    cuts = 0
    async with running(model=SPEC) as api:
        neighbour = Neighbour(api)
        await neighbour.begin()
        for route in ROUTES:
            cutter = Cutter(api, route)
            places = range(0, len(cutter.raw("cut-0")), STEP)
            for first in range(0, len(places), AT_ONCE):
                neighbour.feed()
                some = places[first : first + AT_ONCE]
                await asyncio.gather(*(cutter.cut(send=at, is_reset=at % 2 == 0) for at in some))
            await clean(api, held=1)
            assert cutter.outcomes() == [], route
            cuts += len(places)
        assert len(api.fake.requests) == 1 and not api.fake.cancels, "only the neighbour ran"
        assert await neighbour.whole()
        api.fake.script = echo
        answers = [(await api.client.post(**what)).status_code for what in ROUTES.values()]
        await clean(api)
    assert answers == [200] * len(ROUTES)
    record_property("requests_cut", cuts)
    record_property("requests_lost", len(ROUTES) - answers.count(200))


def begun(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: one output of every requested kind, and no end."""
    for kind in request.outputs:
        match kind:
            case "text":
                fake.text(request.handle, b"word")
            case "audio":
                fake.audio(request.handle)
            case "image":
                fake.image(request.handle, 16, 8)


STREAMS: Final = ("generate-multipart", "generate-form", "speech-stream", "speech-events", "chat-stream")
READS: Final = (0, 1, 2, 7, 30, 60)


async def test_an_answer_that_is_cut_in_the_making_is_cancelled(record_property: Note) -> None:
    streams = lost = 0
    async with running(model=SPEC, max_concurrent_requests=200) as api:
        neighbour = Neighbour(api)
        await neighbour.begin()
        api.fake.script = begun
        for route in ROUTES:
            cutter, seen, cancelled = Cutter(api, route), len(api.fake.requests), len(api.fake.cancels)
            if route in STREAMS:
                ends = b"\r\n\r\n"
                await asyncio.gather(*(cutter.cut(until=ends, read=at, is_reset=at % 2 == 0) for at in READS))
            else:
                for is_reset in (False, True):
                    cutting = await waiting(cutter)
                    cutting.transport.abort() if is_reset else cutting.close()
            neighbour.feed()
            await clean(api, held=1)
            await all_cancelled(api, seen, cancelled, least=len(cutter.names))
            told = api.fake.cancels[cancelled:]
            assert len(told) == len(api.fake.requests[seen:]), f"{route}: each is cancelled once"
            assert {cancel.why for cancel in told} == {"disconnect"}, route
            outcomes = cutter.outcomes()
            if route != "chat-whole":  # a group is remembered by its items
                assert outcomes == ["cancelled"] * len(cutter.names), route
                lost += len(cutter.names) - len(outcomes)
            streams += len(cutter.names)
        assert await neighbour.whole()
    record_property("streams_cut", streams)
    record_property("requests_lost", lost)


async def all_cancelled(api: Api, seen: int, cancelled: int, least: int) -> None:
    """Wait until the requests after the first `seen`, at least `least`, were cancelled."""

    def are_cancelled() -> bool:
        ran = {request.handle for request in api.fake.requests[seen:]}
        return len(ran) >= least and {cancel.handle for cancel in api.fake.cancels[cancelled:]} == ran

    await api.fake.until(are_cancelled)


async def waiting(cutter: Cutter) -> asyncio.StreamWriter:
    """Open a connection whose request runs and whose response has not begun."""
    api, seen = cutter.api, len(cutter.api.fake.requests)
    name = f"cut-{cutter.route}-{len(cutter.names)}"
    cutter.names.append(name)
    _, writer = await asyncio.open_connection("127.0.0.1", api.process.port)
    writer.write(cutter.raw(name))
    await api.fake.next_request(seen + 1)
    return writer


async def test_an_answer_that_is_cut_anywhere_leaves_nothing(record_property: Note) -> None:
    cuts = 0
    async with running(echo, model=SPEC, max_concurrent_requests=64) as api:
        for route in ("generate-form", "speech-stream", "chat-stream", "chat-whole", "image"):
            wanted = await body_of(api, route)
            cutter = Cutter(api, route)
            length = await length_of_answer(cutter)
            places = range(0, length - 8, max(STEP, length // 60) if STEP > 1 else 1)
            await asyncio.gather(*(cutter.cut(read=at, is_reset=at % 2 == 0) for at in places))
            await clean(api)
            assert await body_of(api, route) == wanted, route
            cuts += len(places)
    record_property("answers_cut", cuts)


async def body_of(api: Api, route: str) -> Any:
    """Return a whole response without ids and times."""
    answer = await api.client.post(**ROUTES[route], headers={"X-Request-ID": "same"})
    assert answer.status_code == 200
    if answer.headers["content-type"].startswith("application/json"):
        found = answer.json()
        return {name: value for name, value in found.items() if name not in ("created", "usage")}
    return re.sub(r'"created":\d+', "", answer.text)


async def length_of_answer(cutter: Cutter) -> int:
    """Return the size of the whole response on the wire."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cutter.api.process.port)
    writer.write(cutter.raw("length").replace(b"Connection: keep-alive", b"Connection: close"))
    data = await reader.read(-1)
    writer.close()
    assert data.startswith(b"HTTP/1.1 200")
    return len(data)


BMP: Final = media.image(500, 400, "BMP")
LARGE: dict[str, dict[str, Any]] = {
    "upload": {"url": "/generate", "data": {"text": "x"}, "files": {"files": ("a.bmp", BMP)}},
    "form": {"url": "/generate", "data": {"text": "x" * 300_000}},
    "json": {"url": "/generate", "json": {"text": "x" * 300_000}},
    "speech": {"url": "/v1/audio/speech", "json": {"input": "x", "user": "u" * 300_000}},
    "chat": {"url": "/v1/chat/completions", "json": {"messages": [{"role": "user", "content": "x" * 300_000}]}},
    "responses": {"url": "/v1/responses", "json": {"input": "x" * 300_000, "background": False}},
    "edit": {"url": "/v1/images/edits", "data": {"prompt": "x"}, "files": {"image": ("a.bmp", BMP)}},
    "transcription": {"url": "/v1/audio/transcriptions", "files": {"file": ("a.wav", media.wav(10))}},
}


async def test_a_client_that_leaves_after_a_large_body_is_noticed(record_property: Note) -> None:
    async with running(model=SPEC) as api:
        for number, (route, what) in enumerate(LARGE.items(), start=1):
            _, writer = await asyncio.open_connection("127.0.0.1", api.process.port)
            writer.write(bytes_of(api.client.build_request("POST", **what)))
            request = await api.fake.next_request(number)
            writer.close()
            await api.fake.until(lambda count=number: len(api.fake.cancels) == count)  # type: ignore[misc]
            assert api.fake.cancels[-1].handle == request.handle, route
            assert api.fake.cancels[-1].why == "disconnect", route
            await clean(api)
    record_property("streams_cut", len(LARGE))
