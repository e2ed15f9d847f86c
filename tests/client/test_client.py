"""ApiClient: lines of any fragmentation, errors before and in a stream; WAV files that are valid at any end."""

from __future__ import annotations

import base64
import io
import json
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar_core.client import BadRequestError, ConflictError, Line, OverloadedError, WavFile
from mstar_core.client.reader import LineReader
from mstar_core.errors import ExitCode, MstarError, TransportError
from mstarctl.client.api import ApiClient

Answer = Callable[[httpx.Request], httpx.Response]


def line(modality: str, data: bytes = b"", **metadata: object) -> bytes:
    body = {"modality": modality, "data": base64.b64encode(data).decode(), "metadata": metadata}
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


def client(answer: Answer) -> ApiClient:
    return ApiClient("http://api", api_key="key", transport=httpx.MockTransport(answer))


def streamed(*parts: bytes) -> Answer:
    def chunks() -> Iterator[bytes]:
        yield from parts

    return lambda request: httpx.Response(200, content=chunks())


@given(st.lists(st.text(max_size=20), max_size=6), st.data())
def test_lines_do_not_depend_on_the_fragmentation_of_the_body(texts: list[str], data: st.DataObject) -> None:
    # Text holds every separator that JSON leaves alone: U+2028, U+0085 and others.
    body = b"\n".join(
        line("text", text.encode("utf-8", "surrogatepass"), note=text.encode("utf-8", "replace").decode())
        for text in texts
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    reader = LineReader()
    assert [item.data for part in parts for item in reader.push(part)] == [
        text.encode("utf-8", "surrogatepass") for text in texts
    ]


def test_a_request_sends_its_parts_and_ends_with_done() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        request.read()
        seen.append(request)
        return httpx.Response(
            200, content=line("start", seed=4) + b"\n" + line("audio", b"\1\2") + line("done", finish_reason="stop")
        )

    with client(answer) as api:
        output = list(api.generate(outputs=("audio",), text="hi", params={"voice": "tara"}, request_id="r-1"))
    assert [item.modality for item in output] == ["start", "audio", "done"]
    assert output[1] == Line(modality="audio", data=b"\1\2")
    assert seen[0].headers["Authorization"] == "Bearer key" and b"r-1" in seen[0].content
    assert b'{"voice": "tara"}' in seen[0].content and b"stream_events" in seen[0].content


def test_an_error_in_the_middle_comes_after_what_was_before_it() -> None:
    error = line("error", b"worker-0 was killed", status=503, code="worker_lost", request_id="r-9")
    with client(streamed(line("audio", b"\1\2"), error)) as api:
        lines = api.generate(outputs=("audio",), text="hi")
        assert next(lines).modality == "audio"
        with pytest.raises(MstarError) as caught:
            next(lines)
    assert (caught.value.code, caught.value.title) == ("worker_lost", "worker-0 was killed")
    assert caught.value.exit_code is ExitCode.UNREACHABLE


@pytest.mark.parametrize(
    "body", [b"", line("audio", b"\1\2"), line("audio", b"\1\2")[:-9]], ids=["empty", "no done", "cut"]
)
def test_a_body_that_breaks_off_is_an_error(body: bytes) -> None:
    with client(streamed(body)) as api, pytest.raises(TransportError, match="broke off"):
        list(api.generate(outputs=("audio",), text="hi"))


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, BadRequestError, ExitCode.USAGE),
        (409, ConflictError, ExitCode.USAGE),
        (429, OverloadedError, ExitCode.UNREACHABLE),
        (401, MstarError, ExitCode.REFUSED),
        (504, MstarError, ExitCode.TIMED_OUT),
    ],
)
def test_an_error_keeps_the_message_of_the_api(status: int, kind: type[MstarError], code: ExitCode) -> None:
    body = {"detail": "no", "error": {"message": "voice is x", "code": "some_code", "param": "voice"}}
    answer = httpx.Response(status, json=body, headers={"Retry-After": "7"})
    with client(lambda request: answer) as api, pytest.raises(kind) as caught:
        list(api.generate(outputs=("audio",), text="hi"))
    assert (caught.value.title, caught.value.code, caught.value.exit_code) == ("voice is x", "some_code", code)


def test_a_response_without_json_is_an_error() -> None:
    with client(lambda request: httpx.Response(502, content=b"<html>bad gateway")) as api:
        with pytest.raises(MstarError, match="bad gateway"):
            list(api.generate(outputs=("text",), text="hi"))


def test_a_wav_file_is_valid_at_every_end(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    with WavFile.create(path, 24000) as sound:
        sound.write(b"\1\2" * 2400)
        sound.write(b"\3\4" * 2400)
        assert sound.seconds == pytest.approx(0.2)
    with wave.open(str(path)) as read:
        assert (read.getframerate(), read.getnchannels(), read.getsampwidth(), read.getnframes()) == (24000, 1, 2, 4800)
    with WavFile.create(path, 24000):
        pass
    with wave.open(str(path)) as read:
        assert read.getnframes() == 0


def test_a_pipe_gets_a_header_that_says_unknown() -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def close(self) -> None:
            self.kept = self.getvalue()
            super().close()

    pipe = Pipe()
    with WavFile(pipe, 24000) as sound:
        sound.write(b"\1\2")
    assert pipe.kept[4:8] == pipe.kept[40:44] == b"\xff" * 4 and len(pipe.kept) == 46
