"""BAGEL over HTTP: the reference's answers and images, the OpenAI client, mixed load, seeds, cancel, refusals."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from mstar_bagel.request.tokenizer import TextTokenizer
from mstar_core import MStarClient
from mstar_core.config.deployment import KVCacheConfig
from tests.runtime.deployment import Deployment, Served, plan

BYTES_OFF = 0.005
BAGEL = Served(
    model="bagel", plugin="bagel", nodes=("LLM", "combine_cfg", "vit_encoder", "vae_encoder", "vae_decoder"),
    settings={"max_seq_len": 2048, "kv_cache": KVCacheConfig(pages=2048), "max_concurrent_requests": 16},
)  # fmt: skip
SMALL = {"num_timesteps": 4, "width": 64, "height": 32}


@pytest.fixture(scope="module")
def server(reference: Any) -> Iterator[Deployment]:
    """Serve two replicas of the reference's model."""
    where = plan({0: BAGEL.nodes, 1: BAGEL.nodes})
    with Deployment(served=BAGEL, folder=reference.folder, where=where) as running:
        yield running
        running.assert_clean()


@pytest.fixture(scope="module")
def small() -> Iterator[Deployment]:
    """Serve `bagel:tiny` with the LLM on one rank and the encoders and the decoder on another."""
    where = plan({0: ("LLM", "combine_cfg"), 1: ("vit_encoder", "vae_encoder", "vae_decoder")})
    with Deployment(served=BAGEL, name="small", where=where) as running:
        yield running
        running.assert_clean()


def generate(server: Deployment, parts: Sequence[tuple[str, Any]], **fields: Any) -> dict[str, Any]:
    """Send parts in order; return the whole answer."""
    files = [("files", (f"{number}.png", data)) for number, (kind, data) in enumerate(parts) if kind == "image"]
    texts = [value for kind, value in parts if kind == "text"]
    given = {
        "text": texts[0], "input_modalities": ",".join(kind for kind, _ in parts), "streaming": "false",
        **{name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()},
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/generate", data=given, files=files or None, timeout=120)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def picture(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def pixels(answer: Mapping[str, Any]) -> np.ndarray:
    (image,) = answer["outputs"]["image"]
    return picture(base64.b64decode(image["data"]))


def is_same(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether images agree but for rounding: matrix products of other sizes round differently."""
    return bool(np.abs(first.astype(int) - second.astype(int)).max() <= 1)


def parts_of(golden: Any, case: str) -> list[tuple[str, Any]]:
    return [(kind, golden.png(value) if kind == "image" else value) for kind, value in golden.prompt(case)]


def test_images_over_http_equal_the_reference(painting: str, golden: Any, server: Deployment) -> None:
    case, parts = golden.cases[painting], parts_of(golden, painting)
    if "think_text" in case:
        pytest.skip("runs in test_served: the reference's thought is not its own")
    if sum(kind == "text" for kind, _ in parts) > 1:
        pytest.skip("runs in test_served: this form has one text")
    fields = {**case["params"], "seed": case["noise_seed"]}
    if not any(kind == "image" for kind, _ in parts):
        fields |= {"height": case["output_hw"][0], "width": case["output_hw"][1]}
    answer = generate(server, parts, output_modalities="image", model_kwargs=fields)
    found, wanted = pixels(answer), golden.tensors(painting)["pixels_uint8"].numpy()
    assert (answer["seed"], answer["finish_reason"]) == (case["noise_seed"], "stop")
    assert answer["outputs"]["image"][0]["metadata"]["width"] == case["output_hw"][1]
    assert found.shape == wanted.shape
    if golden.has_decoder:
        apart = np.abs(found.astype(int) - wanted.astype(int))
        assert apart.max() <= 1 and np.count_nonzero(apart) <= BYTES_OFF * apart.size


def test_answers_over_http_equal_the_reference(golden: Any, server: Deployment) -> None:
    cases = [([], golden.cases["chat"])]
    cases += [(case["images"], case) for case in golden.cases["understanding"].values()]
    for images, case in cases:
        parts = [*(("image", golden.png(name)) for name in images), ("text", case["prompt"])]
        answer = generate(server, parts, model_kwargs={"max_output_tokens": len(case["tokens"])})
        (text,) = answer["outputs"]["text"]
        wanted = TextTokenizer(golden.folder).decode(case["tokens"])
        assert base64.b64decode(text["data"]).decode() == wanted
        assert answer["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == len(case["tokens"])
        # The start id is part of the cache, and not of the prompt.
        assert answer["usage"]["prompt_tokens"] == case["cache_len"]


# -- OpenAI's client --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(small: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="any", timeout=120, max_retries=0) as made:
        yield made


def b64(entry: Any) -> np.ndarray:
    return picture(base64.b64decode(entry.b64_json))


def test_generations_have_size_count_and_seeds(client: openai.OpenAI) -> None:
    extra = {"seed": 5, "num_timesteps": 4}
    made = client.images.generate(model="bagel", prompt="a boat", n=3, size="64x32", extra_body=extra)  # type: ignore[call-overload]
    images = [b64(entry) for entry in made.data]
    assert [image.shape for image in images] == [(32, 64, 3)] * 3
    assert [entry.seed for entry in made.data] == [5, 6, 7]
    assert not is_same(images[0], images[1])
    extra["seed"] = 6
    alone = client.images.generate(model="bagel", prompt="a boat", size="64x32", extra_body=extra)  # type: ignore[call-overload]
    assert is_same(b64(alone.data[0]), images[1])
    assert made.usage is not None and made.usage.total_tokens > 0
    assert made.usage.completion_tokens == 0  # type: ignore[attr-defined]  # steps of an image are not tokens


def test_a_stream_sends_partial_images_and_then_the_image(client: openai.OpenAI, golden: Any) -> None:
    extra = {"seed": 5, "num_timesteps": 9}
    asked: Any = {"model": "bagel", "prompt": "a boat", "size": "64x32"}
    whole = client.images.generate(**asked, extra_body=extra)
    told = list(client.images.generate(**asked, stream=True, partial_images=2, extra_body=extra))
    kinds = ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [each.type for each in told] == kinds
    assert [each.partial_image_index for each in told[:2]] == [0, 1]
    assert [(each.size, each.output_format) for each in told] == [("64x32", "png")] * 3
    images = [b64(each) for each in told]
    assert is_same(images[2], b64(whole.data[0])) and not is_same(images[0], images[2])
    assert told[2].usage.total_tokens == whole.usage.total_tokens
    (only,) = client.images.generate(**asked, stream=True, extra_body=extra)
    assert only.type == "image_generation.completed" and is_same(b64(only), images[2])
    file = ("a.png", golden.png(golden.images[0]))
    edited: Any = client.images.edit(
        model="bagel", image=file, prompt="bluer", stream=True, partial_images=1, extra_body={"num_timesteps": 4}
    )
    assert [each.type for each in edited] == ["image_edit.partial_image", "image_edit.completed"]


def test_a_thought_comes_back_beside_its_image(client: openai.OpenAI) -> None:
    extra = {"think_mode": True, **SMALL}
    made = client.images.generate(model="bagel", prompt="a boat", extra_body=extra)
    assert made.data is not None and made.data[0].revised_prompt
    assert b64(made.data[0]).shape == (32, 64, 3)


def test_edits_take_one_or_several_images(client: openai.OpenAI, golden: Any) -> None:
    files = [(f"{name}.png", golden.png(name)) for name in golden.images]
    one = client.images.edit(model="bagel", image=files[0], prompt="bluer", extra_body={"num_timesteps": 4})
    both = client.images.edit(model="bagel", image=list(files), prompt="join", extra_body={"num_timesteps": 4})
    for made, name in ((one, golden.images[0]), (both, golden.images[-1])):
        width, height = golden.cases["preprocess"][name]["after_first_rule_wh"]
        assert made.data is not None and b64(made.data[0]).shape == (height, width, 3)


def content(golden: Any, *names: str, text: str) -> list[dict[str, Any]]:
    urls = [f"data:image/png;base64,{base64.b64encode(golden.png(name)).decode()}" for name in names]
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


def test_chat_reads_images_and_streams(client: openai.OpenAI, golden: Any) -> None:
    messages: Any = [{"role": "user", "content": content(golden, *golden.images, text="what is it?")}]
    whole = client.chat.completions.create(model="bagel", messages=messages)
    assert whole.choices[0].finish_reason == "stop" and whole.choices[0].message.content
    pieces = client.chat.completions.create(model="bagel", messages=messages, stream=True)
    joined = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert joined == whole.choices[0].message.content
    cut = client.chat.completions.create(model="bagel", messages=messages, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    thinking = client.chat.completions.create(model="bagel", messages=messages, extra_body={"think": True})
    assert thinking.usage is not None and whole.usage is not None
    assert thinking.usage.prompt_tokens > whole.usage.prompt_tokens


def test_chat_gives_an_image_by_its_modalities(small: Deployment) -> None:
    body = {
        "messages": [{"role": "user", "content": "a boat"}], "modalities": ["image"], "model": "bagel", **SMALL,
    }  # fmt: skip
    answer = httpx.post(f"{small.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert "iVBOR" in answer.text  # a PNG in base64


def test_steps_are_events_of_a_full_stream_only(small: Deployment) -> None:
    fields = {"text": "a boat", "output_modalities": "image", "model_kwargs": json.dumps({**SMALL, "num_timesteps": 6})}
    for events in ("full", "data"):
        given = {**fields, "stream_events": events}
        answer = httpx.post(f"{small.url}/generate", data=given, timeout=60)
        lines = [json.loads(line) for line in answer.text.splitlines() if line]
        told = [line["metadata"] for line in lines if line["modality"] == "progress"]
        wanted = [{"step": number, "steps": 5} for number in range(1, 6)] if events == "full" else []
        assert told == wanted
        assert [line["modality"] for line in lines if line["modality"] == "image"] == ["image"]
    with MStarClient(small.url) as sdk:
        made = sdk.generate(text="a boat", output_modalities=["image"], stream=True, **SMALL)
        assert [type(event).__name__ for event in made] == ["ImageChunk"]


def test_usage_tells_whether_an_image_was_guided(small: Deployment) -> None:
    for scale, is_guided in ((4.0, 1), (1.0, 0)):
        answer = generate(
            small, [("text", "a boat")], output_modalities="image", model_kwargs={**SMALL, "cfg_text_scale": scale}
        )
        assert answer["usage"]["guidance"] == is_guided


def test_a_full_stream_of_generate_has_partial_images_that_were_asked_for(small: Deployment) -> None:
    kwargs = {**SMALL, "num_timesteps": 6, "partial_images": 1}
    fields = {"text": "a boat", "output_modalities": "image", "model_kwargs": json.dumps(kwargs)}
    for events, wanted in (("full", ["partial_image", "image"]), ("data", ["image"])):
        answer = httpx.post(f"{small.url}/generate", data={**fields, "stream_events": events}, timeout=60)
        lines = [json.loads(line) for line in answer.text.splitlines() if line]
        assert [line["modality"] for line in lines if line["modality"].endswith("image")] == wanted


# -- load, cancel, refusals -------------------------------------------------------------------------------------------


def test_ten_requests_of_different_kinds_at_once(small: Deployment, golden: Any) -> None:
    image = ("image", golden.png(golden.images[0]))
    kinds: list[tuple[list[tuple[str, Any]], dict[str, Any]]] = [
        ([("text", "hello")], {}),
        ([image, ("text", "what?")], {}),
        ([("text", "a boat")], {"output_modalities": "image", "model_kwargs": SMALL}),
        ([image, ("text", "bluer")], {"output_modalities": "image", "model_kwargs": {"num_timesteps": 4}}),
        ([("text", "a boat")], {"output_modalities": "text,image", "model_kwargs": {"think": True, **SMALL}}),
    ]
    calls = [(parts, {**fields, "request_id": f"mixed-{number}"}) for number, (parts, fields) in enumerate(kinds * 2)]
    calls = [(parts, with_seed(fields)) for parts, fields in calls]
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        together = list(threads.map(lambda call: generate(small, call[0], **call[1]), calls))
    for (parts, fields), answer in zip(calls, together, strict=True):
        alone = generate(small, parts, **{**fields, "request_id": fields["request_id"] + "-alone"})
        assert alone["outputs"].get("text") == answer["outputs"].get("text")
        if "image" in answer["outputs"]:
            assert is_same(pixels(alone), pixels(answer))


def with_seed(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**fields, "model_kwargs": {**fields.get("model_kwargs", {}), "seed": 3}}


def test_a_cancel_in_the_middle_of_an_image_frees_everything(small: Deployment) -> None:
    failed: list[httpx.Response] = []
    fields = {"text": "a boat", "output_modalities": "image", "request_id": "long", "streaming": "false"}
    kwargs = {"model_kwargs": json.dumps({**SMALL, "num_timesteps": 1000})}

    def send() -> None:
        failed.append(httpx.post(f"{small.url}/generate", data={**fields, **kwargs}, timeout=120))

    thread = threading.Thread(target=send)
    thread.start()
    while not small.leaks():
        time.sleep(0.02)
    time.sleep(0.3)
    ended = httpx.post(f"{small.url}/v1/requests/long/cancel", timeout=30)
    began = time.monotonic()
    thread.join(30)
    assert (ended.status_code, failed[0].status_code) == (200, 499)
    small.assert_clean()
    assert time.monotonic() - began < 10


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": "x", "size": "64x40"}, 400, "height"),
    ({"prompt": "x", "size": "2048x1024"}, 400, "width"),
    ({"prompt": "x", "size": "1024x1024"}, 400, "width"),  # beyond the tiny checkpoint's table
    ({"prompt": " "}, 400, "prompt"),
    ({"prompt": "x", "cfg_text_scale": 1000}, 400, "cfg_text_scale"),
    ({"prompt": "x", "cfg_renorm_type": "local"}, 400, "cfg_renorm_type"),
    ({"prompt": "x", "cfg_interval": [0.9, 0.1]}, 400, "cfg_interval"),
    ({"prompt": "x", "num_timesteps": 1}, 400, "num_timesteps"),
    ({"prompt": "x", "negative_prompt": "y"}, 400, "negative_prompt"),
    ({"prompt": "x", "partial_images": 1}, 400, "partial_images"),
    ({"prompt": "x", "partial_images": 4, "stream": True}, 400, "partial_images"),
    ({"prompt": "x", "response_format": "url", "stream": True}, 400, "response_format"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_wrong_request_is_refused_by_name(number: int, small: Deployment) -> None:
    body, status, param = BAD[number]
    answer = httpx.post(f"{small.url}/v1/images/generations", json={"model": "bagel", **body}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_wrong_edits_are_refused(small: Deployment, golden: Any) -> None:
    image = ("image", ("a.png", golden.png(golden.images[0])))
    mask = ("mask", ("m.png", golden.png(golden.images[0])))
    broken = ("image", ("a.png", golden.png(golden.images[0])[:300]))
    cases = [([image, mask], 400, "mask"), ([broken], 422, None), ([image] * 40, 413, None)]
    for files, status, param in cases:
        answer = httpx.post(f"{small.url}/v1/images/edits", data={"prompt": "x"}, files=files, timeout=60)
        assert answer.status_code == status, answer.text
        assert param is None or answer.json()["error"]["param"] == param
