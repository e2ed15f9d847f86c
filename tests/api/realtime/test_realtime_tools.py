"""Functions in /v1/realtime: calls in text and beside speech, results, choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mstar_core.messages.requests import NewRequest
from mstar_core.plugin.chat.format import HERMES, ChatFormat
from tests.api.conftest import Started
from tests.api.realtime.client import conversing, sound_of
from tests.fakes.conductor import FakeDeployment, echo, say
from tests.fakes.omni_model import SPEC

MODEL = replace(SPEC, chat=ChatFormat(tools=HERMES))
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALL = b'<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_a_call_is_an_item_whose_result_the_next_answer_reads(started: Started) -> None:
    scripts = iter((say(CALL), echo))
    async with started(lambda fake, request: next(scripts)(fake, request), model=MODEL) as api:
        async with conversing(api) as client:
            session = {"tools": [ADD], "tool_choice": "auto", "output_modalities": ["text"]}
            await client.send("session.update", session=session)
            assert (await client.until("session.updated"))["session"]["tools"] == [ADD]
            await client.say("add")
            done = await client.respond()
            (call,) = done["output"]
            assert (call["type"], call["name"], call["arguments"]) == ("function_call", "add", '{"a": 1}')
            finished = client.of("response.function_call_arguments.done")[0]
            assert (finished["call_id"], finished["name"]) == (call["call_id"], "add")
            assert "".join(e["delta"] for e in client.of("response.function_call_arguments.delta")) == '{"a": 1}'
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
            await client.send("conversation.item.create", item=result)
            await client.until("conversation.item.done")
            await client.respond(tool_choice="none")
            name = call["call_id"]
            laid = f'<user>add<assistant>[add {name} {{"a": 1}}]<tool>[add {name}]2<assistant>'
            assert api.fake.prompt(api.fake.requests[1]) == f"[tools add none]{laid}"


async def test_a_call_without_a_result_does_not_hold_the_conversation_up(started: Started) -> None:
    scripts = iter((say(CALL), echo))
    async with started(lambda fake, request: next(scripts)(fake, request), model=MODEL) as api:
        async with conversing(api) as client:
            await client.say("add")
            await client.respond(tools=[ADD], output_modalities=["text"])
            await client.say("never mind")
            await client.respond(output_modalities=["text"])
            assert api.fake.prompt(api.fake.requests[1]) == "<user>add<user>never mind<assistant>"


async def test_the_sound_of_a_call_is_not_sent(started: Started) -> None:
    def call(fake: FakeDeployment, request: NewRequest) -> None:
        fake.audio(request.handle, 1000)
        fake.text(request.handle, CALL)
        fake.audio(request.handle, 1000)
        fake.finish(request.handle)

    async with started(call, model=MODEL) as api, conversing(api) as client:
        await client.say("add")
        done = await client.respond(tools=[ADD])
        assert [item["type"] for item in done["output"]] == ["function_call"] and not sound_of(client)


async def test_words_before_a_call_are_spoken_and_nothing_more(started: Started) -> None:
    words = b"Let me see, please wait."

    def call(fake: FakeDeployment, request: NewRequest) -> None:
        fake.text(request.handle, words)
        fake.text(request.handle, CALL)
        for number in range(4):
            fake.audio_of(request.handle, np.full(1000, number, np.int16))
        fake.finish(request.handle)

    async with started(call, model=MODEL) as api, conversing(api) as client:
        await client.say("add")
        done = await client.respond(tools=[ADD])
        assert [item["type"] for item in done["output"]] == ["message", "function_call"]
        assert done["output"][0]["content"][0]["transcript"].strip() == words.decode()
        share = len(words) / (len(words) + len('add{"a": 1}'))
        assert abs(len(sound_of(client)) / 2 - 4000 * share) < 200


async def test_wrong_tools_name_their_field(started: Started) -> None:
    async with started(echo, model=MODEL) as api, conversing(api) as client:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"tools": [{**ADD, "name": "a b"}]}, "session.tools[0].name"),
            ({"tools": [ADD, ADD]}, "session.tools[1].name"),
            ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "session.tool_choice"),
            ({"tools": [{**ADD, "parameters": {"type": "array"}}]}, "session.tools[0].parameters"),
        ]
        for session, param in cases:
            error = await client.refused("session.update", session=session)
            assert error["param"] == param, error
    async with started(echo, model=SPEC) as api, conversing(api) as client:
        assert (await client.refused("session.update", session={"tools": [ADD]}))["code"] == "unsupported_parameter"
