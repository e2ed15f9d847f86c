"""POST /v1/embeddings: inputs of every form, float and base64, dimensions, order, limits, the OpenAI client."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from tests.api.conftest import Started
from tests.api.live import live_api
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import TEXT_ONLY
from tests.fakes.token_model import BEGIN, DIM, SPEC, prompt_ids, serve, vector_of

PATH = "/v1/embeddings"


def same(vector: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.array(vector, dtype=np.float32), expected)


async def test_each_input_has_its_vector_in_order_beyond_the_slots_of_the_deployment(started: Started) -> None:
    async with started(serve, model=SPEC, max_concurrent_requests=3, max_queue=0) as api:
        inputs = ["word" * number for number in range(1, 9)]
        answer = (await api.client.post(PATH, json={"input": inputs})).json()
        assert [entry["index"] for entry in answer["data"]] == list(range(8))
        for entry, text in zip(answer["data"], inputs, strict=True):
            same(entry["embedding"], vector_of([BEGIN, *text.encode()]))
            assert entry["object"] == "embedding"
        count = sum(len(text) + 1 for text in inputs)
        assert (answer["object"], answer["model"]) == ("list", "fake")
        assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
        await api.clean()


@pytest.mark.parametrize("value", ["hi", ["hi"], [BEGIN, 104, 105], [[BEGIN, 104, 105]]])
async def test_an_input_is_a_text_or_token_ids(started: Started, value: Any) -> None:
    async with started(serve, model=SPEC) as api:
        answer = (await api.client.post(PATH, json={"input": value})).json()
        same(answer["data"][0]["embedding"], vector_of([BEGIN, 104, 105]))
        assert api.fake.requests[0].outputs == ["embedding"]
        assert prompt_ids(api.fake, api.fake.requests[0]) == [BEGIN, 104, 105]


async def test_base64_holds_the_same_values(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        answer = (await api.client.post(PATH, json={"input": "hi", "encoding_format": "base64"})).json()
        data = base64.b64decode(answer["data"][0]["embedding"])
        same(np.frombuffer(data, "<f4"), vector_of([BEGIN, 104, 105]))


async def test_dimensions_cut_the_vector_and_normalize_it(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        answer = (await api.client.post(PATH, json={"input": "hi", "dimensions": 2})).json()
        vector = np.array(answer["data"][0]["embedding"])
        first = vector_of([BEGIN, 104, 105])[:2]
        assert vector == pytest.approx(first / np.linalg.norm(first), abs=1e-6)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


async def test_the_model_card_tells_the_length_of_vectors(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        card = (await api.client.get("/v1/models/fake")).json()
        assert card["dimensions"] == DIM
        assert {PATH, "/v1/completions", "/tokenize"} <= set(card["endpoints"])


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({}, "input", "missing_field"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input[1]", "invalid_value"),
        ({"input": [[1], [999]]}, "input[1]", "invalid_value"),
        ({"input": "x" * 300}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": DIM + 1}, "dimensions", "invalid_value"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_value"),
        ({"input": ["a", "b", "c", "d"]}, "input", "invalid_value"),
        ({"input": "a", "inputs": "b"}, "inputs", "unknown_parameter"),
    ],
)
async def test_what_is_wrong_is_refused_by_field(started: Started, body: dict[str, Any], field: str, code: str) -> None:
    async with started(serve, model=SPEC, max_prompts=3, max_seq_len=200) as api:
        answer = await api.client.post(PATH, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, field, code), answer.text
        await api.clean()


async def test_a_model_without_embeddings_refuses_the_route_by_name(started: Started) -> None:
    async with started(serve, model=TEXT_ONLY) as api:
        for path in (PATH, "/v1/completions", "/tokenize", "/detokenize"):
            error = (await api.client.post(path, json={"input": "a"})).json()["error"]
            assert error["code"] == "unsupported_endpoint"


async def test_a_model_that_sends_no_vector_is_an_error_of_the_server(started: Started) -> None:
    def end(fake: FakeDeployment, request: Any) -> None:
        fake.finish(request.handle)

    async with started(end, model=SPEC) as api:
        answer = await api.client.post(PATH, json={"input": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


def test_the_openai_client_reads_floats_base64_and_dimensions() -> None:
    with live_api(serve, SPEC) as api, openai.OpenAI(api_key="none", base_url=f"{api.url}/v1", max_retries=0) as client:
        expected = vector_of([BEGIN, 104, 105])
        for answer in (
            client.embeddings.create(model="fake", input="hi"),  # asks for base64 and decodes it
            client.embeddings.create(model="fake", input=["hi", "ho"], encoding_format="float"),
            client.embeddings.create(model="fake", input=[[BEGIN, 104, 105]]),
        ):
            same(answer.data[0].embedding, expected)
        short = client.embeddings.create(model="fake", input="hi", dimensions=3)
        assert len(short.data[0].embedding) == 3
