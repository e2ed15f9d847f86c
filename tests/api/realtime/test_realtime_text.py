"""/v1/realtime in text and in speech without a microphone: items, responses, settings, errors."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import httpx

from mstar_core.api.parse.media import Fetcher
from mstar_core.messages.requests import EndSession, NewRequest
from tests.api.conftest import Started
from tests.api.realtime.client import RealtimeClient, conversing, service_of, sound_of
from tests.fakes import speech_model
from tests.fakes.conductor import FakeDeployment, echo, say, speak
from tests.fakes.media import image
from tests.fakes.omni_model import SPEC, TEXT_ONLY

ANSWER = [
    "response.created",
    "rate_limits.updated",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
]
ENDED = ["response.content_part.done", "conversation.item.done", "response.output_item.done", "response.done"]


async def test_a_text_is_answered_in_text_with_every_event_in_order(started: Started) -> None:
    async with started(say(b"Hel", b"lo"), model=SPEC) as api, conversing(api) as client:
        await client.say("hi")
        seen = len(client.events)
        done = await client.respond(output_modalities=["text"])
        kinds = client.kinds[seen:]
        assert kinds == [*ANSWER, *["response.output_text.delta"] * 5, "response.output_text.done", *ENDED]
        (item,) = done["output"]
        assert item["content"] == [{"type": "output_text", "text": "Hello"}] and item["status"] == "completed"
        assert done["status"] == "completed" and done["usage"]["total_tokens"] > 0
        ids = [int(event["event_id"].removeprefix("event_")) for event in client.events]
        assert ids == list(range(1, len(ids) + 1))
        await api.until(lambda: api.service_is_clean)


async def test_an_answer_is_spoken_with_its_transcript(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        await client.say("hi")
        seen = len(client.events)
        done = await client.respond()
        kinds = [kind for kind in client.kinds[seen:] if not kind.endswith(".delta")]
        assert kinds == [*ANSWER, "response.output_audio.done", "response.output_audio_transcript.done", *ENDED]
        said = "".join(event["delta"] for event in client.of("response.output_audio_transcript.delta"))
        assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": said}]
        assert said == "<user>hi<assistant>" and len(sound_of(client)) == 400
        assert [sorted(request.outputs) for request in api.fake.requests] == [["audio", "text"]]


async def test_earlier_turns_and_instructions_are_in_the_prompt(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        await client.send("session.update", session={"type": "realtime", "instructions": "Be kind."})
        assert (await client.until("session.updated"))["session"]["instructions"] == "Be kind."
        await client.say("one")
        await client.respond(output_modalities=["text"], instructions="Shout.")
        await client.say("two", id="item_two")
        await client.respond(output_modalities=["text"])
        first, second = (api.fake.prompt(request) for request in api.fake.requests)
        assert first == "<system>Shout.<user>one<assistant>"
        assert second == f"<system>Be kind.<user>one<assistant>{first}<user>two<assistant>"
        await client.send("conversation.item.delete", item_id="item_two")
        await client.until("conversation.item.deleted")
        await client.say("three")
        await client.respond(output_modalities=["text"])
        assert "two<" not in api.fake.prompt(api.fake.requests[-1]).rpartition("<system>")[0]


async def test_items_are_inserted_retrieved_and_kept_by_id(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        last = await client.say("second")
        await client.send(
            "conversation.item.create",
            previous_item_id="root",
            item={"type": "message", "role": "system", "content": [{"type": "input_text", "text": "first"}]},
        )
        added = await client.until("conversation.item.added")
        assert added["previous_item_id"] is None
        await client.send(
            "conversation.item.create",
            previous_item_id=last,
            item={"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "third"}]},
        )
        assert (await client.until("conversation.item.added"))["previous_item_id"] == last
        await client.send("conversation.item.retrieve", item_id=last)
        retrieved = await client.until("conversation.item.retrieved")
        assert retrieved["item"]["content"] == [{"type": "input_text", "text": "second"}]
        await client.respond(output_modalities=["text"])
        assert api.fake.prompt(api.fake.requests[0]) == "<system>first<user>second<assistant>third<assistant>"


async def test_a_response_apart_reads_its_own_input_and_joins_nothing(started: Started) -> None:
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        kept = await client.say("kept")
        own = [
            {"type": "item_reference", "id": kept},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "own"}]},
        ]
        done = await client.respond(conversation="none", input=own, output_modalities=["text"], metadata={"topic": "x"})
        assert done["metadata"] == {"topic": "x"} and done["conversation_id"] is None
        assert api.fake.prompt(api.fake.requests[0]) == "<user>kept<user>own<assistant>"
        await client.respond(output_modalities=["text"])
        assert api.fake.prompt(api.fake.requests[1]) == "<user>kept<assistant>"


async def test_a_response_is_cancelled_and_its_text_so_far_stays(started: Started) -> None:
    def begin(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"Once upon")

    async with started(begin, model=SPEC) as api, conversing(api) as client:
        await client.say("tell")
        await client.send("response.create", response={"output_modalities": ["text"]})
        await client.until("response.output_text.delta")
        assert "active response" in (await client.refused("response.create"))["message"]
        await client.send("response.cancel")
        done = (await client.until("response.done"))["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        assert done["output"][0]["content"][0]["text"] == "Once upon" and done["output"][0]["status"] == "incomplete"
        await api.fake.until(lambda: bool(api.fake.cancels))
        await api.until(lambda: api.service_is_clean)
        error = await client.refused("response.cancel")
        assert error["code"] == "response_cancel_not_active"


async def test_a_response_that_fails_says_why_and_the_session_goes_on(started: Started) -> None:
    outcomes = iter((lambda fake, request: fake.fail(request.handle), say(b"ok")))

    async with started(lambda fake, request: next(outcomes)(fake, request), model=SPEC) as api:
        async with conversing(api) as client:
            await client.say("hi")
            failed = await client.respond(output_modalities=["text"])
            assert failed["status"] == "failed" and failed["status_details"]["error"]["code"] == "engine_error"
            assert (await client.respond(output_modalities=["text"]))["status"] == "completed"


async def test_a_limit_makes_a_response_incomplete(started: Started) -> None:
    def cut(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"cut")
        fake.finish(request.handle, "length")

    async with started(cut, model=SPEC) as api, conversing(api) as client:
        await client.say("hi")
        done = await client.respond(output_modalities=["text"], max_output_tokens=3)
        assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
        assert api.fake.requests[0].params["max_output_tokens"] == 3 and done["max_output_tokens"] == 3


async def test_a_speech_model_speaks_the_texts_since_its_last_answer(started: Started) -> None:
    async with started(speak(2), model=speech_model.SPEC) as api, conversing(api) as client:
        assert client.events[0]["session"]["audio"]["output"]["voice"] == "tara"
        await client.say("one")
        await client.say("two")
        done = await client.respond()
        assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": "one two"}]
        assert len(sound_of(client)) == 2 * 2 * 2048
        await client.say("three")
        await client.respond(audio={"output": {"voice": "leo"}})
        assert [api.fake.prompt(request) for request in api.fake.requests] == ["one two", "three"]
        assert [request.params["voice"] for request in api.fake.requests] == ["tara", "leo"]


async def test_parameters_of_the_model_are_fields_of_session_and_response(started: Started) -> None:
    async with started(say(b"x"), model=SPEC) as api, conversing(api) as client:
        await client.send("session.update", session={"temperature": 0, "seed": 7})
        message = await client.socket.recv()
        assert '"temperature":0' in str(message)
        await client.say("hi")
        await client.respond(output_modalities=["text"], temperature=1.5)
        assert (api.fake.requests[0].params["temperature"], api.fake.requests[0].seed) == (1.5, 7)


WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"type": "session.updat", "session": {}}, "type", "invalid_value"),
    ({"type": "session.update"}, "session", "missing_field"),
    ({"type": "session.update", "session": {"instruction": "x"}}, "session.instruction", "unknown_parameter"),
    ({"type": "session.update", "session": {"instructions": 3}}, "session.instructions", "invalid_value"),
    ({"type": "session.update", "session": {"temperature": 9}}, "session.temperature", "invalid_value"),
    (
        {"type": "session.update", "session": {"audio": {"output": {"speed": 2}}}},
        "session.audio.output.speed",
        "unsupported_parameter",
    ),
    (
        {"type": "session.update", "session": {"audio": {"output": {"voice": "nobody"}}}},
        "session.voice",
        "invalid_value",
    ),
    (
        {"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/mp3"}}}}},
        "session.audio.input.format",
        "invalid_value",
    ),
    ({"type": "session.update", "session": {"tools": [{"type": "mcp"}]}}, "session.tools[0].type", "invalid_value"),
    ({"type": "conversation.item.create", "item": {"type": "mesage"}}, "item.type", "invalid_value"),
    (
        {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": [{}]}},
        "item.content[0].type",
        "missing_field",
    ),
    (
        {
            "type": "conversation.item.create",
            "item": {"type": "message", "role": "user", "content": [{"type": "output_text", "text": "x"}]},
        },
        "item.content[0].type",
        "invalid_value",
    ),
    (
        {
            "type": "conversation.item.create",
            "item": {"type": "function_call_output", "call_id": "x", "output": ""},
        },
        "item.call_id",
        "invalid_value",
    ),
    ({"type": "conversation.item.retrieve", "item_id": "nothing"}, "item_id", "item_not_found"),
    ({"type": "conversation.item.delete", "item_id": 3}, "item_id", "invalid_value"),
    ({"type": "input_audio_buffer.append", "audio": "%%%"}, "audio", "invalid_value"),
    ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio", "invalid_value"),
    ({"type": "input_audio_buffer.commit"}, None, "input_audio_buffer_commit_empty"),
    ({"type": "response.create", "response": {"conversation": "x"}}, "response.conversation", "invalid_value"),
    ({"type": "response.create", "response": {"output_modalities": ["video"]}}, "response", "invalid_value"),
    ({"type": "response.create", "more": 1}, "more", "unknown_parameter"),
]
"""Events with the field and the code of their errors."""


async def test_a_wrong_event_names_its_field_and_disturbs_nothing(live: RealtimeClient) -> None:
    for event, param, code in WRONG:
        fields = dict(event)
        error = await live.refused(fields.pop("type"), **fields)
        assert error["code"] == code and (error["param"] or "").startswith(param or ""), (event, error)
        assert param is not None or error["param"] is None
        assert await live.say("still here")


async def test_a_message_that_is_no_event_gets_an_error(live: RealtimeClient) -> None:
    for message in ("{", "[]", b"\x00", '{"type": 3}', '{"type": "response.create", "response": []}'):
        await live.socket.send(message)
        assert (await live.until("error"))["error"]["event_id"] is None
    assert await live.say("still here")


async def test_models_without_speech_or_hearing_say_so(started: Started) -> None:
    async with started(echo, model=TEXT_ONLY) as api, conversing(api) as client:
        session = client.events[0]["session"]
        assert session["output_modalities"] == ["text"] and session["audio"]["input"]["turn_detection"] is None
        assert (await client.refused("input_audio_buffer.append", audio="AAAA"))["param"] == "audio"
        error = await client.refused("session.update", session={"output_modalities": ["audio"]})
        assert error["param"] == "session.output_modalities"
        vad = {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        assert "does not hear" in (await client.refused("session.update", session=vad))["message"]


async def test_the_oldest_items_leave_a_context_that_is_full(started: Started) -> None:
    model = replace(SPEC, processor="tests.fakes.short_context:Processor")
    async with started(echo, model=model) as api, conversing(api) as client:
        for word in ("one", "two", "three"):
            await client.say(f"{word} {'x' * 20}")
        done = await client.respond(output_modalities=["text"])
        assert done["status"] == "completed"
        assert api.fake.prompt(api.fake.requests[0]).startswith("<user>two")
        await client.send("session.update", session={"truncation": "disabled"})
        await client.until("session.updated")
        await client.say("four " + "x" * 60)
        failed = await client.respond(output_modalities=["text"])
        assert failed["status_details"]["error"]["code"] == "context_length_exceeded"
        await client.send("session.update", session={"truncation": {"type": "retention_ratio", "retention_ratio": 0.4}})
        await client.until("session.updated")
        assert (await client.respond(output_modalities=["text"]))["status"] == "completed"
        assert api.fake.prompt(api.fake.requests[-1]).startswith("<user>four")


async def test_an_image_of_an_earlier_item_is_decoded_once(started: Started) -> None:
    url = f"data:image/png;base64,{base64.b64encode(image(8, 6)).decode()}"
    async with started(echo, model=SPEC) as api:
        async with conversing(api) as client:
            await client.say("", content=[{"type": "input_image", "image_url": url}])
            await client.respond(output_modalities=["text"])
            await client.say("again")
            await client.respond(output_modalities=["text"])
            first, second = api.fake.requests
            assert (first.facts, second.facts) == ({"decoded": 1}, {"decoded": 0})
            assert api.fake.prompt(second).startswith(api.fake.prompt(first))
            assert "[image 8x6]" in api.fake.prompt(first)
            assert service_of(api).client_sessions.media.size_bytes > 0
        await api.until(lambda: service_of(api).client_sessions.media.size_bytes == 0)


async def test_an_image_behind_an_address_is_fetched_once(started: Started) -> None:
    paths: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return httpx.Response(200, stream=httpx.ByteStream(image(8, 6)))

    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34"]

    fetcher = Fetcher(("pictures.example",), 1 << 20, resolve=resolve, transport=httpx.MockTransport(respond))
    async with started(echo, model=SPEC, fetcher=fetcher) as api, conversing(api) as client:
        url = "https://pictures.example/a.png"
        item = await client.say("", content=[{"type": "input_image", "image_url": url}])
        for _ in range(3):
            assert (await client.respond(output_modalities=["text"]))["status"] == "completed"
        assert paths == ["/a.png"] and all("[image 8x6]" in api.fake.prompt(each) for each in api.fake.requests)
        await client.send("conversation.item.retrieve", item_id=item)
        shown = (await client.until("conversation.item.retrieved"))["item"]
        assert shown["content"] == [{"type": "input_image", "image_url": url}]


async def test_the_items_have_a_limit_of_bytes(started: Started) -> None:
    async with started(echo, model=SPEC, max_body_bytes=1024) as api, conversing(api) as client:
        first = await client.say("a" * 600)
        text = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b" * 600}]}
        url = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "c" * 600}]}
        for item in (text, url):
            error = await client.refused("conversation.item.create", item=item)
            assert (error["code"], error["param"]) == ("body_too_large", "item")
        await client.send("conversation.item.delete", item_id=first)
        await client.until("conversation.item.deleted")
        await client.say("b" * 600)


async def test_responses_belong_to_the_session_which_ends_with_it(started: Started) -> None:
    async with started(say(b"x"), model=SPEC) as api:
        async with conversing(api) as client:
            session = client.events[0]["session"]["id"]
            await client.say("hi")
            await client.respond(output_modalities=["text"])
            await client.respond(output_modalities=["text"], conversation="none")
            assert [request.session for request in api.fake.requests] == [session, ""]
        await api.fake.until(lambda: bool(api.fake.of(EndSession)))
        assert api.fake.of(EndSession)[0].session == session
