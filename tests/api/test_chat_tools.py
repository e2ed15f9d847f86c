"""Tools and thinking of POST /v1/chat/completions: requests, turns, answers, streams, and the OpenAI client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest

from mstar_core.graph import Sampling
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin import TextSampling, param
from mstar_core.plugin.chat.format import ChatFormat, Effort, ReasoningFormat, ToolFormat
from tests.api.conftest import Started, running
from tests.api.test_chat import HI, PATH, events
from tests.fakes.conductor import FakeDeployment, echo, say
from tests.fakes.omni_model import LM, SPEC, TEXT_ONLY

EFFORTS: dict[Effort, dict[str, Any]] = {"none": {"thinks": False}, "high": {"thinks": True}}
HERMES = ChatFormat(
    tools=ToolFormat(begin="<tool_call>", end="</tool_call>"), reasoning=ReasoningFormat(efforts=EFFORTS)
)
MODEL = replace(TEXT_ONLY, chat=HERMES)
OPEN = replace(MODEL, chat=replace(HERMES, reasoning=ReasoningFormat(begins_open=True, efforts=EFFORTS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParams(TextSampling):
    max_output_tokens: int = param(64, "ids", ge=1, openai="max_tokens")
    ignore_eos: bool = param(False, "go on to the limit")
    seed: int | None = param(None, "seed", ge=0, openai="seed")


HELD = replace(MODEL, params=HeldParams, nodes=(replace(LM, sampling=Sampling(port="token", is_text=True)),))

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {**HI, "tools": [ADD, NOW]}
ANSWER = (
    "<think>\nA sum.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 1.0, "b": "é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CALLS = [("add", '{"a": 1.0, "b": "é"}'), ("now", "{}")]


def by_byte(text: str) -> Any:
    """Script: a text, one id per output."""
    return say(*(bytes([byte]) for byte in text.encode()))


def called(calls: Sequence[Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


async def test_a_whole_answer_has_content_thinking_and_calls_apart(started: Started) -> None:
    async with started(by_byte(ANSWER), model=MODEL) as api:
        answer = (await api.client.post(PATH, json=ASK)).json()
        (choice,) = answer["choices"]
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == ("Let me see.", "A sum.")
        assert called(message["tool_calls"]) == CALLS
        assert choice["finish_reason"] == "tool_calls"
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2 and all(len(call) == 9 and call.isalnum() for call in ids)
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len(">\nA sum.\n</think>")
        assert answer["usage"]["completion_tokens"] == len(ANSWER.encode())
        await api.clean()


async def test_a_stream_sends_the_same_in_deltas(started: Started) -> None:
    async with started(by_byte(ANSWER), model=MODEL) as api:
        body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, done = events(await api.client.post(PATH, json=body))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "A sum."
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        firsts = [call for call in calls if "id" in call]
        assert [(call["index"], call["type"], call["function"]) for call in firsts] == [
            (0, "function", {"name": "add", "arguments": ""}),
            (1, "function", {"name": "now", "arguments": ""}),
        ]
        for index, (_, arguments) in enumerate(CALLS):
            assert "".join(c["function"]["arguments"] for c in calls if c["index"] == index) == arguments
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert (last["usage"]["completion_tokens_details"]["reasoning_tokens"], done) == (17, "[DONE]")


async def test_the_openai_client_gathers_a_stream_as_the_whole_answer(started: Started) -> None:
    async with started(by_byte(ANSWER), model=MODEL) as api:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0) as client:
            call: dict[str, Any] = {"model": "fake", "messages": HI["messages"], "tools": [ADD, NOW]}
            whole = (await client.chat.completions.create(**call)).choices[0].message
            async with client.chat.completions.stream(**call) as stream:
                kinds = [event.type async for event in stream]
                gathered = (await stream.get_final_completion()).choices[0]
        assert whole.tool_calls is not None and gathered.message.tool_calls is not None
        assert [(c.function.name, c.function.arguments) for c in gathered.message.tool_calls] == CALLS
        assert [c.function.name for c in whole.tool_calls] == ["add", "now"]
        assert (gathered.message.content, gathered.finish_reason) == (whole.content, "tool_calls")
        assert kinds.count("tool_calls.function.arguments.done") == 2


async def test_several_answers_have_ids_of_calls_of_their_own(started: Started) -> None:
    async with started(by_byte(ANSWER), model=MODEL) as api:
        answer = (await api.client.post(PATH, json={**ASK, "n": 2})).json()
        ids = {call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]}
        assert len(ids) == 4


async def test_an_answer_without_tools_is_not_searched_for_calls(started: Started) -> None:
    async with started(by_byte(ANSWER), model=MODEL) as api:
        for body in (HI, {**ASK, "tool_choice": "none"}, {**HI, "tools": []}):
            (choice,) = (await api.client.post(PATH, json=body)).json()["choices"]
            assert choice["message"]["content"] == ANSWER.partition("</think>")[2].strip()
            assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


async def test_without_parallel_calls_only_the_first_is_given(started: Started) -> None:
    async with started(by_byte(ANSWER), model=MODEL) as api:
        (choice,) = (await api.client.post(PATH, json={**ASK, "parallel_tool_calls": False})).json()["choices"]
        assert called(choice["message"]["tool_calls"]) == CALLS[:1]


async def test_a_call_that_the_limit_cuts_is_content(started: Started) -> None:
    def script(fake: FakeDeployment, request: Any) -> None:
        fake.text(request.handle, b'<tool_call>{"name": "add", "arguments": {"a"')
        fake.finish(request.handle, "length")

    async with started(script, model=MODEL) as api:
        (choice,) = (await api.client.post(PATH, json=ASK)).json()["choices"]
        assert choice["message"]["content"] == '<tool_call>{"name": "add", "arguments": {"a"'
        assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


async def test_stop_strings_work_beside_tools(started: Started) -> None:
    async with started(by_byte(ANSWER), model=MODEL) as api:
        (choice,) = (await api.client.post(PATH, json={**ASK, "stop": "<tool_call>"})).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.\n", "stop")


async def test_tools_turns_and_thinking_reach_the_template(started: Started) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    other = {"id": "c2", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]},
    ]
    async with started(echo, model=MODEL) as api:
        body = {"messages": messages, "tools": [ADD, NOW], "reasoning_effort": "high"}
        answer = await api.client.post(PATH, json=body)
        assert answer.json()["choices"][0]["message"]["content"] == (
            "[tools add now auto][thinks True]"
            '<user>1?<assistant>(Hm.)[add c1 {"a": 1}][now c2 {}]<tool>[now c2]noon<tool>[add c1]2<assistant>'
        )
        # A name of the conversation need not be one of today's tools, and no tools are needed to go on.
        assert (await api.client.post(PATH, json={"messages": messages})).status_code == 200


@pytest.mark.parametrize(
    ("effort", "text", "thought", "content"),
    [
        (None, "Hm.</think>Hi", "Hm.", "Hi"),
        ("high", "Hm.</think>Hi", "Hm.", "Hi"),
        ("none", "Hi", None, "Hi"),
        (None, "Hm.", "Hm.", ""),
    ],
)
async def test_thinking_that_the_prompt_begins(
    started: Started, effort: str | None, text: str, thought: str | None, content: str
) -> None:
    async with started(by_byte(text), model=OPEN) as api:
        (choice,) = (await api.client.post(PATH, json={**HI, "reasoning_effort": effort})).json()["choices"]
        assert (choice["message"].get("reasoning_content"), choice["message"]["content"]) == (thought, content)


def tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **changes}}


def talk(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, *messages], "tools": [ADD]}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


def a_call(call_id: str = "c1", **function: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": "{}", **function}}


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "1"}
NAMED = {"type": "function", "function": {"name": "sub"}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**HI, "tool_choice": "required"}, "tool_choice"),
    ({**HI, "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({**HI, "tools": [], "tool_choice": "required"}, "tool_choice"),
    ({**ASK, "tool_choice": NAMED}, "tool_choice"),
    ({**ASK, "tool_choice": "any"}, "tool_choice"),
    ({**HI, "tools": {}}, "tools"),
    ({**HI, "tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({**HI, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({**HI, "tools": [ADD, tool(name="a b")]}, "tools[1].function.name"),
    ({**HI, "tools": [tool(name="")]}, "tools[0].function.name"),
    ({**HI, "tools": [tool(name="é")]}, "tools[0].function.name"),
    ({**HI, "tools": [tool(name="a" * 65)]}, "tools[0].function.name"),
    ({**HI, "tools": [tool(name="add\n")]}, "tools[0].function.name"),
    ({**HI, "tools": [ADD, NOW, ADD]}, "tools[2].function.name"),
    ({**HI, "tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
    ({**HI, "tools": [tool(parameters={"properties": {}})]}, "tools[0].function.parameters"),
    ({**HI, "tools": [tool(parameters=["a"])]}, "tools[0].function.parameters"),
    ({**HI, "tools": [tool(name=f"t{number}") for number in range(129)]}, "tools"),
    ({**HI, "tools": [tool(strict=True)]}, "tools[0].function.strict"),
    (talk(RESULT), "messages[1].tool_call_id"),
    (talk(calling(a_call()), {**RESULT, "tool_call_id": "c2"}), "messages[2].tool_call_id"),
    (talk(calling(a_call()), {"role": "tool", "content": "1"}), "messages[2].tool_call_id"),
    (talk(calling(a_call()), {"role": "tool", "tool_call_id": "c1"}), "messages[2].content"),
    (talk(calling(a_call()), RESULT, RESULT), "messages[3].tool_call_id"),
    (talk(calling(a_call())), "messages[1].tool_calls[0]"),
    (talk(calling(a_call(), a_call("c2")), RESULT), "messages[1].tool_calls[1]"),
    (talk(calling(a_call()), {"role": "user", "content": "and?"}, RESULT), "messages[1].tool_calls[0]"),
    (talk(calling(a_call(), a_call()), RESULT), "messages[1].tool_calls[1].id"),
    (talk(calling(a_call("")), RESULT), "messages[1].tool_calls[0].id"),
    (talk(calling(a_call(name="a b")), RESULT), "messages[1].tool_calls[0].function.name"),
    (talk(calling(a_call(arguments="[1]")), RESULT), "messages[1].tool_calls[0].function.arguments"),
    (talk(calling(a_call(arguments='{"a": ')), RESULT), "messages[1].tool_calls[0].function.arguments"),
    (talk({**calling(a_call()), "role": "user"}, RESULT), "messages[1].tool_calls"),
    (talk({"role": "user", "content": "a", "tool_call_id": "c1"}), "messages[1].tool_call_id"),
    (talk(calling(a_call()), {**RESULT, "tool_calls": [a_call()]}), "messages[2].tool_calls"),
    ({**HI, "reasoning_effort": "low"}, "reasoning_effort"),
    ({**HI, "reasoning_effort": "much"}, "reasoning_effort"),
    ({**ASK, "tool_choice": "required"}, "tool_choice"),
]


@pytest.fixture(scope="module")
def refusals() -> dict[str, Any]:
    """Return the errors of all requests of REFUSED, by body, from one api."""

    async def ask() -> dict[str, Any]:
        async with running(echo, model=MODEL) as api:
            answers = {json.dumps(body): await api.client.post(PATH, json=body) for body, _ in REFUSED}
            assert not api.fake.requests
            return {body: (answer.status_code, answer.json().get("error")) for body, answer in answers.items()}

    return asyncio.run(ask())


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=[f"{n}-{field}" for n, (_, field) in enumerate(REFUSED)])
def test_an_invalid_request_is_refused_with_its_field(
    refusals: dict[str, Any], body: dict[str, Any], field: str
) -> None:
    status, error = refusals[json.dumps(body)]
    assert (status, error["param"]) == (400, field), error


async def test_a_model_names_the_capability_that_it_lacks(started: Started) -> None:
    async with started(echo, model=TEXT_ONLY) as api:
        for body, field, capability in (
            (ASK, "tools", "tools"),
            (talk(calling(a_call()), RESULT) | {"tools": []}, "messages[1].tool_calls", "tools"),
            ({**HI, "reasoning_effort": "high"}, "reasoning_effort", "reasoning"),
        ):
            answer = await api.client.post(PATH, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter")
            assert f"the capability {capability}" in error["message"]
        assert (await api.client.post(PATH, json={**HI, "reasoning_effort": "none"})).status_code == 200
        assert (await api.client.get("/v1/models/fake")).json()["capabilities"] == []
    async with started(echo, model=MODEL) as api:
        (card,) = (await api.client.get("/v1/models")).json()["data"]
        assert card["capabilities"] == ["tools", "reasoning", "reasoning_effort"]


async def test_a_required_call_is_held_by_a_grammar_and_streams(started: Started) -> None:
    def script(fake: FakeDeployment, request: NewRequest) -> None:
        for piece in ('<tool_call>{"name": "add", "arguments": {"a"', ": 1", "}}</tool_call>"):
            fake.text(request.handle, piece.encode())
        fake.finish(request.handle)

    async with started(script, model=HELD) as api:
        named = {"type": "function", "function": {"name": "add"}}
        strict = tool(strict=True, parameters={"type": "object", "properties": {"a": {"type": "integer"}}})
        for body in ({**ASK, "tool_choice": "required"}, {**ASK, "tool_choice": named}, {**HI, "tools": [strict]}):
            got = events(await api.client.post(PATH, json={**body, "stream": True}))
            deltas = [event["choices"][0]["delta"] for event in got if event != "[DONE]"]
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert [call["function"]["arguments"] for call in calls] == ["", *'{"a": 1}']
            assert '"add\\"' in api.fake.requests[-1].params["constraint"]
            assert deltas[0]["role"] == "assistant" and got[-2]["choices"][0]["finish_reason"] == "tool_calls"
        for body in (ASK, HI, {**ASK, "tool_choice": "none"}):
            await api.client.post(PATH, json=body)
            assert api.fake.requests[-1].params["constraint"] is None
        assert "structured_outputs" in (await api.client.get("/v1/models/fake")).json()["capabilities"]


async def test_a_schema_that_no_grammar_holds_is_refused_at_once(started: Started) -> None:
    odd = {"type": "object", "properties": {}, "dependentRequired": {"a": ["b"]}}
    async with started(echo, model=HELD) as api:
        for body, field in (
            ({**HI, "tools": [ADD, tool(name="odd", strict=True, parameters=odd)]}, "tools[1].function.parameters"),
            ({**ASK, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ):
            answer = await api.client.post(PATH, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
        loose = {**HI, "tools": [tool(parameters=odd)], "tool_choice": "required"}
        assert (await api.client.post(PATH, json=loose)).status_code == 200


async def test_tools_are_refused_beside_sound(started: Started) -> None:
    async with started(echo, model=replace(SPEC, chat=HERMES)) as api:
        answer = await api.client.post(PATH, json={**ASK, "modalities": ["text", "audio"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert "audio" in answer.json()["error"]["message"]


async def test_tools_and_calls_count_to_the_limit_of_text(started: Started) -> None:
    large = tool(parameters={"type": "object", "description": "x" * 300})
    async with started(echo, model=MODEL, max_text_bytes=300) as api:
        for body, field in (
            ({**HI, "tools": [large]}, "tools"),
            (talk(calling(a_call(arguments=json.dumps({"a": "x" * 300}))), RESULT), "messages"),
        ):
            answer = await api.client.post(PATH, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (413, field)
