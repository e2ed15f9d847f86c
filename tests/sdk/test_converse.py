"""Conversations of the client: functions that an answer calls, their results, thinking, and answers cut off."""

from __future__ import annotations

import pytest

from mstar_core.client import BadRequestError, ChatResult, ClientError, FunctionCall, MStarClient
from mstar_core.messages.requests import NewRequest
from tests.api.conftest import running
from tests.api.test_chat_tools import MODEL
from tests.fakes.conductor import FakeDeployment, say
from tests.sdk.conftest import in_thread

CALL = '<think>A tool.</think><tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>'
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}


def calls_once(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: a call; behind its result, the prompt."""
    prompt = fake.prompt(request)
    fake.text(request.handle, (f"All: {prompt}" if "<tool>" in prompt else CALL).encode())
    fake.finish(request.handle)


async def test_a_conversation_goes_on_with_results_of_calls() -> None:
    def talk(client: MStarClient) -> tuple[list[ChatResult], list[FunctionCall]]:
        messages = [{"role": "user", "content": "1 + 1?"}]
        answers, calls = [client.converse(messages, tools=[ADD], temperature=0)], list[FunctionCall]()
        while answers[-1].tool_calls:
            messages.append(dict(answers[-1].message))
            for call in answers[-1].tool_calls:
                calls.append(call)
                messages.append(call.result(str(call.values["a"] + 1)))
            answers.append(client.converse(messages, tools=[{"type": "function", "function": ADD}]))
        return answers, calls

    async with running(calls_once, model=MODEL) as api:
        (first, last), (call,) = await in_thread(talk, api.url)
    assert (first.content, first.reasoning, first.finish_reason) == ("", "A tool.", "tool_calls")
    assert (call.name, call.values) == ("add", {"a": 1, "b": "é"})
    assert last.content == (
        f"All: [tools add auto]<user>1 + 1?<assistant>(A tool.)[add {call.id} {call.arguments}]"
        f"<tool>[add {call.id}]2<assistant>"
    )
    assert last.usage is not None and last.finish_reason == "stop"


async def test_what_a_model_lacks_is_an_error_with_its_field() -> None:
    def refused(client: MStarClient) -> ClientError:
        with pytest.raises(BadRequestError) as error:
            client.converse([{"role": "user", "content": "hi"}], tools=[{**ADD, "name": "a b"}])
        return error.value

    async with running(say(b"hi"), model=MODEL) as api:
        error = await in_thread(refused, api.url)
        (card,) = await in_thread(lambda client: client.models(), api.url)
    assert (error.param, card.capabilities) == ("tools[0].function.name", ["tools", "reasoning", "reasoning_effort"])


def test_arguments_that_are_cut_off_are_an_error() -> None:
    with pytest.raises(ClientError, match="the call is not complete"):
        _ = FunctionCall("c1", "add", '{"a": ').values
