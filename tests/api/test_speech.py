"""POST /v1/audio/speech: formats, streams, events, parameters, and the published OpenAI client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct

import av
import httpx
import openai
import pytest
import soundfile

from tests.api.conftest import Started, running
from tests.fakes.conductor import begin, speak

FORMATS = ("wav", "pcm", "flac", "mp3", "opus")
PATH = "/v1/audio/speech"
MAGIC = {"wav": b"RIFF", "flac": b"fLaC", "mp3": b"ID3", "opus": b"OggS"}
TYPES = {
    "wav": "audio/wav",
    "pcm": "audio/pcm;rate=24000;channels=1",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
}


def decoded(data: bytes) -> tuple[int, int]:
    """Return rate and number of samples of an audio file."""
    with av.open(io.BytesIO(data)) as file:
        frames = list(file.decode(audio=0))
    return frames[0].sample_rate, sum(frame.samples for frame in frames)


async def test_without_a_format_a_whole_wav_with_true_sizes_comes_back(started: Started) -> None:
    async with started(speak(3)) as api:
        answer = await api.client.post(PATH, json={"model": "fake", "input": "hi", "voice": "LEO"})
        body = answer.content
        assert (answer.headers["content-type"], answer.headers["x-sample-rate"]) == ("audio/wav", "24000")
        assert int(answer.headers["content-length"]) == len(body) == 44 + 3 * 4096
        assert struct.unpack_from("<I", body, 4) == (len(body) - 8,)
        assert struct.unpack_from("<I", body, 40) == (len(body) - 44,)
        assert answer.headers["x-speech"] == "verbatim"
        assert api.fake.requests[0].params["voice"] == "leo"
        assert api.fake.requests[0].outputs == ["audio"] and not api.fake.requests[0].is_heard


async def test_a_streamed_wav_has_44_header_bytes_that_promise_no_size(started: Started) -> None:
    async with started(speak(3)) as api:
        whole = (await api.client.post(PATH, json={"input": "hi"})).content
        streamed = (await api.client.post(PATH, json={"input": "hi", "stream": True})).content
        assert struct.unpack_from("<I", streamed, 4) == struct.unpack_from("<I", streamed, 40) == (0xFFFFFFFF,)
        assert streamed[44:] == whole[44:]


async def test_every_format_is_what_it_says() -> None:
    async with running(speak(12)) as api:
        for name in FORMATS:
            for stream in (False, True):
                body = {"input": "hi", "response_format": name, "stream": stream}
                check_sound(await api.client.post(PATH, json=body), name, is_whole=not stream)


def check_sound(answer: httpx.Response, name: str, *, is_whole: bool) -> None:
    """Check twelve chunks of audio in the format `name`."""
    assert answer.status_code == 200
    assert answer.headers["content-type"] == TYPES[name]
    assert answer.content.startswith(MAGIC.get(name, struct.pack("<h", 1)))
    if name == "pcm":
        assert len(answer.content) == 12 * 4096
        return
    rate, samples = decoded(answer.content)
    assert rate in (24000, 48000)  # Opus is always decoded at 48 kHz
    length = samples * 24000 // rate
    assert abs(length - 12 * 2048) <= (2400 if name in ("mp3", "opus") else 0)  # those two are padded to frames
    if is_whole:
        with soundfile.SoundFile(io.BytesIO(answer.content)) as sound:
            assert (sound.samplerate, sound.frames) == (24000, 12 * 2048)


async def test_other_formats_are_refused_and_never_replaced() -> None:
    async with running(speak(1)) as api:
        for name in ("aac", "WAV", "ogg", 5, ["wav"]):
            answer = await api.client.post(PATH, json={"input": "hi", "response_format": name})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "response_format")
            assert "wav, pcm, flac, mp3, opus" in error["message"]


BAD = [
    ({}, "missing_field", "input"),
    ({"input": ""}, "invalid_value", "input"),
    ({"input": 5}, "invalid_value", "input"),
    ({"input": "x", "voice": "nobody"}, "invalid_value", "voice"),
    ({"input": "x", "voice": {}}, "invalid_value", "voice"),
    ({"input": "x", "speed": 2}, "unsupported_parameter", "speed"),
    ({"input": "x", "stream": "maybe"}, "invalid_value", "stream"),
    ({"input": "x", "stream_format": "ndjson"}, "invalid_value", "stream_format"),
    ({"input": "x", "temperature": "hot"}, "invalid_value", "temperature"),
    ({"input": "x", "colour": 1}, "unknown_parameter", "colour"),
    ({"input": "x", "model": 5}, "invalid_value", "model"),
    ({"input": "x", "seed": -1}, "invalid_value", "seed"),
    ({"input": "x", "request_id": 5}, "invalid_value", "request_id"),
]


async def test_bad_bodies_name_their_field() -> None:
    async with running(speak(1)) as api:
        for body, code, param in BAD:
            answer = await api.client.post(PATH, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, code, param), body
            assert "detail" not in answer.json()
        long = await api.client.post(PATH, json={"input": "x" * 4097})
        assert (long.status_code, long.json()["error"]["param"]) == (413, "input")
        form = await api.client.post(PATH, data={"input": "x"})
        assert form.status_code == 415
        broken = await api.client.post(PATH, content=b"{", headers={"Content-Type": "application/json"})
        assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")


async def test_silent_fields_pass_and_extra_fields_win(started: Started) -> None:
    async with started(speak(1)) as api:
        body = {"input": "x", "user": "u", "metadata": {}, "speed": 1, "max_output_tokens": 9, "instructions": "softly"}
        answer = await api.client.post(PATH, json=body)
        assert answer.status_code == 200
        assert "instructions" in answer.headers["x-mstar-warnings"]


async def test_events_carry_the_sound_and_end_with_usage(started: Started) -> None:
    async with started(speak(2)) as api:
        answer = await api.client.post(PATH, json={"input": "hello", "stream_format": "sse", "response_format": "pcm"})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")]
        assert [event["type"] for event in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
        assert sum(len(base64.b64decode(event["audio"])) for event in events[:-1]) == 2 * 4096
        assert events[-1]["type"] == "speech.audio.done"
        assert events[-1]["usage"] == {"input_tokens": 5, "output_tokens": 14, "total_tokens": 19}


async def test_events_that_fail_end_with_the_error_object(started: Started) -> None:
    async with started(begin) as api:
        async with api.client.stream("POST", PATH, json={"input": "x", "stream_format": "sse"}) as answer:
            pieces = answer.aiter_text()
            text = await anext(pieces)
            api.fake.fail(api.fake.requests[0].handle)
            text += "".join([piece async for piece in pieces])
        first, last = [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]
        assert first["type"] == "speech.audio.delta"
        assert last["error"]["code"] == "engine_error"


async def test_an_answer_without_sound_is_an_empty_file_and_a_warning() -> None:
    async with running(speak(0)) as api:
        for name in FORMATS:
            answer = await api.client.post(PATH, json={"input": "x", "response_format": name})
            assert answer.status_code == 200
            assert name == "mp3" or answer.content.startswith(MAGIC.get(name, b""))
            assert "empty" in answer.headers["x-mstar-warnings"]
            streamed = await api.client.post(PATH, json={"input": "x", "response_format": name, "stream": True})
            assert streamed.status_code == 200


async def test_the_openai_client_speaks(started: Started) -> None:
    async with started(speak(3)) as api:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any") as client:
            whole = await client.audio.speech.create(model="fake", voice="tara", input="hi", response_format="wav")
            assert len(whole.content) == 44 + 3 * 4096
            async with client.audio.speech.with_streaming_response.create(
                model="fake", voice="leo", input="hi", response_format="pcm", extra_body={"stream": True, "seed": 3}
            ) as streamed:
                data = b"".join([piece async for piece in streamed.iter_bytes()])
            assert len(data) == 3 * 4096
            assert api.fake.requests[1].seed == 3
            with pytest.raises(openai.BadRequestError) as refused:
                await client.audio.speech.create(model="fake", voice="nobody", input="hi")
            assert refused.value.param == "voice"
            assert [model.id async for model in client.models.list()] == ["fake"]


async def test_the_synchronous_openai_client_speaks(started: Started) -> None:
    def call(url: str) -> bytes:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
            return client.audio.speech.create(model="fake", voice="tara", input="hi", response_format="flac").content

    async with started(speak(3)) as api:
        assert (await asyncio.to_thread(call, api.url)).startswith(b"fLaC")
