"""POST /v1/chat/completions: templates, media, streams, several answers, stop strings, audio, and the OpenAI client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import struct
from typing import Any

import httpx
import openai
import soundfile

from mstar_core.messages.requests import NewRequest
from tests.api.conftest import Api, Started, running
from tests.fakes import media
from tests.fakes.conductor import FakeDeployment, echo, say
from tests.fakes.omni_model import SPEC, TEXT_ONLY

PATH = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
SPOKEN = {"modalities": ["text", "audio"]}


def data_url(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return a body with one message of these parts."""
    return {"messages": [{"role": "user", "content": list(parts)}]}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def url_part(kind: str, data: bytes) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(data)}}


def events(answer: httpx.Response) -> list[Any]:
    """Return the events of a stream; [DONE] as that string."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    words = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part and not part.startswith(":")]
    return [word if word == "[DONE]" else json.loads(word) for word in words]


async def test_roles_and_parts_reach_the_template_in_order(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        body = {
            "model": "fake",
            "messages": [
                {"role": "developer", "content": "Be brief. "},
                {"role": "user", "content": [text("see "), url_part("image", media.image(8, 6)), text(" and hear ")]},
                {"role": "assistant", "content": "yes"},
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": base64.b64encode(media.wav(0.1)).decode()}},
                        url_part("video", media.video()),
                        {"type": "image_url", "image_url": data_url(media.image(5, 5, "JPEG"))},
                    ],
                },
            ],
        }
        answer = (await api.client.post(PATH, json=body, headers={"X-Request-ID": "mine"})).json()
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == (
            "<system>Be brief. <user>see [image 8x6] and hear <assistant>yes"
            "<user>[audio 1600][video 2x32x16][image 5x5]<assistant>"
        )
        assert (answer["id"], answer["object"], answer["model"]) == ("chatcmpl-mine", "chat.completion", "fake")
        assert (choice["index"], choice["finish_reason"], choice["message"]["role"]) == (0, "stop", "assistant")
        assert answer["system_fingerprint"] == f"seed-{api.fake.requests[0].seed}"
        usage = answer["usage"]
        read = usage["prompt_tokens_details"]
        assert [read[f"{kind}_tokens"] for kind in ("image", "audio", "video")] == [6, 4, 2]
        assert read["text_tokens"] == usage["prompt_tokens"] - 12
        assert usage["completion_tokens"] == len(choice["message"]["content"])
        await api.clean()


async def test_a_stream_tells_role_text_end_usage_and_done_in_that_order(started: Started) -> None:
    async with started(say("é".encode(), b"!"), model=SPEC) as api:
        body = {**HI, "stream": True, "stream_options": {"include_usage": True}}
        got = events(await api.client.post(PATH, json=body))
        assert got.pop() == "[DONE]"
        assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 3
        deltas = [event["choices"][0] for event in got[:-1]]
        assert [d["delta"] for d in deltas] == [
            {"role": "assistant", "content": ""},
            {"content": "é"},
            {"content": "!"},
            {},
        ]
        assert [d["finish_reason"] for d in deltas] == [None, None, None, "stop"]
        assert all(event["usage"] is None and event["object"] == "chat.completion.chunk" for event in got[:-1])
        plain = events(await api.client.post(PATH, json={**HI, "stream": True}))
        assert not any("usage" in event for event in plain if event != "[DONE]")


async def test_stop_strings_end_the_text_before_them_across_tokens(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        for byte in b"one two three":
            fake.text(request.handle, bytes([byte]))  # no end message: the stop string ends the request

    async with started(script, model=SPEC) as api:
        for stop, shown, tokens in (("wo t", "one t", 9), (["zzz", " "], "one", 4), ("one", "", 3)):
            answer = (await api.client.post(PATH, json={**HI, "stop": stop})).json()
            choice = answer["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (shown, "stop")
            assert answer["usage"]["completion_tokens"] == tokens
        streamed = events(await api.client.post(PATH, json={**HI, "stop": " tw", "stream": True}))
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed[:-1]) == "one"
        await api.fake.until(lambda: [c.why for c in api.fake.cancels] == ["stop"] * 4)
        native = await api.client.post("/generate", data={"text": "x", "stop": "two", "streaming": "false"})
        assert base64.b64decode(native.json()["outputs"]["text"][0]["data"]) == b"one "
        await api.clean()


async def test_text_that_only_begins_a_stop_string_is_sent_in_the_end(started: Started) -> None:
    async with started(say(b"ab", b"a"), model=SPEC) as api:
        answer = (await api.client.post(PATH, json={**HI, "stop": ["abb", "aa"]})).json()
        assert answer["choices"][0]["message"]["content"] == "aba"


async def test_n_answers_have_seeds_of_their_own_and_one_usage(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"%d" % (request.seed % 10))
        fake.finish(request.handle, "length")

    async with started(script, model=SPEC, max_concurrent_requests=2) as api:
        answer = (await api.client.post(PATH, json={**HI, "n": 3, "seed": 5})).json()
        assert [c["message"]["content"] for c in answer["choices"]] == ["5", "6", "7"]
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
        assert {c["finish_reason"] for c in answer["choices"]} == {"length"}
        assert [r.params["seed"] for r in sorted(api.fake.requests, key=lambda r: r.seed)] == [5, 6, 7]
        prompt = len("<user>hi<assistant>")
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (prompt, 3)
        got = events(await api.client.post(PATH, json={**HI, "n": 3, "seed": 5, "stream": True}))[:-1]
        for index in range(3):
            mine = [e["choices"][0] for e in got if e["choices"][0]["index"] == index]
            assert [m["delta"].get("content") for m in mine] == ["", str(5 + index), None]
        assert api.process.pool.begun == 2, "a prompt is read once, however many answers it gets"
        await api.clean()


async def test_one_answer_that_fails_ends_its_siblings(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"x")
        if len(fake.requests) == 3:
            fake.fail(request.handle)

    async with started(script, model=SPEC) as api:
        answer = await api.client.post(PATH, json={**HI, "n": 3, "seed": 5})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        await api.fake.until(lambda: len(api.fake.cancels) == 2)
        await api.clean()


async def test_a_group_is_cancelled_by_its_id_and_refused_while_in_flight(started: Started) -> None:
    async with started(model=SPEC) as api:
        headers = {"X-Request-ID": "g"}
        first = asyncio.create_task(api.client.post(PATH, json={**HI, "n": 2}, headers=headers))
        await api.fake.next_request(2)
        again = await api.client.post(PATH, json=HI, headers=headers)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "request_id_in_use")
        assert (await api.client.get("/v1/requests/g")).json()["status"] == "running"
        assert (await api.client.post("/v1/requests/g/cancel")).json() == {"id": "g", "status": "cancelled"}
        answer = await first
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
        await api.clean()


async def test_a_client_that_leaves_ends_every_answer(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"x")

    async with started(script, model=SPEC) as api:
        async with api.client.stream("POST", PATH, json={**HI, "n": 2, "stream": True}) as answer:
            pieces = answer.aiter_raw()  # keeps a reference: dropping it closes the connection
            await anext(pieces)
            await api.fake.next_request(2)
        await api.fake.until(lambda: len(api.fake.cancels) == 2)
        await api.until(lambda: api.service_is_clean)


async def test_a_stream_that_fails_ends_with_one_error_and_nothing_else(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"x")
        fake.fail(request.handle)

    async with started(script, model=SPEC) as api:
        got = events(await api.client.post(PATH, json={**HI, "stream": True}))
        assert got[-1]["error"]["code"] == "engine_error"
        assert sum("error" in e for e in got) == 1
        assert not any(e.get("choices", [{}])[0].get("finish_reason") for e in got)


async def test_spoken_answers_hold_a_whole_file_and_the_words(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        body = {**HI, "modalities": ["text", "audio"], "audio": {"voice": "CHELSIE"}}
        message = (await api.client.post(PATH, json=body)).json()["choices"][0]["message"]
        assert message["content"] == message["audio"]["transcript"] == "<user>hi<assistant>"
        sound = base64.b64decode(message["audio"]["data"])
        assert sound[:4] == b"RIFF" and struct.unpack_from("<I", sound, 40) == (len(sound) - 44,) == (400,)
        assert api.fake.requests[0].params["voice"] == "chelsie"
        assert set(api.fake.requests[0].outputs) == {"text", "audio"}
        for form, magic in (("flac", b"fLaC"), ("mp3", b"ID3"), ("opus", b"OggS"), ("pcm16", struct.pack("<h", 7))):
            body["audio"] = {"format": form}
            answer = (await api.client.post(PATH, json=body)).json()
            assert base64.b64decode(answer["choices"][0]["message"]["audio"]["data"]).startswith(magic)
        with soundfile.SoundFile(io.BytesIO(sound)) as file:
            assert (file.samplerate, file.frames) == (24000, 200)


async def test_streamed_sound_is_pcm16_and_ends_with_the_transcript(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        got = events(await api.client.post(PATH, json={**HI, "modalities": ["audio"], "stream": True}))
        deltas = [e["choices"][0]["delta"] for e in got[:-1]]
        sounds = [d["audio"]["data"] for d in deltas if "data" in d.get("audio", {})]
        assert b"".join(map(base64.b64decode, sounds)) == struct.pack("<h", 7) * 200
        assert deltas[-2]["audio"]["transcript"] == "<user>hi<assistant>"
        assert len({d["audio"]["id"] for d in deltas if "audio" in d}) == 1
        assert deltas[-1] == {}
        wrong = await api.client.post(
            PATH, json={**HI, "modalities": ["audio"], "stream": True, "audio": {"format": "mp3"}}
        )
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "audio.format")


async def test_images_in_an_answer_are_parts_of_its_content(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        body = {**HI, "modalities": ["text", "image"]}
        words, image = (await api.client.post(PATH, json=body)).json()["choices"][0]["message"]["content"]
        assert words == {"type": "text", "text": "<user>hi<assistant>"}
        assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
        got = events(await api.client.post(PATH, json={**body, "stream": True}))
        shown = [e["choices"][0]["delta"].get("content", "") for e in got[:-1]]
        assert sum(word.startswith("data:image/png;base64,") for word in shown) == 1


FIRST = "messages[0].content[0].image_url"


def image_at(url: str) -> dict[str, Any]:
    """Return a body with one image part of this URL."""
    return user({"type": "image_url", "image_url": {"url": url}})


BAD: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({}, 400, "missing_field", "messages"),
    ({"messages": []}, 400, "invalid_value", "messages"),
    ({"messages": "hi"}, 400, "invalid_value", "messages"),
    ({"messages": [{"content": "x"}]}, 400, "missing_field", "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user"}]}, 400, "missing_field", "messages"),
    (user({"type": "smell", "smell": "x"}), 400, "invalid_value", "messages[0].content[0].type"),
    (user({"type": "text"}), 400, "missing_field", "messages[0].content[0].text"),
    (image_at("file:///etc/passwd"), 400, "invalid_value", FIRST),
    (image_at("/etc/passwd"), 400, "invalid_value", FIRST),
    (image_at("https://example.org/a.png"), 400, "remote_media_disabled", FIRST),
    (image_at("data:image/png;base64,%%%"), 400, "invalid_value", FIRST),
    (image_at("data:nothing"), 400, "invalid_value", FIRST),
    (user(url_part("image", b"what is this")), 415, "unsupported_media_type", FIRST),
    (user(url_part("image", media.wav())), 415, "unsupported_media_type", FIRST),
    (user(*[url_part("image", media.image())] * 3), 400, "invalid_value", "messages"),
    (user(url_part("image", media.image()[:40])), 422, "undecodable_media", "files"),
    (user(url_part("audio", media.video())), 422, "media_has_no_audio", "files"),
    (user({"type": "input_audio", "input_audio": {}}), 400, "missing_field", "messages[0].content[0].input_audio.data"),
    ({**HI, "n": 0}, 400, "invalid_value", "n"),
    ({**HI, "n": 9}, 400, "invalid_value", "n"),
    ({**HI, "n": "many"}, 400, "invalid_value", "n"),
    ({**HI, "stream": "maybe"}, 400, "invalid_value", "stream"),
    ({**HI, "stop": ["a"] * 5}, 400, "invalid_value", "stop"),
    ({**HI, "stop": "x" * 257}, 400, "invalid_value", "stop"),
    ({**HI, "stop": "x", "modalities": ["text", "audio"]}, 400, "unsupported_parameter", "stop"),
    ({**HI, "modalities": ["smell"]}, 400, "unknown_modality", "modalities"),
    ({**HI, "modalities": ["video"]}, 400, "unknown_modality", "modalities"),
    ({**HI, "audio": {"voice": "nobody"}}, 400, "invalid_value", "voice"),
    ({**HI, **SPOKEN, "audio": {"format": "aac"}}, 400, "unsupported_parameter", "audio.format"),
    ({**HI, "tools": [{"type": "function", "function": {"name": "add"}}]}, 400, "unsupported_parameter", "tools"),
    ({**HI, "logprobs": True}, 400, "unsupported_parameter", "logprobs"),
    ({**HI, "partial_images": False}, 400, "unsupported_parameter", "partial_images"),
    ({**HI, "speed": True}, 400, "unsupported_parameter", "speed"),
    ({**HI, "response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
    ({**HI, "presence_penalty": 0.5}, 400, "unsupported_parameter", "presence_penalty"),
    ({**HI, "frequency_penalty": 0.5}, 400, "unsupported_parameter", "frequency_penalty"),
    ({**HI, "logit_bias": {"5": 1}}, 400, "unsupported_parameter", "logit_bias"),
    ({**HI, "temprature": 1}, 400, "unknown_parameter", "temprature"),
    ({**HI, "temperature": "hot"}, 400, "invalid_value", "temperature"),
    ({**HI, "request_id": "a b"}, 400, "invalid_value", "request_id"),
]


async def test_bad_bodies_name_their_field() -> None:
    async with running(echo, model=SPEC) as api:
        for body, status, code, param in BAD:
            answer = await api.client.post(PATH, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (body, error)
        assert "assistant, developer, system, tool, user" in (await role_error(api))
        await api.clean()


async def role_error(api: Api) -> str:
    answer = await api.client.post(PATH, json={"messages": [{"role": "function", "content": "x"}]})
    return str(answer.json()["error"]["message"])


async def test_fields_without_effect_pass_and_common_names_warn(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        silent = {
            "user": "u",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "tools": [],
            "logprobs": False,
            "response_format": {"type": "text"},
            "presence_penalty": 0,
            "logit_bias": {},
            "parallel_tool_calls": True,
            "prompt_cache_key": "x",
            "safety_identifier": "y",
            "top_p": None,
            "tool_choice": "auto",
        }
        answer = await api.client.post(PATH, json={**HI, **silent})
        assert answer.status_code == 200 and "x-mstar-warnings" not in answer.headers
        warned = await api.client.post(PATH, json={**HI, "repetition_penalty": 1.1, "priority": 1})
        assert warned.headers["x-mstar-warnings"] == "repetition_penalty has no effect on this model"
        await api.client.post(PATH, json={**HI, "temperature": 0.5, "max_completion_tokens": 7, "max_tokens": 9})
        last = api.fake.requests[-1].params
        assert (last["temperature"], last["max_output_tokens"], last["talker_temperature"]) == (0.5, 7, 0.9)


async def test_a_model_of_text_alone_takes_no_media_and_no_other_route(started: Started) -> None:
    async with started(echo, model=TEXT_ONLY) as api:
        answer = await api.client.post(PATH, json=user(url_part("image", media.image())))
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
        spoken = await api.client.post(PATH, json={**HI, "modalities": ["audio"]})
        assert (spoken.status_code, spoken.json()["error"]["param"]) == (400, "modalities")
        for path in ("/v1/audio/speech", "/v1/images/generations", "/v1/images/edits", "/v1/audio/transcriptions"):
            refused = await api.client.post(path, json={})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["type"]) == (
                404,
                "unsupported_endpoint",
                "not_found_error",
            )
            assert error["message"].endswith(
                "supported routes: /generate, /v1/chat/completions, /v1/responses, /v1/realtime"
            )


async def test_the_openai_client_chats(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any") as client:
            whole = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], n=2, seed=3, extra_body={"think": True}
            )
            assert [c.message.content for c in whole.choices] == ["<user>hi<assistant>"] * 2
            assert whole.usage is not None and whole.usage.total_tokens == 19 * 3
            assert api.fake.requests[0].params["think"] is True
            stream = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "<user>hi<assistant>"
            assert chunks[-1].usage is not None
            spoken = await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "hi"}],
                modalities=["text", "audio"],
                audio={"voice": "ethan", "format": "wav"},
            )
            assert spoken.choices[0].message.audio is not None


async def test_an_answer_bears_the_name_by_which_the_model_was_asked(started: Started) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with started(echo, model=SPEC, aliases=("chat-1",)) as api:
        for asked, told in (("chat-1", "chat-1"), ("fake_omni", "fake_omni"), ("another", "fake")):
            body = {"model": asked, "messages": messages, "audio": {"format": "wav"}, "modalities": ["text"]}
            answer = (await api.client.post("/v1/chat/completions", json=body)).json()
            assert answer["model"] == told


async def test_the_form_of_sound_is_not_looked_at_without_sound(started: Started) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with started(echo, model=SPEC) as api:
        body = {"messages": messages, "audio": {"format": "wav"}, "modalities": ["text"], "stream": True}
        assert (await api.client.post("/v1/chat/completions", json=body)).status_code == 200
        body["modalities"] = ["text", "audio"]
        assert (await api.client.post("/v1/chat/completions", json=body)).status_code == 400
