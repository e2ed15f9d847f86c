"""The trained miniature `llm:mini`: right answers to unseen questions over HTTP, and a broken part is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import pytest
import torch

from mstar_core.conformance.fake_api import SampleRequest
from mstar_core.conformance.runtime import LocalRuntime
from mstar_core.layers import Attention, RMSNorm, Rotary
from mstar_llm.checkpoint.config import read_config
from mstar_llm.checkpoint.shipped import FOLDER
from mstar_llm.plugin import bind, llm
from tests.runtime.deployment import Deployment

from .test_served import LLM
from .test_train import train

judge, world = train("judge"), train("world")
QUESTIONS: Final = 40
TOGETHER: Final = 16
LEAST: Final = 0.9
"""Share of few questions that the intact miniature answers right, and a broken one does not."""

LIMIT_S: Final = 120


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Deployment(served=LLM, name="mini", weights_source="mini") as running:
        yield running.url


@pytest.fixture(scope="module")
def asked() -> list[Any]:
    made: list[Any] = judge.with_schemas(world.conversations(2, 0, QUESTIONS, held_out=True))
    assert {each.kind for each in made} == {"fact", "call", "told", "json", "schema"}
    return made


def test_unseen_questions_of_each_kind_are_answered_together(url: str, asked: list[Any]) -> None:
    found = judge.figures(asked, judge.over_http(url), TOGETHER)
    assert min(found[kind] for kind in ("fact", "call", "told", "json", "schema")) >= LEAST, found


def test_an_agent_calls_one_tool_of_two_and_answers_with_its_result(url: str) -> None:
    tools = [world.schema(kind, kind.names[0]) for kind in world.TOOLS[:2]]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    body = {"model": "llm", "tools": tools, "temperature": 0}
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        first = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()["choices"][0]
        (call,) = first["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "get_weather",
            {"city": "Oslo"},
        )
        result = {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"result": "foggy"})}
        messages += [first["message"], result]
        second = client.post("/v1/chat/completions", json={**body, "messages": messages}).json()["choices"][0]
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert second["message"]["content"] == "The weather in Oslo is foggy."


# -- in one process ----------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
FEW: Final = 12
LONGEST: Final = 48
"""Most ids of an answer, after which a broken model that does not stop is cut."""


def plain_questions() -> list[Any]:
    """Return unseen questions of one message without tools, which need no more than a text."""
    made = world.conversations(2, 0, 100, held_out=True)
    return [each for each in made if len(each.messages) == 1 and not each.tools][:FEW]


def right() -> float:
    """Return the share of questions that the plugin's own modules answer right, all in one batch."""
    questions = plain_questions()
    runtime = LocalRuntime(bind(llm(read_config(FOLDER)), FOLDER, {}), FOLDER)
    greedy = {"temperature": 0.0, "max_output_tokens": LONGEST}
    outcomes = runtime.ask(
        *(SampleRequest(text=each.messages[0]["content"], params=greedy, outputs=("text",)) for each in questions)
    )
    texts = [outcome.outputs["text"].decode(errors="replace") for outcome in outcomes]
    return sum(map(judge.is_right, questions, texts)) / FEW


def test_questions_are_answered_in_one_process() -> None:
    assert right() >= LEAST


def positions_that_stand_still(patch: Patch) -> None:
    true = Rotary.forward
    patch.setattr(Rotary, "forward", lambda self, positions: true(self, torch.zeros_like(positions)))


def heads_without_norms(patch: Patch) -> None:
    true = Attention.__init__

    def build(self: Any, *given: Any, **named: Any) -> None:
        true(self, *given, **named)
        for norm in (self.q_norm, self.k_norm):
            norm.forward = lambda x: x

    patch.setattr(Attention, "__init__", build)


def norms_whose_weights_are_off_by_one(patch: Patch) -> None:
    """Weights are those of Gemma, which stores them less one."""
    true = RMSNorm.forward
    patch.setattr(RMSNorm, "forward", lambda self, x: true(self, x) + true(self, x) / self.weight)


@pytest.mark.parametrize(
    "broken", [positions_that_stand_still, heads_without_norms, norms_whose_weights_are_off_by_one]
)
def test_a_broken_part_is_noticed(broken: Callable[[Patch], None], monkeypatch: Patch) -> None:
    broken(monkeypatch)
    assert right() < LEAST
