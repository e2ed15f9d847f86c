"""POST /v1/audio/transcriptions: audio formats, instruction, response formats, and the OpenAI client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Started, running
from tests.fakes import media
from tests.fakes.conductor import echo
from tests.fakes.omni_model import SPEC

PATH = "/v1/audio/transcriptions"
PLAIN = "[audio 1600]Write down the speech."


async def send(client: httpx.AsyncClient, data: bytes, name: str = "a.wav", **fields: str) -> httpx.Response:
    return await client.post(PATH, data=fields, files={"file": (name, data)})


async def test_the_sound_comes_with_the_models_instruction(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        answer = (await send(api.client, media.wav(0.1), model="fake")).json()
        assert set(answer) == {"text", "usage"} and answer["text"] == PLAIN
        assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == 3
        assert api.fake.requests[0].params["temperature"] == 0.0
        told = await send(api.client, media.wav(0.1), language="German", prompt="Names: Öz.", temperature="0.5")
        assert told.json()["text"] == "[audio 1600]Write down the German speech.\nNames: Öz."
        assert api.fake.requests[1].params["temperature"] == 0.5
        coded = await send(api.client, media.wav(0.1), language="de")
        assert coded.json()["text"] == "[audio 1600]Write down the German speech."


async def test_every_kind_of_sound_is_heard_at_the_models_rate(started: Started) -> None:
    kinds = {
        "wav": media.wav(0.5, 44_100, 2),
        "flac": media.coded("flac", "flac"),
        "mp3": media.coded("mp3", "libmp3lame"),
        "ogg": media.coded("ogg", "libopus"),
        "m4a": media.coded("ipod", "aac"),
        "aac": media.coded("adts", "aac"),
        "webm": media.coded("webm", "libopus"),
    }
    async with started(echo, model=SPEC) as api:
        for name, data in kinds.items():
            answer = await send(api.client, data, f"a.{name}", response_format="text")
            assert answer.status_code == 200, (name, answer.text)
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            heard = int(answer.text.partition("]")[0].removeprefix("[audio "))
            assert abs(heard - 8000) <= (1800 if name in ("mp3", "aac") else 500), (name, heard)  # those two are padded


async def test_a_stream_is_deltas_and_the_whole_text(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        answer = await send(api.client, media.wav(0.1), stream="true")
        got = [json.loads(part.removeprefix("data: ")) for part in answer.text.strip().split("\n\n")]
        assert {event["type"] for event in got[:-1]} == {"transcript.text.delta"}
        assert "".join(event["delta"] for event in got[:-1]) == PLAIN
        assert (got[-1]["type"], got[-1]["text"]) == ("transcript.text.done", PLAIN)
        assert got[-1]["usage"]["completion_tokens"] == len(PLAIN)


async def test_bad_requests_name_their_field() -> None:
    wav = ("a.wav", media.wav())
    cases: list[tuple[Any, dict[str, str], int, str, str]] = [
        ([("files", wav)], {}, 400, "invalid_value", "files"),
        ([("file", wav), ("file", wav)], {}, 400, "invalid_value", "file"),
        ([("file", ("x", b"what is this"))], {}, 415, "unsupported_media_type", "file"),
        ([("file", ("x.png", media.image()))], {}, 415, "unsupported_media_type", "file"),
        ([("file", ("x.wav", media.wav()[:30]))], {}, 422, "undecodable_media", "files"),
        ([("file", ("x.mp4", media.video()))], {}, 422, "media_has_no_audio", "files"),
        ([("file", wav)], {"response_format": "verbose_json"}, 400, "unsupported_parameter", "response_format"),
        ([("file", wav)], {"response_format": "xml"}, 400, "invalid_value", "response_format"),
        ([("file", wav)], {"colour": "red"}, 400, "unknown_parameter", "colour"),
    ]
    async with running(echo, model=SPEC) as api:
        for files, fields, status, code, param in cases:
            answer = await api.client.post(PATH, data=fields, files=files)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (files, error)
        missing = await api.client.post(PATH, files={"model": (None, "fake")})
        assert (missing.status_code, missing.json()["error"]["code"]) == (400, "missing_field")
        assert (await api.client.post(PATH, json={})).status_code == 415
        await api.clean()


@pytest.mark.filterwarnings("ignore::UserWarning")  # the client's type of usage is a union without ours
async def test_the_openai_client_transcribes(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any") as client:
            whole = await client.audio.transcriptions.create(model="fake", file=("a.wav", media.wav(0.1)))
            assert whole.text == PLAIN
            stream = await client.audio.transcriptions.create(
                model="fake", file=("a.wav", media.wav(0.1)), stream=True, language="German"
            )
            last = [event async for event in stream][-1]
            assert last.type == "transcript.text.done" and "German" in last.text
