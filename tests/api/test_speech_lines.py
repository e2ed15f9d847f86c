"""POST /v1/audio/speech with a body of JSON lines: sentences are spoken while the text still arrives."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from mstar_core.api.http.json_lines import json_lines
from mstar_core.errors import MstarError, TooLarge
from mstar_core.graph import Sampling
from mstar_core.plugin import param
from tests.api.conftest import LIMIT_S, Api, running
from tests.api.handed_over import first_process, second_process
from tests.api.test_chat_tools import HeldParams
from tests.api.test_constraint import admits
from tests.fakes.conductor import speak
from tests.fakes.omni_model import LM
from tests.fakes.omni_model import SPEC as OMNI


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVoice(HeldParams):
    voice: str = param("ethan", "speaker", choices=("ethan", "chelsie"), openai="voice")


HELD_LM = replace(LM, sampling=Sampling(port="token", is_text=True))
HELD = replace(OMNI, params=HeldVoice, nodes=(HELD_LM, *OMNI.nodes[1:]), surfaces={})
"""A model that answers, and whose text can be held."""

PATH = "/v1/audio/speech"
TYPE = "application/x-ndjson"
CHUNK_BYTES = 4096
"""Sound of one chunk of the fake: 2,048 samples."""


class Call:
    """A request whose body and response are open at the same time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def send(self, *lines: Any) -> None:
        """Send lines, given as objects or as bytes."""
        for line in lines:
            data = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
            self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._writer.drain()

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(LIMIT_S):
            status, *fields = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(field.lower().split(": ", 1) for field in fields if field)
        return int(status.split()[1]), headers

    async def chunk(self) -> bytes:
        """Return the next chunk of the body, empty at its end. Raises IncompleteReadError if the connection ends."""
        async with asyncio.timeout(LIMIT_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def sound(self, size: int) -> bytes:
        """Return at least `size` bytes of the body."""
        data = b""
        while len(data) < size and (chunk := await self.chunk()):
            data += chunk
        return data

    async def rest(self) -> bytes:
        """Return the body to its end."""
        return await self.sound(1 << 30)


@asynccontextmanager
async def call(api: Api, headers: str = "") -> AsyncIterator[Call]:
    """Begin a request."""
    url = httpx.URL(api.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {TYPE}\r\n{headers}"
    head += "Transfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    try:
        yield Call(reader, writer)
    finally:
        writer.close()


def texts(api: Api) -> list[str]:
    return [api.fake.prompt(request) for request in api.fake.requests]


async def test_a_sentence_sounds_before_the_next_one_is_written() -> None:
    async with running(speak(2)) as api, call(api) as open_call:
        await open_call.send({"response_format": "pcm", "voice": "LEO", "seed": 7}, {"input": "The first sentence"})
        await open_call.send({"input": " ends here. And"})
        status, headers = await open_call.head()
        assert (status, headers["content-type"]) == (200, "audio/pcm;rate=24000;channels=1")
        assert headers["x-sample-rate"] == "24000"
        first = await open_call.sound(2 * CHUNK_BYTES)
        assert texts(api) == ["The first sentence ends here."]
        await open_call.send({"input": " a second"}, b"\n", {"input": "."})
        await open_call.end()
        second = await open_call.rest()
        assert first == second and len(first) == 2 * CHUNK_BYTES
        assert texts(api) == ["The first sentence ends here.", "And a second."]
        assert [request.params["voice"] for request in api.fake.requests] == ["leo", "leo"]
        assert [request.seed for request in api.fake.requests] == [7, 8]
        await api.clean()


async def test_a_client_that_sends_everything_at_once_gets_one_response() -> None:
    lines = [{"input": "One. Two", "response_format": "wav"}, {"input": " goes on. Three"}]
    body = "\n".join(map(json.dumps, lines))  # the last line has no line break
    async with running(speak(1)) as api:
        answer = await api.client.post(PATH, content=body, headers={"Content-Type": TYPE})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
        assert len(answer.content) == 44 + 3 * CHUNK_BYTES
        assert texts(api) == ["One.", "Two goes on.", "Three"]


async def test_events_hold_the_sound_and_the_sum_of_the_usage() -> None:
    body = json.dumps({"input": "One. Two.", "stream_format": "sse", "response_format": "pcm"})
    async with running(speak(1)) as api:
        answer = await api.client.post(PATH, content=body, headers={"Content-Type": TYPE})
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        sound = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
        assert len(sound) == 2 * CHUNK_BYTES
        assert events[-1]["type"] == "speech.audio.done"
        assert events[-1]["usage"]["output_tokens"] == 2 * 7


@pytest.mark.parametrize(
    ("lines", "status", "field"),
    [
        ([], 400, None),
        ([b"\n"], 400, None),
        ([b'{"input": 1}\n'], 400, "input"),
        ([b"[]\n"], 400, "line 1"),
        ([b'{"voice": "leo"}\n'], 400, "input"),
        ([b'{"input": " ... "}\n'], 400, "input"),
        ([b'{"input": "Hi", "voice": "nobody"}\n'], 400, "voice"),
        ([b'{"input": "Hi"}\n', b'{"input": " you", "voice": "leo"}\n'], 400, "voice"),
        ([b'{"input": "Hi"}\n', b"{\n"], 400, "line 2"),
        ([b'{"input": "' + b"x" * 70_000 + b'"}\n'], 413, None),
    ],
)
async def test_bad_lines_are_refused_by_name(lines: list[bytes], status: int, field: str | None) -> None:
    async with running(speak(1)) as api:
        answer = await api.client.post(PATH, content=b"".join(lines), headers={"Content-Type": TYPE})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, field), answer.text
        await api.clean()


async def test_a_bad_line_behind_spoken_sentences_ends_the_events_with_its_error() -> None:
    async with running(speak(1)) as api, call(api) as open_call:
        await open_call.send({"input": "One. Two", "stream_format": "sse"})
        await open_call.head()
        assert b"speech.audio.delta" in await open_call.chunk()
        await open_call.send(b"nonsense\n")
        rest = await open_call.rest()
        assert b"line 2 is not valid JSON" in rest
        await api.clean()


async def test_a_bad_line_behind_spoken_sentences_cuts_a_file() -> None:
    async with running(speak(1)) as api, call(api) as open_call:
        await open_call.send({"input": "One. Two", "response_format": "pcm"})
        await open_call.head()
        await open_call.sound(CHUNK_BYTES)
        await open_call.send(b"nonsense\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await open_call.rest()
        await api.clean()


async def test_it_can_be_cancelled_while_no_sentence_is_complete() -> None:
    async with running(speak(1)) as api, call(api, "X-Request-ID: mine\r\n") as open_call:
        await open_call.send({"input": "One. Two", "stream_format": "sse"})
        await open_call.head()
        await open_call.chunk()
        await api.until(lambda: api.process._service.registry.arrives("mine", "") is not None)  # type: ignore[union-attr]
        answer = await api.client.post("/v1/requests/mine/cancel")
        assert answer.json()["status"] == "cancelled"
        assert b"cancelled" in await open_call.rest()
        await api.clean()


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with running(speak(1)) as api:
        async with call(api) as open_call:
            await open_call.send({"input": "One. Two", "response_format": "pcm"})
            await open_call.head()
            await open_call.sound(CHUNK_BYTES)
        await api.until(lambda: api.process._service.registry.arrives("mine", "") is None)  # type: ignore[union-attr]
        await api.clean()


async def test_a_model_that_answers_is_held_to_each_sentence() -> None:
    async with running(speak(1), model=HELD) as api:
        body = b'{"input": "Hi there. \\"Two\\" {x}", "response_format": "pcm", "seed": 4}\n'
        answer = await api.client.post(PATH, content=body, headers={"Content-Type": TYPE})
        assert answer.status_code == 200 and answer.headers["x-speech"] == "verbatim"
        assert len(answer.content) == 2 * CHUNK_BYTES, "the sound of both sentences, without their text"
        held = [request.params["constraint"] for request in api.fake.requests]
        said = ["Hi there.", '"Two" {x}']
        assert [[admits(one, text) for text in (*said, "Hi there. More")] for one in held] == [
            [True, False, False],
            [False, True, False],
        ]
        assert all(text in api.fake.prompt(request) for text, request in zip(said, api.fake.requests, strict=True))


async def test_verbatim_chooses_between_the_text_and_an_answer_to_it() -> None:
    async with running(speak(1), model=HELD) as api:
        for verbatim, kind in ((None, "answer"), (False, "answer"), (True, "verbatim")):
            answer = await api.client.post(PATH, json={"input": "Hi", "verbatim": verbatim})
            assert (answer.status_code, answer.headers["x-speech"]) == (200, kind)
            assert (api.fake.requests[-1].params.get("constraint") is None) == (kind == "answer")
        body = b'{"input": "Hi.", "verbatim": false}\n'
        refused = await api.client.post(PATH, content=body, headers={"Content-Type": TYPE})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "verbatim")
    async with running(speak(1), model=OMNI) as api:
        refused = await api.client.post(PATH, json={"input": "Hi", "verbatim": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
    async with running(speak(1)) as api:
        refused = await api.client.post(PATH, json={"input": "Hi", "verbatim": False})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "verbatim")


async def test_another_process_goes_on_between_any_two_writes() -> None:
    body = b'{"input": "One. Two", "response_format": "pcm", "seed": 1}\n{"input": " ends. Three."}\n'
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with running(speak(2)) as api:
        with first_process(api, head.encode() + body) as wire:
            await api.until(lambda: wire.written.endswith(b"0\r\n\r\n"))
            for moment in wire.moments:
                for has in moment.client_has:
                    with second_process(api, moment, has) as went:
                        await api.until(lambda: went.received.endswith(b"0\r\n\r\n"))
                        assert len(unchunked(went.received)) == 3 * 2 * CHUNK_BYTES
                        assert unchunked(went.received) == unchunked(wire.written)


def unchunked(response: bytes) -> bytes:
    """Return the body of a chunked response."""
    _, _, rest = response.partition(b"\r\n\r\n")
    body = b""
    while rest:
        line, _, rest = rest.partition(b"\r\n")
        size = int(line, 16)
        body, rest = body + rest[:size], rest[size + 2 :]
    return body


class Pieces:
    """A body in pieces; the last one never comes."""

    def __init__(self, *pieces: bytes, ends: bool = True) -> None:
        self._pieces, self._ends = list(pieces), ends

    async def read(self) -> bytes | None:
        if not self._pieces and not self._ends:
            await asyncio.Event().wait()
        return self._pieces.pop(0) if self._pieces else None


async def test_lines_are_whole_however_their_bytes_arrive() -> None:
    pieces = Pieces(b'{"a"', b': 1}\n\n{"a": ', b"2}\n", b'{"a": 3}')
    assert [line["a"] async for line in json_lines(pieces, 1000)] == [1, 2, 3]


async def test_a_body_has_a_limit_and_must_not_fall_silent() -> None:
    with pytest.raises(TooLarge):
        [line async for line in json_lines(Pieces(b'{"a": 1}\n' * 20), 100)]
    with pytest.raises(MstarError, match="no byte of the body"):
        [line async for line in json_lines(Pieces(b'{"a": 1}\n', ends=False), 100, idle_s=0.01)]
