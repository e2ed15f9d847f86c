"""POST /generate between fake peers: forms, streams, whole responses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import struct
from typing import Any

import httpx
import numpy as np
import pytest

from mstar_core.messages.requests import NewRequest
from tests.api.conftest import Started
from tests.fakes import media
from tests.fakes.any_model import SPEC as NUMBERS
from tests.fakes.conductor import FakeDeployment, say, speak

AUDIO = {"output_modalities": "audio"}


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.content.split(b"\n") if line]


async def test_a_multipart_form_gives_one_line_per_chunk_in_order(started: Started) -> None:
    async with started(speak(3)) as api:
        answer = await api.client.post("/generate", files={"text": (None, "hi"), "output_modalities": (None, "audio")})
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson; charset=utf-8"
        got = lines(answer)
        assert [line["modality"] for line in got] == ["audio"] * 3
        assert [line["metadata"]["offset_samples"] for line in got] == [0, 2048, 4096]
        assert {line["metadata"]["sample_rate"] for line in got} == {24000}
        pcm = b"".join(base64.b64decode(line["data"]) for line in got)
        assert pcm == b"".join(bytes([value, 0]) * 2048 for value in (1, 2, 3))
        await api.clean()


async def test_curl_style_urlencoded_and_json_bodies_mean_the_same(started: Started) -> None:
    async with started(speak(1)) as api:
        form = await api.client.post("/generate", data={"text": "hi", "voice": "leo", **AUDIO})
        body = await api.client.post("/generate", json={"text": "hi", "model_kwargs": {"voice": "leo"}, **AUDIO})
        assert form.status_code == body.status_code == 200
        first, second = api.fake.requests
        assert first.params["voice"] == second.params["voice"] == "leo"
        assert first.inputs == second.inputs


async def test_a_whole_answer_joins_sound_and_tells_usage(started: Started) -> None:
    async with started(speak(2, reason="length")) as api:
        answer = await api.client.post("/generate", data={"text": "hello", "streaming": "no", "seed": "7", **AUDIO})
        body = answer.json()
        (audio,) = body["outputs"]["audio"]
        assert audio["metadata"]["samples"] == 4096
        assert len(base64.b64decode(audio["data"])) == 8192
        assert (body["finish_reason"], body["seed"]) == ("length", 7)
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 14, 19)
        assert usage["completion_tokens_details"]["audio_tokens"] == 14
        assert usage["audio_seconds"] == round(4096 / 24000, 6)
        assert usage["total_ms"] >= usage["ttft_ms"] >= usage["queue_ms"] >= 0


async def test_a_split_character_is_held_until_it_is_whole(started: Started) -> None:
    text = "é漢😀!"
    async with started(say(*[bytes([byte]) for byte in text.encode()])) as api:
        answer = await api.client.post("/generate", data={"text": "x"})
        assert [base64.b64decode(line["data"]).decode() for line in lines(answer)] == list(text)
        whole = (await api.client.post("/generate", data={"text": "x", "streaming": "false"})).json()
        (entry,) = whole["outputs"]["text"]
        assert base64.b64decode(entry["data"]).decode() == text


async def test_bytes_that_never_complete_a_character_are_flushed_at_the_end(started: Started) -> None:
    async with started(say(b"a", "é".encode()[:1])) as api:
        answer = await api.client.post("/generate", data={"text": "x"})
        assert [base64.b64decode(line["data"]).decode() for line in lines(answer)] == ["a", "\ufffd"]


async def test_full_events_frame_the_stream_and_data_events_do_not(started: Started) -> None:
    async with started(speak(1)) as api:
        data = {"text": "x", "stream_events": "full", "request_id": "mine", **AUDIO}
        got = lines(await api.client.post("/generate", data=data))
        assert [line["modality"] for line in got] == ["start", "audio", "done"]
        seed = int.from_bytes(hashlib.md5(b"mine").digest()[:4], "little")
        assert got[0]["metadata"] == {"request_id": "mine", "seed": seed, "model": "fake"}
        assert got[2]["metadata"]["finish_reason"] == "stop"
        assert api.fake.requests[0].seed == api.fake.requests[0].params["seed"] == seed


async def test_frames_carry_the_payload_as_it_is(started: Started) -> None:
    async with started(speak(2)) as api:
        accept = {"Accept": "application/x-mstar-frames"}
        answer = await api.client.post("/generate", data={"text": "x", **AUDIO}, headers=accept)
        body, kinds = answer.content, []
        while body:
            head, size = struct.unpack_from("<IQ", body)
            header = json.loads(body[12 : 12 + head])
            kinds.append((header["modality"], size))
            body = body[12 + head + size :]
        assert kinds == [("start", 0), ("audio", 4096), ("audio", 4096), ("done", 0)]


async def test_outputs_that_overtake_each_other_are_put_in_order_and_doubles_dropped(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.finish(request.handle, emitted=3)
        for seq in (2, 0, 0, 1):
            fake.audio(request.handle, 16, value=seq + 1, seq=seq)

    async with started(script) as api:
        got = lines(await api.client.post("/generate", data={"text": "x", **AUDIO}))
        assert [base64.b64decode(line["data"])[0] for line in got] == [1, 2, 3]


@pytest.mark.parametrize("streaming", ["true", "false"])
async def test_an_end_that_comes_with_the_last_output_needs_no_other_word(streaming: str, started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.audio(request.handle, 100)
        fake.output(request.handle, "audio", np.full(50, 3, np.int16), finishes=True)

    async with started(script) as api:
        answer = await api.client.post(
            "/generate", data={"text": "hi", "streaming": streaming, "stream_events": "full"}
        )
        assert answer.status_code == 200 and '"finish_reason":"stop"' in answer.text
        await api.clean()
        assert not api.fake.cancels


async def test_large_outputs_travel_in_shared_memory_and_are_given_back(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.audio(request.handle, 100_000)
        fake.finish(request.handle)

    async with started(script) as api:
        answer = await api.client.post("/generate", data={"text": "x", "streaming": "0", **AUDIO})
        assert answer.json()["outputs"]["audio"][0]["metadata"]["samples"] == 100_000
        await api.fake.until(lambda: api.fake.live_loans == 0)


async def test_a_request_with_no_sound_ends_well_and_says_so(started: Started) -> None:
    async with started(speak(0)) as api:
        data = {"text": "x", "stream_events": "full", **AUDIO}
        got = lines(await api.client.post("/generate", data=data))
        assert [line["modality"] for line in got] == ["start", "done"]
        assert "empty" in got[1]["metadata"]["warnings"][0]


async def test_nothing_to_send_is_bridged_with_blank_lines(started: Started) -> None:
    async with started(keepalive_s=0.05) as api:
        async with api.client.stream("POST", "/generate", data={"text": "x", **AUDIO}) as answer:
            stream = answer.aiter_raw()
            assert await anext(stream) == b"\n"
            request = await api.fake.next_request()
            api.fake.audio(request.handle)
            api.fake.finish(request.handle)
            rest = b"".join([piece async for piece in stream])
        assert [json.loads(line)["modality"] for line in rest.split()] == ["audio"]


async def test_frames_have_nothing_between_them(started: Started) -> None:
    async with started(keepalive_s=0.02) as api:
        headers = {"Accept": "application/x-mstar-frames"}
        async with api.client.stream("POST", "/generate", data={"text": "x", **AUDIO}, headers=headers) as answer:
            stream = answer.aiter_raw()
            assert b'"start"' in await anext(stream)
            silence = asyncio.ensure_future(anext(stream))
            await asyncio.wait({silence}, timeout=0.2)
            assert not silence.done()
            request = await api.fake.next_request()
            api.fake.audio(request.handle)
            api.fake.finish(request.handle)
            size = int.from_bytes((await silence)[:4], "little")
            assert 0 < size < 500, "a frame begins with the length of its header"


async def test_warnings_and_ids_stand_in_headers(started: Started) -> None:
    async with started(speak(1)) as api:
        answer = await api.client.post("/generate", data={"text": "warn", "top_p": "0.5", "request_id": "r-1", **AUDIO})
        assert answer.headers["x-request-id"] == "r-1"
        assert answer.headers["x-mstar-warnings"] == "top_p has no effect on this model; cut"
        wrong = await api.client.post("/generate", data={"text": "warn", "top_p": "1.5", **AUDIO})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_p")
        assert (await api.client.get("/health")).headers["x-request-id"].startswith("req-")


async def test_the_processors_limit_is_what_runs(started: Started) -> None:
    async with started(speak(1)) as api:
        await api.client.post("/generate", data={"text": "x", "max_tokens": "99", **AUDIO})
        assert api.fake.requests[0].params["max_output_tokens"] == 50


async def test_a_deadline_travels_with_the_request(started: Started) -> None:
    async with started(speak(1)) as api:
        await api.client.post("/generate", data={"text": "x", "timeout_s": "500", **AUDIO})
        await api.client.post("/generate", data={"text": "x", **AUDIO}, headers={"X-Request-Timeout": "300"})
        assert 400 < api.fake.requests[0].deadline_s <= 500
        assert 200 < api.fake.requests[1].deadline_s <= 300


async def test_an_uploaded_image_reaches_the_processor_in_order(started: Started) -> None:
    png = media.image()
    async with started(speak(1)) as api:
        files = {
            "files": ("../../etc/passwd", png, "application/octet-stream"),
            "text": (None, "x"),
            **{k: (None, v) for k, v in AUDIO.items()},
        }
        assert (await api.client.post("/generate", files=files)).status_code == 200
        body = {"text": "x", "files": [{"name": "a", "data": base64.b64encode(png).decode()}], **AUDIO}
        assert (await api.client.post("/generate", json=body)).status_code == 200


async def test_many_requests_at_once_never_cross(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        for _ in range(3):
            fake.text(request.handle, request.request_id.encode())
        fake.finish(request.handle)

    async with started(script) as api:
        import asyncio

        async def one(index: int) -> str:
            answer = await api.client.post("/generate", data={"text": "x", "request_id": f"id{index}", "stream": "0"})
            return base64.b64decode(answer.json()["outputs"]["text"][0]["data"]).decode()

        got = await asyncio.gather(*(one(index) for index in range(40)))
        assert got == [f"id{index}" * 3 for index in range(40)]
        await api.clean()


@pytest.mark.parametrize("accept", ["application/x-mstar-frames", "application/x-ndjson"])
@pytest.mark.parametrize("size", [(300 << 10) + 1, (13 << 20) + 3], ids=["one write", "parts"])
async def test_a_large_payload_arrives_whole_in_every_form(started: Started, accept: str, size: int) -> None:
    sent = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.output(request.handle, "tensor", sent)
        fake.output(request.handle, "tensor", sent[:5])
        fake.finish(request.handle)

    async with started(script, model=NUMBERS) as api:
        answer = await api.client.post("/generate", data={"text": "x"}, headers={"Accept": accept})
        heads, payloads = [], []
        if accept.endswith("frames"):
            data = answer.content
            while data:
                head, payload = struct.unpack_from("<IQ", data)
                heads.append(json.loads(data[12 : 12 + head]))
                payloads.append(data[12 + head : 12 + head + payload])
                data = data[12 + head + payload :]
        else:
            heads = lines(answer)
            payloads = [base64.b64decode(each["data"]) for each in heads]
        of_tensors = [payload for head, payload in zip(heads, payloads, strict=True) if head["modality"] == "tensor"]
        assert b"".join(of_tensors) == sent.tobytes() + sent[:5].tobytes()
        assert len(of_tensors) == (3 if size > 12 << 20 else 2)


async def test_a_control_loop_names_its_period_in_the_body_or_a_header(started: Started) -> None:
    """The body wins over the header. The model has no such parameter, and gives no warning."""
    async with started(speak(1)) as api:
        headers = {"X-Period-Ms": "50", "X-Skipped-Ticks": "2"}
        first = await api.client.post("/generate", json={"text": "x", "model_kwargs": {"period_ms": 33.3}, **AUDIO})
        await api.client.post("/generate", data={"text": "x", **AUDIO}, headers=headers)
        await api.client.post("/generate", data={"text": "x", "period_ms": "20", **AUDIO}, headers=headers)
        await api.client.post("/generate", data={"text": "x", **AUDIO})
        assert await api.loops(4) == [(33.3, None), (50.0, 2), (20.0, 2), (None, None)]
        assert "X-Mstar-Warnings" not in first.headers
        wrong = await api.client.post("/generate", data={"text": "x", "period_ms": "-5", **AUDIO})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "period_ms")
