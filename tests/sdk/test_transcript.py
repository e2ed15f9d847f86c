"""Requests of clients written for the earlier system, byte by byte, and the responses that they read."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import requests

from tests.api.conftest import LIMIT_S, Api
from tests.fakes.any_model import PIXELS, SOUND, png
from tests.fakes.conductor import FakeDeployment, begin
from tests.fakes.speech_model import RATE
from tests.sdk.conftest import SHARED

STREAMED = b"""\
POST /generate HTTP/1.1\r
Host: localhost:8000\r
User-Agent: python-requests/2.31.0\r
Accept-Encoding: gzip, deflate\r
Accept: */*\r
Connection: keep-alive\r
Content-Length: 446\r
Content-Type: multipart/form-data; boundary=8f2b0cf0e0d04a1bb1a7e7a2a4f9c9d1\r
\r
--8f2b0cf0e0d04a1bb1a7e7a2a4f9c9d1\r
Content-Disposition: form-data; name="text"\r
\r
hi\r
--8f2b0cf0e0d04a1bb1a7e7a2a4f9c9d1\r
Content-Disposition: form-data; name="output_modalities"\r
\r
audio\r
--8f2b0cf0e0d04a1bb1a7e7a2a4f9c9d1\r
Content-Disposition: form-data; name="streaming"\r
\r
true\r
--8f2b0cf0e0d04a1bb1a7e7a2a4f9c9d1\r
Content-Disposition: form-data; name="model_kwargs"\r
\r
{"voice": "tara"}\r
--8f2b0cf0e0d04a1bb1a7e7a2a4f9c9d1--\r
"""
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost:8000\r\nUser-Agent: python-requests/2.31.0\r\nAccept: */*\r\n\r\n"


async def conversation(port: int, request: bytes) -> tuple[str, dict[str, str], bytes]:
    """Send bytes; give status line, headers and the body with its chunks joined."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    writer.close()
    await writer.wait_closed()
    return head[0], headers, body


@SHARED
async def test_the_bytes_of_a_streamed_request_and_its_answer(api: Api) -> None:
    assert api.process.port is not None
    status, headers, body = await conversation(api.process.port, sized(STREAMED))
    assert (status, headers["content-type"]) == ("HTTP/1.1 200 OK", "application/x-ndjson; charset=utf-8")
    lines = body.split(b"\n")
    assert lines.pop() == b""
    facts = '"metadata":{"sample_rate":24000,"num_channels":1,"samples":%d,"offset_samples":%d}}'
    pieces = ((SOUND[:2048], 0), (SOUND[2048:], 2048))
    assert [line.decode() for line in lines] == [
        f'{{"modality":"audio","data":"{base64.b64encode(part.tobytes()).decode()}",' + facts % (len(part), offset)
        for part, offset in pieces
    ]


def sized(request: bytes) -> bytes:
    """The request with the true length of its body, whatever the file's line ends made of it."""
    head, _, body = request.partition(b"\r\n\r\n")
    return head.replace(b"Content-Length: 446", b"Content-Length: %d" % len(body)) + b"\r\n\r\n" + body


@SHARED
async def test_health_is_asked_and_answered_as_before(api: Api) -> None:
    assert api.process.port is not None
    status, _, body = await conversation(api.process.port, HEALTH)
    assert (status, json.loads(body)) == ("HTTP/1.1 200 OK", {"status": "healthy"})


class Earlier:
    """Reads answers as the earlier client did: everything that is not an image or sound is text."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, stream: bool, files: list[Any] | None = None, **fields: str) -> requests.Response:
        parts: list[Any] = [(name, (None, value)) for name, value in fields.items()]
        parts += [("streaming", (None, "true" if stream else "false")), *(files or [])]
        answer = requests.post(f"{self.url}/generate", files=parts, stream=stream, timeout=600)
        answer.raise_for_status()
        return answer

    def events(self, **fields: str) -> list[tuple[str, Any]]:
        with self.post(True, **fields) as answer:
            return [self.event(json.loads(line)) for line in answer.iter_lines() if line]

    def event(self, item: dict[str, Any]) -> tuple[str, Any]:
        data = base64.b64decode(item["data"])
        match item["modality"]:
            case "audio":
                return "audio", (data, item["metadata"]["sample_rate"])
            case "image":
                return "image", data
            case _:
                return "text", data.decode("utf-8")

    def whole(self, files: list[Any] | None = None, **fields: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.post(False, files, **fields).json()
        return answer


@SHARED
async def test_a_loop_over_sound_never_meets_another_event(api: Api) -> None:
    earlier = Earlier(api.url)
    events = await asyncio.to_thread(earlier.events, text="hi", output_modalities="audio", model_kwargs="{}")
    assert [kind for kind, _ in events] == ["audio", "audio"]
    assert b"".join(data for _, (data, _) in events) == SOUND.tobytes()
    assert {rate for _, (_, rate) in events} == {RATE}
    mixed = await asyncio.to_thread(earlier.events, text="hi", output_modalities="text,image")
    assert [kind for kind, _ in mixed][-1] == "image" and {kind for kind, _ in mixed[:-1]} == {"text"}


@SHARED
async def test_a_failed_stream_ends_with_one_line_that_old_clients_show_as_text(api: Api) -> None:
    loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

    def read(url: str) -> list[tuple[str, Any]]:
        earlier, events = Earlier(url), []
        with earlier.post(True, text="hi", output_modalities="audio", model_kwargs="{}") as answer:
            for line in answer.iter_lines():
                events.append(earlier.event(json.loads(line)))
                loop.call_soon_threadsafe(has_begun.set)
        return events

    api.fake.script = begin
    asking = asyncio.create_task(asyncio.to_thread(read, api.url))
    async with asyncio.timeout(LIMIT_S):
        await has_begun.wait()
    api.fake.fail(api.fake.requests[0].handle)
    events = await asking
    assert [kind for kind, _ in events] == ["audio", "text"] and "failed" in events[-1][1]


@SHARED
async def test_whole_answers_are_grouped_by_modality(api: Api) -> None:
    files = [("files", ("a.png", png(PIXELS), "application/octet-stream"))]
    body = await asyncio.to_thread(
        Earlier(api.url).whole, files, text="hi", input_modalities="image,text", output_modalities="audio,image"
    )
    (sound,), (image,) = body["outputs"]["audio"], body["outputs"]["image"]
    assert base64.b64decode(sound["data"]) == SOUND.tobytes() and sound["metadata"]["sample_rate"] == RATE
    assert base64.b64decode(image["data"]) == png(PIXELS)
    assert body["warnings"][-1] == "order image0,text0"


@SHARED
async def test_the_benchmark_runners_request_is_taken(api: Api) -> None:
    kwargs = {"max_tokens": 64, "max_output_tokens": 32, "ignore_eos": True, "temperature": 0.0}
    files = [("files", ("image.jpg", png(PIXELS), "application/octet-stream"))]

    def run(fake: FakeDeployment, request: Any) -> None:
        fake.text(request.handle, b"abc")
        fake.finish(request.handle, "length")

    def lines_of(url: str) -> list[dict[str, Any]]:
        kwargs_text = json.dumps(kwargs)
        with Earlier(url).post(True, files, text="hi", output_modalities="text", model_kwargs=kwargs_text) as answer:
            return [json.loads(line) for line in answer.iter_lines()]

    api.fake.script = run
    lines = await asyncio.to_thread(lines_of, api.url)
    assert api.fake.requests[0].params["max_output_tokens"] == 32
    assert [base64.b64decode(line["data"]) for line in lines] == [b"a", b"b", b"c"]  # one token a line
