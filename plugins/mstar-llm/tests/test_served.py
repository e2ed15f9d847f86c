"""`llm:tiny` over HTTP: calls that must come obey their schemas, although the model's text is noise."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from bench.families.schemas import proof_schemas
from bench.schema_proof import prove_all
from mstar_core.config.resolved import KVCacheConfig
from tests.runtime.deployment import Deployment, Served, until

LLM = Served(
    model="llm", plugin="llm", nodes=("LLM",), settings={"max_seq_len": 2048, "kv_cache": KVCacheConfig(pages=1024)}
)
CHAT: Final = "/v1/chat/completions"
SEEDS: Final = range(3)
LIMIT_S: Final = 120
PAGE: Final = 16
"""Tokens of a cache page, the default."""


def tool(name: str, *, strict: bool = True, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": parameters}}


ADD = tool("add", a={"type": "integer", "minimum": 0, "maximum": 99}, b={"enum": [1, 2.5, "three", None]})
PAINT = tool(
    "paint",
    strict=False,
    color={"enum": ["red", "green"]},
    sides={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
)
TOOLS = [ADD, PAINT]
ASK: Final[dict[str, Any]] = {
    "model": "llm",
    "messages": [{"role": "user", "content": "How much is one and two?"}],
    "tools": TOOLS,
    "reasoning_effort": "none",
    "temperature": 1.0,
    "max_tokens": 400,
}


def obeys(call: dict[str, Any]) -> bool:
    """Return whether the arguments of a call obey its tool's schema."""
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "add":
        return (
            arguments.keys() == {"a", "b"}
            and isinstance(arguments["a"], int)
            and 0 <= arguments["a"] <= 99
            and arguments["b"] in (1, 2.5, "three", None)
        )
    sides = arguments["sides"]
    return (
        call["function"]["name"] == "paint"
        and arguments.keys() == {"color", "sides"}
        and arguments["color"] in ("red", "green")
        and 1 <= len(sides) <= 3
        and all(isinstance(side, bool) for side in sides)
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Deployment]:
    with Deployment(served=LLM) as running:
        yield running
        running.assert_clean()


@pytest.fixture(scope="module")
def client(server: Deployment) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
        yield client


def answered(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    """Return the choice of one answer."""
    response = client.post(CHAT, json={**ASK, **changes})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_the_model_offers_structured_outputs(client: httpx.Client) -> None:
    (card,) = client.get("/v1/models").json()["data"]
    assert "structured_outputs" in card["capabilities"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_that_must_come_comes_and_obeys_its_schema(client: httpx.Client, seed: int) -> None:
    choice = answered(client, tool_choice="required", parallel_tool_calls=False, seed=seed)
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = choice["message"]["tool_calls"]
    assert obeys(call), call
    for name in ("add", "paint"):
        named = {"type": "function", "function": {"name": name}}
        choice = answered(client, tool_choice=named, seed=seed)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == name and obeys(call), call


def test_every_call_of_several_obeys_its_schema(client: httpx.Client) -> None:
    for seed in SEEDS:
        choice = answered(client, tool_choice="required", seed=seed, max_tokens=600)
        if choice["finish_reason"] == "tool_calls":
            assert choice["message"]["tool_calls"] and all(map(obeys, choice["message"]["tool_calls"]))


def test_an_answer_that_may_call_a_strict_tool_is_text_or_calls_that_obey(client: httpx.Client) -> None:
    for seed in SEEDS:
        choice = answered(client, tools=[ADD], seed=seed, max_tokens=120)
        calls = choice["message"].get("tool_calls") or []
        assert choice["finish_reason"] == "length" or calls or choice["message"]["content"] is not None
        assert choice["finish_reason"] == "length" or all(map(obeys, calls))


def test_a_streamed_call_equals_the_whole_one(client: httpx.Client) -> None:
    changes: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 7}
    (call,) = answered(client, **changes)["message"]["tool_calls"]
    with client.stream("POST", CHAT, json={**ASK, **changes, "stream": True}) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    deltas = [json.loads(each)["choices"][0]["delta"] for each in data]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part["function"].get("arguments", "") for part in parts) == call["function"]["arguments"]


def test_constrained_and_plain_answers_in_one_batch_are_those_of_each_alone(client: httpx.Client) -> None:
    bodies: list[dict[str, Any]] = [
        {"tool_choice": "required", "parallel_tool_calls": False, "seed": 1},
        {"tool_choice": "none", "seed": 2, "max_tokens": 60},
        {"tool_choice": {"type": "function", "function": {"name": "paint"}}, "seed": 3},
        {"tool_choice": "none", "seed": 4, "max_tokens": 60, "frequency_penalty": 0.5},
    ]
    alone = [_told(answered(client, **body)) for body in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: _told(answered(client, **body)), bodies))
    assert together == alone


def leased(client: httpx.Client) -> float:
    """Return the pages that sessions lease."""
    (line,) = [each for each in client.get("/metrics").text.splitlines() if 'node="LLM",state="leased"' in each]
    return float(line.split()[-1])


def _told(choice: dict[str, Any]) -> list[Any]:
    """Return what an answer says, without the ids of its calls."""
    calls = choice["message"].get("tool_calls") or []
    return [choice["finish_reason"], choice["message"]["content"], [call["function"] for call in calls]]


def test_the_next_turn_of_a_session_reads_only_what_is_new(server: Deployment, client: httpx.Client) -> None:
    """The miniature's noise is tokenized otherwise than it was generated, so its ids must come from the session."""
    messages, known, cached, session = list[dict[str, Any]](), 0, list[int](), {"session_id": "talk"}
    for turn, question in enumerate(("How much is one and two?", "And three?", "Are you sure about it?")):
        messages.append({"role": "user", "content": question})
        body = {**ASK, "tools": None, "messages": messages, "max_tokens": 40, "seed": turn, "ignore_eos": True}
        plain = client.post(CHAT, json=body).json()
        answer = client.post(CHAT, json={**body, **session}).json()
        usage = answer["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached[-1] >= known // PAGE * PAGE
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        if not turn:
            assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert cached[2] > cached[1] > 0
    until(lambda: leased(client) >= known // PAGE, "a lease is reported")
    assert client.delete("/v1/sessions/talk").status_code == 200
    until(lambda: leased(client) == 0, "the lease ends with its session")


def test_an_answer_goes_on_after_its_worker_has_died(server: Deployment, client: httpx.Client) -> None:
    """The new worker's matcher takes the ids that the client has, and masks the rest."""
    text = {"type": "string", "pattern": "^[a-z]{60,80}$"}
    changes: dict[str, Any] = {"tools": [tool("say", text=text)], "tool_choice": "required", "seed": 9}
    changes["parallel_tool_calls"] = False
    (wanted,) = answered(client, **changes)["message"]["tool_calls"]
    restarts, parts = server.admin("/v1")["restarts"], list[str]()
    with client.stream("POST", CHAT, json={**ASK, **changes, "stream": True}) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            for call in json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("tool_calls", ()):
                parts.append(call["function"].get("arguments", ""))
                if len(parts) == 4:
                    server.kill(server.pids()["worker-0"])
    assert "".join(parts) == wanted["function"]["arguments"]
    server.wait_again_ready(restarts + 1)


def test_answers_that_end_obey_their_schemas(server: Deployment) -> None:
    """A sample of `bench/schema_proof.py`, which asks for all with more seeds."""
    schemas = proof_schemas()
    sample = dict(random.Random(1).sample(sorted(schemas.items()), 30))
    made = prove_all(server.url, sample, seeds=(0,))
    assert [each for each in made if each.outcome in ("refused", "fault")] == []
    assert sum(each.outcome == "obeys" for each in made) >= 25, "most end within the limit"
