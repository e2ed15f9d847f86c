"""POST /tokenize and /detokenize: prompts, messages, tokens around a text, texts of tokens, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Started
from tests.fakes.token_model import BEGIN, SPEC, serve

HI = [104, 105]


async def test_a_prompt_has_the_ids_that_a_completion_reads(started: Started) -> None:
    async with started(serve, model=SPEC, max_seq_len=100) as api:
        answer = await api.client.post("/tokenize", json={"model": "fake", "prompt": "hi"})
        assert answer.json() == {"count": 3, "max_model_len": 100, "tokens": [BEGIN, *HI], "token_strs": None}
        bare = await api.client.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False})
        assert bare.json()["tokens"] == HI
        assert api.fake.requests == []


async def test_tokens_come_with_their_text(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        answer = await api.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})
        assert answer.json()["token_strs"] == ["<s>", "h", "\ufffd", "\ufffd"]


async def test_messages_are_formatted_by_the_template(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        body = {"messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}]}
        ids = (await api.client.post("/tokenize", json=body)).json()["tokens"]
        assert bytes(ids).decode() == "<system>brief<user>hi<assistant>"


@pytest.mark.parametrize("text", ["", "hi", "naïve 猫", "<s>"])
async def test_detokenizing_ids_gives_their_text(started: Started, text: str) -> None:
    async with started(serve, model=SPEC) as api:
        body = {"prompt": text, "add_special_tokens": False}
        ids = (await api.client.post("/tokenize", json=body)).json()["tokens"]
        assert (await api.client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": text}
        whole = (await api.client.post("/detokenize", json={"tokens": [BEGIN, *ids]})).json()
        assert whole == {"prompt": f"<s>{text}"}


@pytest.mark.parametrize(
    ("path", "body", "field", "code"),
    [
        ("/tokenize", {}, "prompt", "missing_field"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages", "invalid_value"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "invalid_value"),
        ("/tokenize", {"messages": []}, "messages", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "cat", "content": "a"}]}, "messages[0].role", "invalid_value"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature", "unknown_parameter"),
        ("/detokenize", {}, "tokens", "missing_field"),
        ("/detokenize", {"tokens": "a"}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens[1]", "invalid_value"),
        ("/detokenize", {"tokens": [1, 999]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [1], "prompt": "a"}, "prompt", "unknown_parameter"),
    ],
)
async def test_what_is_wrong_is_refused_by_field(
    started: Started, path: str, body: dict[str, Any], field: str, code: str
) -> None:
    async with started(serve, model=SPEC) as api:
        answer = await api.client.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, field, code), answer.text


async def test_more_ids_or_text_than_the_limit_are_refused(started: Started) -> None:
    async with started(serve, model=SPEC, max_text_bytes=10) as api:
        for path, body in (("/tokenize", {"prompt": "x" * 11}), ("/detokenize", {"tokens": [1] * 11})):
            answer = await api.client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
