"""Log-probabilities of responses: the tokens of the text alone, whole and in events, however the ids arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mstar_core.api.group import GroupPart
from mstar_core.api.responses.answer import ResponseAnswer
from mstar_core.api.responses.schema import MessageItem, OutputText, ResponseEvent, ResponseObject, TokenOption
from mstar_core.api.service import Completion
from mstar_core.api.text.answers import AnswerReader
from mstar_core.api.text.content_scores import ContentScores
from mstar_core.plugin.chat.parser import AnswerParser
from mstar_core.plugin.chat.parts import CallArguments, Content, Part
from tests.api.test_chat_tools import ANSWER, HERMES
from tests.api.test_token_scores import encoded

TEXTS = {
    "calls": (ANSWER, "Let me see."),
    "thought": ("<think>\nHm. Hi\n</think>\n\n Hi é <tool_call there", "Hi é <tool_call there"),
    "plain": ("Hi <think>", "Hi <think>"),
    "none": ("<think>a</think>", ""),
}


async def answered(
    text: str, together: int, *, has_logprobs: bool = True
) -> tuple[ResponseObject, list[ResponseEvent]]:
    """Return a response of a text and its events, `together` ids at a time."""
    answer = ResponseAnswer(ResponseObject(id="resp_1", created_at=0, model="m"), has_logprobs=has_logprobs)
    reader = AnswerReader(AnswerParser(HERMES, tools=("add", "now")), "key")
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "total_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    events: list[ResponseEvent] = []
    for chunk in await encoded(text.encode(), together=together):
        events += answer.of(reader, GroupPart(index=0, chunks=[chunk]))
    done: Any = Completion(finish_reason="stop", usage=usage, warnings=(), times_ms={})
    return answer.response, events + answer.of(reader, GroupPart(index=0, done=done))


def texts(response: ResponseObject) -> list[OutputText]:
    messages = [item for item in response.output if isinstance(item, MessageItem)]
    return [part for item in messages for part in item.content if isinstance(part, OutputText)]


@pytest.mark.parametrize("together", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", TEXTS)
async def test_the_tokens_of_the_text_are_listed_and_no_others(name: str, together: int) -> None:
    text, content = TEXTS[name]
    response, events = await answered(text, together)
    (part,) = texts(response)
    assert part.text.rstrip() == content
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == part.text
    first = text.encode().rindex(content.encode()) if content else 0
    assert [entry.logprob for entry in part.logprobs] == [-float(first + at) for at in range(len(part.text.encode()))]
    assert all(entry.top_logprobs[-1] == TokenOption(token="A", bytes=[65], logprob=-1.5) for entry in part.logprobs)
    sent = [event for event in events if event.type == "response.output_text.delta"]
    for event in sent:
        assert isinstance(event.logprobs, list) and isinstance(event.delta, str)
        assert bytes(byte for entry in event.logprobs for byte in entry.bytes).decode() == event.delta
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert done.logprobs == part.logprobs == [entry for event in sent for entry in (event.logprobs or [])]


async def test_without_the_option_nothing_is_listed() -> None:
    response, events = await answered(ANSWER, 1, has_logprobs=False)
    assert [part.logprobs for part in texts(response)] == [[]]
    assert all(event.logprobs == [] for event in events if event.type.startswith("response.output_text."))


async def test_arguments_that_the_parser_has_rewritten_lose_no_text_behind_them() -> None:
    scores = ContentScores()
    for chunk in await encoded(b'{"a": 1} so', together=100):
        scores.add(chunk)
    parts: list[Part] = [CallArguments(0, json.dumps({"b": 1})), Content("so")]
    assert [[score.token.data for score in scores.of(part)] for part in parts] == [[], [b"s", b"o"]]
