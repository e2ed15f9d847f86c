"""/v1/responses by the OpenAI client: answers, thinking, calls, streams, stored and continued responses, background."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from mstar_core.api.output import kept_events
from mstar_core.api.service import Service
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin.chat.format import ChatFormat, ReasoningFormat, ToolFormat
from tests.api.conftest import Api, Started
from tests.api.live import LiveApi, live_api
from tests.api.test_chat_tools import HELD
from tests.fakes import media
from tests.fakes.conductor import FakeDeployment, say
from tests.fakes.omni_model import SPEC

PATH = "/v1/responses"
MODEL = replace(
    SPEC,
    name="fake_tools",
    chat=ChatFormat(
        tools=ToolFormat(begin="<tool_call>", end="</tool_call>"),
        reasoning=ReasoningFormat(efforts={"none": {"thinking": False}, "low": {"thinking": True}}),
    ),
    processor="tests.fakes.tool_model:Processor",
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = b'<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
ARGUMENTS = {"city": "Oslo"}


@asynccontextmanager
async def opened(started: Started, script: Any = None, **changes: Any) -> AsyncIterator[tuple[Api, Any]]:
    async with (
        started(script, **{"model": MODEL, **changes}) as api,
        openai.AsyncOpenAI(
            base_url=f"{api.url}/v1", api_key="any", max_retries=0, _strict_response_validation=True
        ) as client,
    ):
        yield api, client
        await api.clean()


class Repeat:
    """Script: `n:` and the number of the request. prompts: as the template has laid them out."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, fake: FakeDeployment, request: NewRequest) -> None:
        self.prompts.append(fake.prompt(request))
        fake.text(request.handle, b"n:%d" % len(fake.requests))
        fake.finish(request.handle)


repeat = Repeat()


async def test_a_text_is_answered_by_a_message(started: Started) -> None:
    async with opened(started, say(b"Hel", b"lo")) as (api, client):
        response = await client.responses.create(
            model="fake", input="hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, top_p=0.9
        )
        assert (response.output_text, response.status, response.object) == ("Hello", "completed", "response")
        (message,) = response.output
        assert message.type == "message" and message.status == "completed" and message.role == "assistant"
        assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
        assert response.usage is not None and response.usage.output_tokens == 5
        assert response.usage.input_tokens == len("<system>Be brief.<user>hi<assistant>")
        assert response.completed_at is not None and response.id.startswith("resp_")
        assert api.fake.requests[0].params["temperature"] == 0.5


async def test_a_stream_has_every_event_in_order(started: Started) -> None:
    text = b"<think>Let me see.</think>It depends." + CALL
    async with opened(started, say(*(text[at : at + 5] for at in range(0, len(text), 5)))) as (_, client):
        stream = await client.responses.create(input="hi", tools=[WEATHER], stream=True)
        events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert list(dict.fromkeys(kinds)) == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_text.delta",
            "output_text.done",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "completed",
        ]
        whole = events[-1].response
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert whole.output[0].content[0].text == "Let me see." and whole.output_text == "It depends."
        assert json.loads(whole.output[2].arguments) == ARGUMENTS and whole.output[2].status == "completed"
        added = [event.item for event in events if event.type == "response.output_item.added"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.id for item in added] == [item.id for item in done] == [item.id for item in whole.output]
        assert {item.status for item in added} == {"in_progress"} and not added[1].content
        assert done == list(whole.output)
        for kind, text_of in (("output_text", "It depends."), ("reasoning_text", "Let me see.")):
            deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
            assert "".join(deltas) == text_of and len(deltas) > 1
        indices = [event.output_index for event in events if hasattr(event, "output_index")]
        assert indices == sorted(indices)


async def test_the_clients_own_accumulator_reads_the_stream(started: Started) -> None:
    async with opened(started, say(b"<think>Hm.</think>", b"Yes", b" and ", b"no.", CALL)) as (_, client):
        async with client.responses.stream(input="hi", model="fake", tools=[WEATHER]) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_response()
        assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= kinds
        assert final.output_text == "Yes and no."
        call = final.output[-1]
        assert call.type == "function_call" and json.loads(call.arguments) == ARGUMENTS


async def test_a_stream_and_a_whole_response_are_the_same(started: Started) -> None:
    async with opened(started, say(b"<think>Hm.</think>Yes.", CALL, CALL)) as (api, _):
        body = {"input": "hi", "tools": [WEATHER], "seed": 3}
        whole = (await api.client.post(PATH, json=body, headers={"X-Request-ID": "a"})).json()
        streamed = await api.client.post(PATH, json={**body, "stream": True}, headers={"X-Request-ID": "a"})
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        parts = [part.split("\n") for part in streamed.text.split("\n\n") if part]
        assert all(kind == f"event: {json.loads(data.removeprefix('data: '))['type']}" for kind, data in parts)
        last = json.loads(parts[-1][1].removeprefix("data: "))["response"]
        changing = ("id", "created_at", "completed_at")
        for response in (whole, last):
            for item in response["output"]:
                item["id"] = item["call_id"] = ""
        assert {k: v for k, v in whole.items() if k not in changing} == {
            k: v for k, v in last.items() if k not in changing
        }
        assert len(whole["output"]) == 4


async def test_calls_and_their_outputs_go_back_into_the_conversation(started: Started) -> None:
    repeated = Repeat()

    def script(fake: FakeDeployment, request: NewRequest) -> None:
        answer = repeated if len(fake.requests) > 1 else say(b"<think>Ask.</think>", CALL)
        answer(fake, request)

    async with opened(started, script) as (_, client):
        first = await client.responses.create(input="How is Oslo?", tools=[WEATHER])
        call = first.output[-1]
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await client.responses.create(
            input=[result],
            previous_response_id=first.id,
            tools=[WEATHER],
            instructions="Be brief.",
        )
        laid = repeated.prompts[-1]
        assert laid == (
            "{weather}<system>Be brief.<user>How is Oslo?"
            '<assistant>(Ask.)[weather {"city": "Oslo"}]<tool>weather: rain<assistant>'
        )
        stateless = [{"role": "user", "content": "How is Oslo?"}, *first.model_dump()["output"], result]
        await client.responses.create(input=stateless, tools=[WEATHER], instructions="Be brief.")
        assert repeated.prompts[-1] == laid, "items sent back are the same conversation"
        third = await client.responses.create(input="And now?", previous_response_id=second.id)
        assert repeated.prompts[-1].endswith("<tool>weather: rain<assistant>n:2<user>And now?<assistant>")
        assert "Be brief." not in repeated.prompts[-1]
        assert third.previous_response_id == second.id


async def test_a_required_function_is_held_by_a_grammar_and_its_arguments_stream(started: Started) -> None:
    async with opened(started, say(CALL[:45], CALL[45:55], CALL[55:]), model=HELD) as (api, client):
        named = {"type": "function", "name": "weather"}
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
        for choice in ("required", named, allowed):
            stream = await client.responses.create(input="hi", tools=[WEATHER], tool_choice=choice, stream=True)
            events = [event async for event in stream]
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            assert len(deltas) > 1 and json.loads("".join(deltas)) == ARGUMENTS
            assert "weather" in api.fake.requests[-1].params["constraint"]
            assert json.loads(events[-1].response.output[0].arguments) == ARGUMENTS
        odd = {"type": "object", "properties": {}, "dependentRequired": {"a": ["b"]}}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(input="hi", tools=[{**WEATHER, "strict": True, "parameters": odd}])
        assert refused.value.param == "tools[0].parameters"


async def test_a_call_that_the_limit_cuts_off_is_incomplete(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, CALL[:50])
        fake.finish(request.handle, "length")

    async with opened(started, script, model=HELD) as (_, client):
        response = await client.responses.create(input="hi", tools=[WEATHER], tool_choice="required")
        (call,) = response.output
        assert (response.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")


async def test_items_of_every_kind_reach_the_template_in_order(started: Started) -> None:
    repeated = Repeat()
    image, sound = media.image(8, 6), media.wav(0.1)
    async with opened(started, repeated) as (api, _):
        items = [
            {"role": "developer", "content": "Be kind."},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see "},
                    {"type": "input_image", "image_url": data_url(image), "detail": "high"},
                    {"type": "input_audio", "input_audio": {"data": base64_of(sound), "format": "wav"}},
                ],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Two."}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "sun"}]},
            {"type": "function_call_output", "call_id": "a", "output": "fog"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Fine.", "annotations": []}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "And?"},
        ]
        answer = await api.client.post(PATH, json={"input": items, "tools": [WEATHER]})
        assert answer.status_code == 200, answer.text
        assert repeated.prompts[0] == (
            "{weather}<system>Be kind.<user>see [image 8x6][audio 1600]"
            '<assistant>(Two.)[weather {}][weather {"city": "Rome"}]<tool>weather: sun<tool>weather: fog'
            "<assistant>Fine.<assistant>No.<user>And?<assistant>"
        )


async def test_a_response_is_retrieved_listed_and_deleted(started: Started) -> None:
    async with opened(started, repeat) as (api, client):
        first = await client.responses.create(input="one")
        second = await client.responses.create(
            input=[{"role": "user", "content": "two"}, {"role": "user", "content": "three"}],
            previous_response_id=first.id,
        )
        assert await client.responses.retrieve(second.id) == second
        items = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        assert [text_of(item) for item in items] == ["one", "n:1", "two", "three"]
        assert len({item.id for item in items}) == 4
        backwards = [item async for item in client.responses.input_items.list(second.id, limit=1)]
        assert [item.id for item in backwards] == [item.id for item in items][::-1], "pages of one follow each other"
        page = await client.responses.input_items.list(second.id, order="asc", limit=2, after=items[0].id)
        assert [item.id for item in page.data] == [items[1].id, items[2].id]
        raw = (await api.client.get(f"{PATH}/{second.id}/input_items?limit=2&order=asc")).json()
        assert (raw["first_id"], raw["last_id"], raw["has_more"]) == (items[0].id, items[1].id, True)
        await client.responses.delete(second.id)
        for missing in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError) as refused:
                await missing(second.id)
            assert refused.value.code == "response_not_found"
        await client.responses.retrieve(first.id)


async def test_a_response_that_is_not_stored_is_unknown_afterwards(started: Started) -> None:
    async with opened(started, repeat) as (api, client):
        response = await client.responses.create(input="one", store=False)
        assert (await client.responses.with_raw_response.create(input="x")).http_response.json()["store"] is True
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(input="two", previous_response_id=response.id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        assert len(api.fake.requests) == 2


async def test_a_deployment_may_store_nothing(started: Started) -> None:
    async with opened(started, repeat, responses_max_count=0) as (api, client):
        response = await client.responses.create(input="one")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        for body, field in (({"store": True}, "store"), ({"background": True}, "background")):
            answer = await api.client.post(PATH, json={"input": "x", **body})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_limits_of_the_store_reach_it(started: Started) -> None:
    limits = {"responses_max_count": 2, "responses_ttl_s": 5.0, "responses_max_bytes": 100_000}
    async with opened(started, repeat, **limits) as (api, client):
        ids = [(await client.responses.create(input=f"{number}")).id for number in range(3)]
        codes = [(await api.client.get(f"{PATH}/{name}")).status_code for name in ids]
        assert codes == [404, 200, 200]
        large = await api.client.post(PATH, json={"input": "x" * 50_000})
        assert large.json()["store"] is False and "too large" in large.headers["X-Mstar-Warnings"]
        store = service_of(api).responses
        assert (store.limits.ttl_s, store.limits.most_bytes) == (5.0, 100_000)


async def test_responses_belong_to_the_key_that_created_them(started: Started) -> None:
    async with started(repeat, model=MODEL, api_keys=("one", "two")) as api:
        keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two", "three")]
        made = (await api.client.post(PATH, json={"input": "x"}, headers=keys[0])).json()["id"]
        calls = [("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")]
        for headers, status in ((keys[1], 404), (keys[2], 401), ({}, 401)):
            for method, end in calls:
                answer = await api.client.request(method, f"{PATH}/{made}{end}", headers=headers)
                assert answer.status_code == status, (method, end)
            body = {"input": "y", "previous_response_id": made}
            answer = await api.client.post(PATH, json=body, headers=headers)
            assert answer.status_code == (400 if status == 404 else 401)
        assert (await api.client.get(f"{PATH}/{made}", headers=keys[0])).status_code == 200
        await api.clean()


async def test_a_limit_makes_the_response_incomplete(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"Once upon")
        fake.finish(request.handle, "length")

    async with opened(started, script) as (_, client):
        response = await client.responses.create(input="hi", max_output_tokens=16)
        assert response.status == "incomplete" and response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens" and response.max_output_tokens == 16
        assert response.output[0].status == "incomplete" and response.output_text == "Once upon"
        stream = await client.responses.create(input="hi", stream=True)
        assert [event async for event in stream][-1].type == "response.incomplete"
        assert await client.responses.retrieve(response.id) == response


async def test_an_empty_answer_is_an_empty_message(started: Started) -> None:
    async with opened(started, say()) as (_, client):
        response = await client.responses.create(input="hi")
        assert (response.output_text, len(response.output)) == ("", 1)


async def test_a_stream_that_fails_ends_with_a_failed_response(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"x")
        fake.fail(request.handle)

    async with opened(started, script) as (_, client):
        stream = await client.responses.create(input="hi", stream=True)
        events = [event async for event in stream]
        last = events[-1]
        assert last.type == "response.failed" and last.response.status == "failed"
        assert last.response.error is not None and last.response.error.code == "server_error"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with pytest.raises(openai.InternalServerError) as failed:
            await client.responses.create(input="hi")
        assert failed.value.code == "engine_error"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(last.response.id)


async def test_a_client_that_leaves_ends_its_response(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, b"x")

    async with opened(started, script) as (api, client):
        stream = await client.responses.create(input="hi", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await api.fake.until(lambda: bool(api.fake.cancels))


async def test_a_response_in_the_background_is_polled(started: Started) -> None:
    async with opened(started) as (api, client):
        response = await client.responses.create(input="hi", background=True)
        assert (response.status, response.background) == ("queued", True)
        request = await api.fake.next_request()
        api.fake.text(request.handle, b"Hel")
        await until(client, response.id, lambda found: found.output_text == "Hel")
        with pytest.raises(openai.BadRequestError, match="wait for its end"):
            await client.responses.create(input="x", previous_response_id=response.id)
        api.fake.text(request.handle, b"lo")
        api.fake.finish(request.handle)
        found = await until(client, response.id, lambda found: found.status == "completed")
        assert found.output_text == "Hello" and found.usage is not None
        assert [text_of(item) async for item in client.responses.input_items.list(response.id)] == ["hi"]
        assert (await client.responses.cancel(response.id)).status == "completed"
        assert not len(service_of(api).background)


async def test_a_client_comes_back_to_the_events_of_a_background_response(started: Started) -> None:
    async with opened(started) as (api, client):
        stream = await client.responses.create(input="hi", background=True, stream=True)
        response_id, seen = "", -1
        request = await api.fake.next_request()
        api.fake.text(request.handle, b"Hel")
        async for event in stream:
            seen = event.sequence_number
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        api.fake.text(request.handle, b"lo")
        api.fake.finish(request.handle)
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=seen)
        events = [event async for event in rest]
        assert [event.sequence_number for event in events] == list(range(seen + 1, seen + 1 + len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "ello"
        assert events[-1].type == "response.completed" and events[-1].response.output_text == "Hello"
        assert not api.fake.cancels
        again = [event async for event in await client.responses.retrieve(response_id, stream=True)]
        assert [event.type for event in again[:3]] == ["response.created", "response.queued", "response.in_progress"]


async def test_events_that_are_not_kept_are_410(started: Started) -> None:
    async with opened(started, repeat) as (api, client):
        response = await client.responses.create(input="hi")
        answer = await api.client.get(f"{PATH}/{response.id}?stream=true")
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "events_gone")
        assert (await api.client.get(f"{PATH}/resp_x?stream=true")).status_code == 404


async def test_events_of_another_route_are_no_response(started: Started) -> None:
    async with opened(started, repeat) as (api, _):
        headers = {"X-Request-ID": "mine", "X-Mstar-Detach": "true"}
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        assert (await api.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        assert (await api.client.get("/v1/requests/mine/events")).status_code == 200
        answer = await api.client.get(f"{PATH}/mine?stream=true")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")


async def test_a_background_response_is_cancelled_once(started: Started) -> None:
    async with opened(started) as (api, client):
        stream = await client.responses.create(input="hi", background=True, stream=True)
        first = await anext(aiter(stream))
        assert first.type == "response.created"
        request = await api.fake.next_request()
        api.fake.text(request.handle, b"x")
        await until(client, first.response.id, lambda found: found.output_text == "x")
        for _ in range(2):
            assert (await client.responses.cancel(first.response.id)).status == "cancelled"
        await api.fake.until(lambda: bool(api.fake.cancels))
        last = [event async for event in stream][-1]
        assert last.type == "response.failed" and last.response.status == "cancelled"
        assert (await client.responses.retrieve(first.response.id)).status == "cancelled"


async def test_a_background_response_that_is_deleted_does_not_return(started: Started) -> None:
    async with opened(started) as (api, client):
        response = await client.responses.create(input="hi", background=True)
        await api.fake.next_request()
        await client.responses.delete(response.id)
        await api.fake.until(lambda: bool(api.fake.cancels))
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


async def test_only_background_responses_are_cancelled(started: Started) -> None:
    async with opened(started, repeat) as (_, client):
        response = await client.responses.create(input="hi")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.cancel(response.id)
        assert refused.value.code == "not_in_background"


async def test_a_background_response_tells_of_its_failure(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        fake.fail(request.handle)

    async with opened(started, script) as (_, client):
        response = await client.responses.create(input="hi", background=True)
        found = await until(client, response.id, lambda found: found.status == "failed")
        assert found.error is not None and found.error.code == "server_error"


async def test_a_background_response_of_an_earlier_api_has_failed(started: Started) -> None:
    async with opened(started, repeat) as (api, client):
        response = await client.responses.create(input="hi", background=True)
        await until(client, response.id, lambda found: found.status == "completed")
        store = service_of(api).responses
        entry = await store.find(response.id, b"")
        assert entry is not None
        body = json.loads(entry.body) | {"status": "in_progress"}
        await store.save(replace(entry, status="in_progress", body=json.dumps(body).encode()))
        found = await client.responses.retrieve(response.id)
        assert found.status == "failed" and found.error is not None and "restarted" in found.error.message
        stored = await store.find(response.id, b"")
        assert stored is not None and stored.status == "failed"


async def test_a_full_disk_loses_no_answer(started: Started) -> None:
    async with opened(started, repeat) as (api, _):
        store = service_of(api).responses
        store._file.path = store._file.path.with_name("missing") / "x"
        answer = await api.client.post(PATH, json={"input": "hi"})
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        assert "could not be stored" in answer.headers["X-Mstar-Warnings"]
        background = await api.client.post(PATH, json={"input": "hi", "background": True})
        assert (background.status_code, background.json()["error"]["code"]) == (503, "storage_full")


async def test_detached_streams_work_as_on_other_routes(started: Started) -> None:
    async with opened(started, repeat) as (api, _):
        headers = {"X-Request-ID": "d", "X-Mstar-Detach": "true"}
        whole = await api.client.post(PATH, json={"input": "hi", "stream": True}, headers=headers)
        assert whole.text.startswith("id: 1\nevent: response.created\n")
        again = await api.client.get("/v1/requests/d/events?after=2")
        assert whole.text.endswith(again.text) and again.text.startswith("id: 3\n")


async def test_a_page_of_an_allowed_origin_may_delete(started: Started) -> None:
    origin = "https://page.example"
    async with opened(started, repeat, cors_origins=(origin,)) as (api, client):
        response = await client.responses.create(input="x")
        url = f"{PATH}/{response.id}"
        headers = {"Origin": origin, "Access-Control-Request-Method": "DELETE"}
        allowed = await api.client.options(url, headers=headers)
        assert allowed.status_code == 204 and "DELETE" in allowed.headers["Access-Control-Allow-Methods"]
        foreign = await api.client.delete(
            url, headers={"Origin": "https://other.example", "Sec-Fetch-Site": "cross-site"}
        )
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert (await api.client.delete(url, headers={"Origin": origin})).json()["deleted"] is True


USER = {"role": "user", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "missing_field"),
    ({"input": []}, "input", "missing_field"),
    ({"input": 5}, "input", "invalid_value"),
    ({"input": [5]}, "input[0]", "invalid_value"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"content": "x"}]}, "input[0].type", "missing_field"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "unsupported_parameter"),
    ({"input": [{"id": "x"}]}, "input[0].type", "unsupported_parameter"),
    ({"input": [{"type": "computer_call_output"}]}, "input[0].type", "unsupported_parameter"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0]",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
        "unsupported_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].image_url",
        "missing_field",
    ),
    ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "input[0].content[0].type", "invalid_value"),
    (
        {"input": [USER, {"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]},
        "input[1].content[0].image_url",
        "invalid_value",
    ),
    (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER]},
        "input[0].encrypted_content",
        "unsupported_parameter",
    ),
    (
        {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[1].call_id",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"}]},
        "input[0].name",
        "invalid_value",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
        "input[0].arguments",
        "invalid_json",
    ),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    (
        {"input": "x", "tools": [WEATHER, {"type": "mcp", "server_label": "x"}]},
        "tools[1].type",
        "unsupported_parameter",
    ),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "missing_field"),
    ({"input": "x", "tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools[1].name", "invalid_value"),
    ({"input": "x", "tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "tools[0].parameters", "invalid_value"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"input": "x", "tool_choice": "maybe", "tools": [WEATHER]}, "tool_choice", "invalid_value"),
    ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported_parameter"),
    (
        {"input": "x", "tool_choice": {"type": "function", "name": "wind"}, "tools": [WEATHER]},
        "tool_choice",
        "invalid_value",
    ),
    (
        {"input": "x", "tool_choice": {"type": "allowed_tools", "tools": [{"name": "wind"}]}, "tools": [WEATHER]},
        "tool_choice.tools[0].name",
        "invalid_value",
    ),
    ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include", "unsupported_parameter"),
    ({"input": "x", "include": ["file_search_call.results"]}, "include", "unsupported_parameter"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"input": "x", "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"input": "x", "truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
    ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort", "unsupported_parameter"),
    ({"input": "x", "reasoning": {"effort": "much"}}, "reasoning.effort", "invalid_value"),
    ({"input": "x", "reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_parameter"),
    ({"input": "x", "metadata": {"a": "x" * 513}}, "metadata", "invalid_value"),
    ({"input": "x", "metadata": {f"{n}": "x" for n in range(17)}}, "metadata", "invalid_value"),
    ({"input": "x", "metadata": {"a": 5}}, "metadata[...]", "invalid_value"),
    ({"input": "x", "background": True, "store": False}, "background", "unsupported_parameter"),
    ({"input": "x", "previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    ({"input": "x", "n": 2}, "n", "unknown_parameter"),
    ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format", "unsupported_parameter"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, "include", "unsupported_parameter"),
    *[
        ({"input": "x", name: value}, name, "unsupported_parameter")
        for name, value in (
            ("conversation", "conv_1"),
            ("context_management", [{"type": "compaction"}]),
            ("prompt", {"id": "p"}),
            ("moderation", {"model": "m"}),
            ("access_programs", {"cyber": "standard"}),
            ("image", {"context_compression": "enabled"}),
            ("prompt_cache_options", {"mode": "explicit"}),
            ("stream_options", {"include_obfuscation": True}),
        )
    ],
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveApi]:
    with live_api(say(b"ok"), MODEL) as live:
        yield live
        live.assert_good()


@pytest.mark.parametrize("body, field, code", REFUSED, ids=[f"{n} {field}" for n, (_, field, _) in enumerate(REFUSED)])
def test_what_is_not_offered_is_refused_by_its_name(
    body: dict[str, Any], field: str, code: str, server: LiveApi
) -> None:
    answer = server.client.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (field, code), error["message"]


ACCEPTED: list[dict[str, Any]] = [
    {"truncation": "disabled", "text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["message.input_image.image_url"]},
    {
        "max_tool_calls": 3,
        "service_tier": "auto",
        "user": "u",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
    },
    {"stream_options": {"include_obfuscation": False}, "safety_identifier": "x", "conversation": None},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": False, "stop": ["zzz"], "seed": 4},
    {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "weather"}]}},
]


async def test_options_without_effect_are_accepted(started: Started) -> None:
    async with opened(started, repeat) as (api, _):
        for options in ACCEPTED:
            answer = await api.client.post(PATH, json={"input": "x", **options})
            assert answer.status_code == 200, (options, answer.text)
            Response.model_validate(answer.json(), strict=True)


@pytest.mark.parametrize(
    "query, field",
    [
        ("/input_items?order=up", "order"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?after=msg_x", "after"),
        ("/input_items?include=reasoning.encrypted_content", "include"),
        ("?stream=maybe", "stream"),
        ("?starting_after=-1", "starting_after"),
        ("?include=code_interpreter_call.outputs", "include"),
    ],
)
def test_queries_that_mean_nothing_are_refused(query: str, field: str, server: LiveApi) -> None:
    response = server.client.post(PATH, json={"input": "x"}).json()
    answer = server.client.get(f"{PATH}/{response['id']}{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_dropped_events_of_a_background_response_are_410(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_events, "LOG_BYTES", 4000)
    async with opened(started, say(*[b"x" * 100] * 20)) as (api, client):
        response = await client.responses.create(input="hi", background=True)
        await until(client, response.id, lambda found: found.status == "completed")
        answer = await api.client.get(f"{PATH}/{response.id}?stream=true")
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "events_gone")


async def until(client: openai.AsyncOpenAI, response_id: str, condition: Any) -> Response:
    """Poll a response until it meets a condition."""
    async with asyncio.timeout(60):
        while True:
            found = await client.responses.retrieve(response_id)
            if condition(found):
                return found
            await asyncio.sleep(0.01)


def service_of(api: Api) -> Service:
    service = api.process._service
    assert service is not None
    return service


def text_of(item: Any) -> str:
    return "".join(part.text for part in item.content)


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64_of(data)}"
