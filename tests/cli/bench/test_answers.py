"""Decoding of received bodies: what is content, when it came, and what is an error; and checks of outputs."""

from __future__ import annotations

import base64
import json
import random

import numpy as np
import pytest

from mstar_core.workloads import picture
from mstarctl.bench.client.answers import Answer, Chunk, decode
from mstarctl.bench.client.checks import array_flaw, flaw, image_flaw, sound_flaw
from mstarctl.bench.client.wire import Record

MS = 1_000_000


def text64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("body", "kind", "status", "detail"),
    [
        (
            b'{"error": {"code": "over_capacity", "message": "too long"}}',
            "application/json",
            413,
            "413 over_capacity: too long",
        ),
        (b'{"error": "no such model"}', "application/json", 404, "404 no such model"),
        (b"<html>Bad gateway</html>", "text/html", 502, "502 <html>Bad gateway</html>"),
        (b'["odd"]', "application/json", 400, '400 ["odd"]'),
        (
            f'{{"modality":"error","data":"{text64("a worker died")}","metadata":{{"code":"worker_lost"}}}}\n'.encode(),
            "application/x-ndjson",
            200,
            "worker_lost: a worker died",
        ),
        (
            b'data: {"error": {"code": "engine_error", "message": "the step failed"}}\n\n',
            "text/event-stream",
            200,
            "engine_error: the step failed",
        ),
    ],
)
def test_the_servers_sentence_is_the_detail(body: bytes, kind: str, status: int, detail: str) -> None:
    assert decode(record(body, kind=kind, status=status), keeps_data=False).detail == detail


def record(
    *reads: bytes, kind: str = "application/x-ndjson", status: int = 200, error: str = "", step_ms: int = 10
) -> Record:
    """A record whose reads came 10 ms apart."""
    marks, body = [], b""
    for number, data in enumerate(reads, 1):
        body += data
        marks.append((len(body), number * step_ms * MS))
    return Record(1, 0, 0, 0, 0, 0, len(reads) * step_ms * MS, status, error, "", False, kind, marks, body)


def line(modality: str, data: bytes = b"", **metadata: object) -> bytes:
    text = {"modality": modality, "data": base64.b64encode(data).decode(), "metadata": metadata}
    return json.dumps(text, separators=(",", ":")).encode() + b"\n"


def seen(answer: Answer) -> list[tuple[str, int, int]]:
    return [(chunk.kind, chunk.at_ns // MS, chunk.size_bytes) for chunk in answer.chunks]


def test_a_chunk_that_arrives_in_pieces_has_the_time_of_its_last_byte() -> None:
    text = line("text", b"word")
    answer = decode(record(line("start"), text[:9], text[9:] + line("text", b"xy"), line("done")), keeps_data=False)
    assert seen(answer) == [("text", 30, 4), ("text", 30, 2)]
    assert answer.error == "" and answer.is_done


def test_empty_chunks_and_blank_lines_are_no_content() -> None:
    answer = decode(record(line("start"), b"\n", line("text"), line("text", b"a"), line("done")), keeps_data=False)
    assert seen(answer) == [("text", 40, 1)]


def test_audio_seconds_come_from_rate_and_channels() -> None:
    answer = decode(
        record(line("audio", b"\0" * 96_000, sample_rate=24_000, num_channels=2), line("done")), keeps_data=False
    )
    assert answer.chunks[0].amount == 1.0


def test_a_wav_header_is_no_audio() -> None:
    head = b"RIFF" + b"\0" * 20 + (16_000).to_bytes(4, "little") + b"\0" * 16
    answer = decode(record(head, b"\1" * 32_000, kind="audio/wav"), keeps_data=False)
    assert seen(answer) == [("audio", 20, 32_000)]
    assert answer.chunks[0].amount == 1.0


def test_a_role_event_is_no_text() -> None:
    def event(delta: dict[str, str]) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"

    reads = (event({"role": "assistant", "content": ""}), b": ping\n\n", event({"content": "hi"}), b"data: [DONE]\n\n")
    answer = decode(record(*reads, kind="text/event-stream; charset=utf-8"), keeps_data=True)
    assert [(chunk.at_ns // MS, chunk.data) for chunk in answer.chunks] == [(30, b"hi")]
    assert answer.is_done


def test_frames_are_decoded_without_base64() -> None:
    def frame(modality: str, payload: bytes = b"") -> bytes:
        head = json.dumps({"modality": modality, "metadata": {"shape": [2], "dtype": "float32"}}).encode()
        return len(head).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + head + payload

    reads = (frame("start"), frame("tensor", b"12345678"), frame("done"))
    answer = decode(record(*reads, kind="application/x-mstar-frames"), keeps_data=True)
    assert seen(answer) == [("tensor", 20, 8)]
    assert answer.chunks[0].data == b"12345678"


def test_images_of_the_openai_route_come_whole() -> None:
    image = base64.b64encode(picture(random.Random(1), 16)).decode()
    body = json.dumps({"data": [{"b64_json": image}]}).encode()
    answer = decode(record(body[:10], body[10:], kind="application/json"), keeps_data=True)
    assert answer.chunks[0].kind == "image" and answer.chunks[0].at_ns == 20 * MS


@pytest.mark.parametrize(
    ("made", "error"),
    [
        (record(b'{"error":{"code":"overloaded"}}', status=429, kind="application/json"), "refused"),
        (record(b"gone", status=404, kind="text/plain"), "http"),
        (record(line("start"), line("error", code="engine_error")), "stream"),
        (record(line("start"), line("text", b"a")), "stream"),
        (record(line("start"), b"{broken\n"), "stream"),
        (record(line("start"), error="timeout"), "timeout"),
    ],
    ids=["refused", "http", "error line", "no last line", "not JSON", "timeout"],
)
def test_every_failure_is_classed(made: Record, error: str) -> None:
    assert decode(made, keeps_data=False).error == error


def test_checks_find_what_is_broken() -> None:
    loud = (8000 * np.sin(np.arange(2400))).astype("<i2").tobytes()
    assert sound_flaw(loud) == ""
    assert "silent" in sound_flaw(b"\0" * 4800)
    assert "within a sample" in sound_flaw(loud[:-1])
    good = picture(random.Random(2), 32)
    assert image_flaw(good, [32, 32]) == ""
    assert "32x32" in image_flaw(good, [64, 64])
    assert "decoded" in image_flaw(good[:60], None)
    assert "format" in image_flaw(b"nonsense", None)


def test_numbers_must_be_finite_and_fit_their_shape() -> None:
    def chunk(values: list[float], shape: list[int]) -> Chunk:
        data = np.array(values, "<f4").tobytes()
        return Chunk("action", 0, len(data), 1.0, data, {"dtype": "float32", "shape": shape})

    assert array_flaw(chunk([1.0, 2.0], [2]), None) == ""
    assert "finite" in array_flaw(chunk([1.0, float("nan")], [2]), None)
    assert "for shape" in array_flaw(chunk([1.0, 2.0], [3]), None)
    assert "not [4]" in array_flaw(chunk([1.0, 2.0], [2]), [4])


def test_a_missing_output_is_a_flaw() -> None:
    answer = Answer(chunks=[Chunk("text", 0, 2, 1.0, b"hi")])
    assert flaw(answer, ["text"], {}) == ""
    assert flaw(answer, ["text", "audio"], {}) == "no audio came"


def test_an_image_of_one_colour_is_a_flaw() -> None:
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (32, 32), (10, 200, 30)).save(file, "PNG")
    assert "one colour" in image_flaw(file.getvalue(), None)
