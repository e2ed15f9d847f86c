"""POST /v1/completions: prompts of every form, order, echo, several completions, streams, limits, the OpenAI client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Started
from tests.fakes.conductor import FakeDeployment, begin
from tests.fakes.token_model import BEGIN, SPEC, prompt_ids, serve

PATH = "/v1/completions"
SEED = {"seed": 5}


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def events(answer: httpx.Response) -> list[Any]:
    words = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part and not part.startswith(":")]
    return [word if word == "[DONE]" else json.loads(word) for word in words]


def refused(answer: httpx.Response, field: str, code: str, status: int = 400) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, field, code), answer.text
    return str(error["message"])


async def test_a_text_is_read_as_it_is_with_the_tokens_around_a_text(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        answer = await api.client.post(PATH, json={"prompt": "hi", **SEED}, headers={"X-Request-ID": "mine"})
        body = answer.json()
        assert prompt_ids(api.fake, api.fake.requests[0]) == [BEGIN, *b"hi"]
        assert body["choices"] == [{"index": 0, "text": "HI/5", "finish_reason": "stop", "logprobs": None}]
        assert (body["id"], body["object"], body["model"]) == ("cmpl-mine", "text_completion", "fake")
        assert (body["system_fingerprint"], body["usage"]["prompt_tokens"]) == ("seed-5", 3)


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]]])
async def test_token_ids_are_read_as_they_are(started: Started, prompt: Any) -> None:
    async with started(serve, model=SPEC) as api:
        assert texts(await api.client.post(PATH, json={"prompt": prompt, **SEED})) == ["HI/5"]
        assert prompt_ids(api.fake, api.fake.requests[0]) == [104, 105]


async def test_several_prompts_give_completions_in_order_beyond_the_slots_of_the_deployment(started: Started) -> None:
    async with started(serve, model=SPEC, max_concurrent_requests=2, max_queue=0) as api:
        prompts = [f"p{number}" for number in range(9)]
        answer = await api.client.post(PATH, json={"prompt": prompts, **SEED})
        assert texts(answer) == [f"P{number}/5" for number in range(9)]
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["text_tokens"]) == (27, 27)
        assert usage["completion_tokens"] == 36
        await api.clean()


async def test_n_completions_of_each_prompt_are_neighbours_and_the_prompt_counts_once(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        answer = await api.client.post(PATH, json={"prompt": ["a", "bb"], "n": 2, "best_of": 2, **SEED})
        assert texts(answer) == ["A/5", "A/6", "BB/5", "BB/6"]
        assert answer.json()["usage"]["prompt_tokens"] == 5


async def test_echo_begins_with_the_prompt(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        body = {"prompt": ["a b", "c"], "echo": True, "n": 2, **SEED}
        assert texts(await api.client.post(PATH, json=body)) == ["a bA B/5", "a bA B/6", "cC/5", "cC/6"]
        body = {"prompt": [BEGIN, 104, 105], "echo": True, "stream": True, **SEED}
        *parts, last, done = events(await api.client.post(PATH, json=body))
        assert [part["choices"][0]["text"] for part in parts] == ["<s>hi", *"HI/5"]
        assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


async def test_a_stream_joined_is_the_whole_answer(started: Started) -> None:
    async with started(serve, model=SPEC, max_concurrent_requests=2) as api:
        body = {"prompt": ["one", "two", "three"], "n": 2, "echo": True, **SEED}
        whole = await api.client.post(PATH, json=body)
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *parts, last, done = events(await api.client.post(PATH, json=streamed))
        joined = [""] * 6
        for part in parts:
            (choice,) = part["choices"]
            joined[choice["index"]] += choice["text"]
            assert part["usage"] is None
        assert (joined, done) == (texts(whole), "[DONE]")
        assert (last["choices"], last["usage"]) == ([], whole.json()["usage"])
        ends = [part["choices"][0] for part in parts if part["choices"][0]["finish_reason"]]
        assert sorted(end["index"] for end in ends) == list(range(6))


async def test_stop_strings_end_a_completion(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        assert texts(await api.client.post(PATH, json={"prompt": "abc", "stop": "C", **SEED})) == ["AB"]


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({}, "prompt", "missing_field"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": 7}, "prompt", "invalid_value"),
        ({"prompt": {"text": "a"}}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": ["a", ""]}, "prompt[1]", "invalid_value"),
        ({"prompt": ["a", 7]}, "prompt[1]", "invalid_value"),
        ({"prompt": ["a", None]}, "prompt[1]", "invalid_value"),
        ({"prompt": [7, "a"]}, "prompt[1]", "invalid_value"),
        ({"prompt": [True]}, "prompt", "invalid_value"),
        ({"prompt": [1, -1]}, "prompt[1]", "invalid_value"),
        ({"prompt": [1, 2**31]}, "prompt[1]", "invalid_value"),
        ({"prompt": [[1], []]}, "prompt[1]", "invalid_value"),
        ({"prompt": [[1], [1.5]]}, "prompt[1][0]", "invalid_value"),
        ({"prompt": [1, 999]}, "prompt", "invalid_value"),
        ({"prompt": [[1], [999]]}, "prompt[1]", "invalid_value"),
        ({"prompt": "x" * 300}, "prompt", "context_length_exceeded"),
        ({"prompt": "a", "n": 9}, "n", "invalid_value"),
        ({"prompt": "a", "n": 0}, "n", "invalid_value"),
        ({"prompt": "a", "best_of": 3}, "best_of", "unsupported_parameter"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
        ({"prompt": "a", "promt": "b"}, "promt", "unknown_parameter"),
        ({"prompt": "a", "temperature": 9}, "temperature", "invalid_value"),
        ({"prompt": ["a", "b", "c", "d"]}, "prompt", "invalid_value"),
    ],
)
async def test_what_is_wrong_is_refused_by_field(started: Started, body: dict[str, Any], field: str, code: str) -> None:
    async with started(serve, model=SPEC, max_prompts=3, max_seq_len=200) as api:
        refused(await api.client.post(PATH, json=body), field, code)
        await api.clean()


async def test_more_text_than_the_limit_is_refused(started: Started) -> None:
    async with started(serve, model=SPEC, max_text_bytes=10) as api:
        refused(await api.client.post(PATH, json={"prompt": ["abcdef", "abcdef"]}), "prompt", "body_too_large", 413)
        refused(await api.client.post(PATH, json={"prompt": [1] * 11}), "prompt", "body_too_large", 413)


async def test_a_refused_prompt_ends_the_others(started: Started) -> None:
    async with started(begin, model=SPEC, max_concurrent_requests=4) as api:
        refused(await api.client.post(PATH, json={"prompt": [[1], [2], [999]]}), "prompt[2]", "invalid_value")
        await api.clean()


async def test_a_failure_after_the_first_event_is_an_error_event(started: Started) -> None:
    def fail(fake: FakeDeployment, request: Any) -> None:
        fake.text(request.handle, b"a")
        fake.fail(request.handle)

    async with started(fail, model=SPEC) as api:
        answer = await api.client.post(PATH, json={"prompt": "x", "stream": True})
        assert events(answer)[-1]["error"]["code"] == "engine_error"


async def test_a_full_deployment_refuses_before_anything_runs(started: Started) -> None:
    def go_on(fake: FakeDeployment, request: Any) -> None:
        fake.text(request.handle, b"a")  # the headers of a stream come with its first event

    async with started(go_on, model=SPEC, max_concurrent_requests=1, max_queue=0) as api:
        task = api.client.build_request("POST", PATH, json={"prompt": ["a", "b"], "stream": True})
        first = await api.client.send(task, stream=True)
        try:
            answer = await api.client.post(PATH, json={"prompt": ["c", "d"]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        finally:
            await first.aclose()
        await api.clean()


async def test_the_openai_client_reads_every_form(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        async with openai.AsyncOpenAI(api_key="none", base_url=f"{api.url}/v1", max_retries=0) as client:
            whole = await client.completions.create(model="fake", prompt=["a", "b"], n=2, echo=True, seed=5)
            assert [choice.text for choice in whole.choices] == ["aA/5", "aA/6", "bB/5", "bB/6"]
            assert whole.usage is not None and whole.usage.prompt_tokens == 4
            ids = await client.completions.create(model="fake", prompt=[[104], [105]], seed=5, max_tokens=9)
            assert [choice.text for choice in ids.choices] == ["H/5", "I/5"]
            stream = await client.completions.create(
                model="fake", prompt="hey", seed=5, stream=True, stream_options={"include_usage": True}
            )
            parts = [part async for part in stream]
            assert "".join(choice.text for part in parts for choice in part.choices) == "HEY/5"
            assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 5
            with pytest.raises(openai.BadRequestError) as error:
                await client.completions.create(model="fake", prompt="a", suffix="b")
            assert error.value.param == "suffix"


async def test_log_probabilities_are_refused_with_an_echo_and_where_there_are_none(started: Started) -> None:
    async with started(serve, model=SPEC) as api:
        both = await api.client.post(PATH, json={"prompt": "hi", "logprobs": 2, "echo": True})
        refused(both, "echo", "unsupported_parameter")
        alone = await api.client.post(PATH, json={"prompt": "hi", "logprobs": 2})
        refused(alone, "logprobs", "unsupported_parameter")
