"""Conversations beyond the context: items that leave, and the cached share of later prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mstar_core.api.realtime.history import PromptSizes, shortened
from mstar_core.api.realtime.items import Entry, MessageEntry, WrittenPart
from mstar_core.api.realtime.settings import Truncation
from mstar_core.messages.requests import NewRequest, RequestFinished
from tests.api.conftest import Started
from tests.api.realtime.client import conversing
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import SPEC
from tests.fakes.short_context import LONG_ROOM

TURNS = 80


class Cache:
    """Script: a short answer, and as many cached ids as the prompt shares with the one before."""

    def __init__(self) -> None:
        self.last = ""

    def __call__(self, fake: FakeDeployment, request: NewRequest) -> None:
        prompt = fake.prompt(request)
        pairs = enumerate(zip(prompt, self.last, strict=False))
        shared = min(len(prompt), len(self.last))
        cached, self.last = next((place for place, (new, old) in pairs if new != old), shared), prompt
        fake.text(request.handle, b"ok")
        done = RequestFinished(handle=request.handle, reason="stop", emitted={"worker-0": 1}, cached_tokens=cached)
        fake.tell(done, sender="conductor")


@pytest.mark.parametrize(
    ("rule", "least", "most"),
    [
        ("auto", 0.6, 1.0),
        ({"type": "retention_ratio", "retention_ratio": 0.5}, 0.75, 1.0),
        ({"type": "retention_ratio", "retention_ratio": 1.0}, 0.0, 0.2),
    ],
)
async def test_a_full_conversation_keeps_most_of_its_prefix(
    rule: object, least: float, most: float, started: Started
) -> None:
    model = replace(SPEC, processor="tests.fakes.short_context:LongProcessor")
    async with started(Cache(), model=model) as api, conversing(api) as client:
        await client.send("session.update", session={"truncation": rule})
        await client.until("session.updated")
        read: list[tuple[int, int]] = []
        for number in range(TURNS):
            await client.say(f"{number % 10}")
            usage = (await client.respond(output_modalities=["text"]))["usage"]
            read.append((usage["input_tokens"], usage["input_token_details"]["cached_tokens"]))
        after = read[next(place for place, (tokens, _) in enumerate(read) if tokens < read[place - 1][0]) :]
        assert len(after) > TURNS // 2 and max(tokens for tokens, _ in read) <= LONG_ROOM
        share = sum(cached for _, cached in after) / sum(tokens for tokens, _ in after)
        assert least < share < most


def turns(count: int) -> list[Entry]:
    return [MessageEntry(id=f"{role}{n}", role=role, parts=[WrittenPart("x")]) for n in range(count) for role in ROLES]


ROLES = ("user", "assistant")


def measured(entries: Sequence[Entry], tokens: Sequence[int]) -> PromptSizes:
    """Return sizes after prompts that ended with the message of each turn. tokens: of the prompts."""
    sizes = PromptSizes()
    for number, count in enumerate(tokens):
        sizes.note(entries[: 2 * number + 1], count)
    return sizes


def test_a_long_turn_counts_by_its_tokens() -> None:
    entries = turns(6)
    sizes = measured(entries, [100, 200, 300, 1300, 1400, 1500])  # between the third and the fourth message: 1,000
    kept = shortened(entries, Truncation(keeps=0.4), sizes)
    assert kept is not None and kept[0].id == "user4"
    kept = shortened(entries, Truncation(keeps=0.95), sizes)
    assert kept is not None and kept[0].id == "user1"


def test_an_answer_counts_by_what_was_written() -> None:
    entries, sizes = turns(4), PromptSizes()
    for number, (prompt, answer) in enumerate([(100, 900), (1010, 10), (1030, 10), (1050, 0)]):
        sizes.note(entries[: 2 * number + 1], prompt)
        sizes.answered(entries[2 * number + 1 : 2 * number + 2], answer)
    assert sizes.of(entries)[1:6] == [900, 10, 10, 10, 10]
    kept = shortened(entries, Truncation(keeps=0.5), sizes)
    assert kept is not None and kept[0].id == "user1"


def test_messages_of_the_system_and_the_last_turn_stay() -> None:
    head = MessageEntry(id="rules", role="system", parts=[WrittenPart("x")])
    kept = shortened([head, *turns(3)], Truncation(keeps=0.0), PromptSizes())
    assert kept is not None and [entry.id for entry in kept] == ["rules", "user2", "assistant2"]
    assert shortened([head, *turns(1)], Truncation(), PromptSizes()) is None
    assert shortened(turns(3), Truncation(is_off=True), PromptSizes()) is None


async def test_a_limit_of_tokens_shortens_before_the_context_is_full(started: Started) -> None:
    async with started(Cache(), model=SPEC) as api, conversing(api) as client:
        limits = {"post_instructions": 60}
        rule = {"type": "retention_ratio", "retention_ratio": 0.8, "token_limits": limits}
        await client.send("session.update", session={"truncation": rule})
        await client.until("session.updated")
        for number in range(12):
            await client.say(f"{number % 10}")
            usage = (await client.respond(output_modalities=["text"]))["usage"]
        assert 30 < usage["input_tokens"] < 100
        refused = await client.refused(
            "session.update", session={"truncation": {**rule, "token_limits": {"post_instructions": 0}}}
        )
        assert refused["param"] == "session.truncation.token_limits.post_instructions"
