"""BAGEL over HTTP: the reference's answers and images, the OpenAI client, mixed load, seeds, cancel, refusals."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mstar_bagel.checkpoint.config import read_sizes
from mstar_bagel.request.images import resized_size
from mstar_bagel.request.tokenizer import TextTokenizer
from mstar_core import MStarClient
from mstar_core.config.resolved import KVCacheConfig
from tests.runtime.deployment import REPO, Deployment, Served, plan, until

from .conftest import Run, lay_out

HEAD = "language_model.lm_head.weight"
MARGIN = 20.0
"""Least difference of a written id's logit to every other one."""

UPLOAD_BYTES = 2 * 1024 * 1024
BYTES_OFF = 0.005
BAGEL = Served(
    model="bagel",
    plugin="bagel",
    nodes=("LLM", "combine_cfg", "vit_encoder", "vae_encoder", "vae_decoder"),
    settings={"max_seq_len": 2048, "kv_cache": KVCacheConfig(pages=2048), "max_concurrent_requests": 16},
)
SMALL = {"num_timesteps": 4, "width": 64, "height": 32}


@pytest.fixture(scope="module")
def server(reference: Any) -> Iterator[Deployment]:
    """Serve two replicas of the reference's model."""
    where = plan({0: BAGEL.nodes, 1: BAGEL.nodes})
    with Deployment(served=BAGEL, folder=reference.folder, where=where) as running:
        yield running
        running.assert_clean()


@pytest.fixture(scope="module")
def thinker(reference: Any, golden: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Serve the reference's model with a head that writes the reference's thoughts. No image depends on the head."""
    folder = lay_out(golden, tmp_path_factory.mktemp("thinker") / "checkpoint")
    weights = load_file(folder / "ema.safetensors")
    save_file({**weights, HEAD: writing_head(golden, reference, weights[HEAD])}, folder / "ema.safetensors")
    with Deployment(served=BAGEL, name="thinker", folder=folder) as running:
        yield running
        running.assert_clean()


def writing_head(golden: Any, reference: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a head that greedily writes each case's thought and its end, by the perceptron's rule."""
    states, expected = [], list[int]()
    for name in golden.paintings:
        thought = Run(reference).read(golden, name)
        if thought is not None:
            states.append(thought[:-1].double())
            expected += [*golden.cases["tokens"][golden.cases[name]["think_text"]], reference.sizes.ids.end]
    inputs, ids, head = torch.cat(states), torch.tensor(expected), torch.zeros(like.shape, dtype=torch.float64)
    for _ in range(20_000):
        logits = inputs @ head.T
        logits[torch.arange(len(ids)), ids] -= MARGIN
        found = logits.argmax(1)
        wrong = found != ids
        if not wrong.any():
            return head.to(like.dtype)
        head.index_add_(0, ids[wrong], inputs[wrong])
        head.index_add_(0, found[wrong], -inputs[wrong])
    raise AssertionError("no head separates the states of the thoughts")


@pytest.fixture(scope="module")
def small() -> Iterator[Deployment]:
    """Serve `bagel:tiny` with the LLM on one rank and the encoders and the decoder on another."""
    where = plan({0: ("LLM", "combine_cfg"), 1: ("vit_encoder", "vae_encoder", "vae_decoder")})
    with Deployment(served=BAGEL, name="small", where=where, api={"max_body_bytes": UPLOAD_BYTES}) as running:
        yield running
        running.assert_clean()


def generate(server: Deployment, parts: Sequence[tuple[str, Any]], **fields: Any) -> dict[str, Any]:
    """Send parts in order; return the whole answer."""
    files = [("files", (f"{number}.png", data)) for number, (kind, data) in enumerate(parts) if kind == "image"]
    texts = [value for kind, value in parts if kind == "text"]
    given = {
        "text": texts[0],
        "input_modalities": ",".join(kind for kind, _ in parts),
        "streaming": "false",
        **{name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()},
    }
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


def test_images_over_http_equal_the_reference(
    painting: str, golden: Any, reference: Any, request: pytest.FixtureRequest
) -> None:
    """Each case over the route that takes its parts; thoughts are written by the served model itself."""
    case, parts, wanted = golden.cases[painting], parts_of(golden, painting), golden.tensors(painting)
    thought = case.get("think_text")
    server: Deployment = request.getfixturevalue("thinker" if thought else "server")
    fields = {**case["params"], "think_mode": thought is not None}
    if not any(kind == "image" for kind, _ in parts):
        fields |= {"height": case["output_hw"][0], "width": case["output_hw"][1]}
    if sum(kind == "text" for kind, _ in parts) > 1:  # only messages have several texts
        body = {"messages": [{"role": "user", "content": contents(parts)}], "modalities": ["image"], **fields}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "seed": case["noise_seed"]}, timeout=120)
        assert reply.status_code == 200, reply.text
        (part,) = reply.json()["choices"][0]["message"]["content"]
        actual = picture(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
    else:
        kinds = "text,image" if thought else "image"
        fields["seed"] = case["noise_seed"]
        answer = generate(server, parts, output_modalities=kinds, model_kwargs=fields)
        actual = pixels(answer)
        assert (answer["seed"], answer["finish_reason"]) == (case["noise_seed"], "stop")
        assert answer["outputs"]["image"][0]["metadata"]["width"] == case["output_hw"][1]
        if thought:
            assert base64.b64decode(answer["outputs"]["text"][0]["data"]).decode() == thought
    expected = wanted["pixels_uint8"].numpy() if golden.has_decoder else decoded_by(reference, case, wanted)
    assert actual.shape == (*case["output_hw"], 3) == expected.shape
    apart = np.abs(actual.astype(int) - expected.astype(int))
    assert apart.max() <= 1 and np.count_nonzero(apart) <= BYTES_OFF * apart.size


def decoded_by(reference: Any, case: Any, wanted: Any) -> np.ndarray:
    """Return the pixels of the reference's latents by the served decoder, for sets without the reference's decoder."""
    height, width = (side // reference.sizes.token_pixels for side in case["output_hw"])
    latents = wanted["final_latents"].view(height, width, -1)
    made: np.ndarray = reference.decoder.pixels(reference.decoder.decode(latents)).numpy()
    return made


def contents(parts: Sequence[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return parts as the content of a chat message."""
    return [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(value).decode()}"}}
        if kind == "image"
        else {"type": "text", "text": value}
        for kind, value in parts
    ]


def test_answers_over_http_equal_the_reference(golden: Any, server: Deployment) -> None:
    cases = [([], golden.cases["chat"])]
    cases += [(case["images"], case) for case in golden.cases["understanding"].values()]
    for images, case in cases:
        parts = [*(("image", golden.png(name)) for name in images), ("text", case["prompt"])]
        answer = generate(server, parts, model_kwargs={"max_output_tokens": len(case["tokens"])})
        (text,) = answer["outputs"]["text"]
        expected = TextTokenizer(golden.folder).decode(case["tokens"])
        assert base64.b64decode(text["data"]).decode() == expected
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
    output = client.images.generate(model="bagel", prompt="a boat", n=3, size="64x32", extra_body=extra)  # type: ignore[call-overload]
    images = [b64(entry) for entry in output.data]
    assert [image.shape for image in images] == [(32, 64, 3)] * 3
    assert [entry.seed for entry in output.data] == [5, 6, 7]
    assert not is_same(images[0], images[1])
    extra["seed"] = 6
    alone = client.images.generate(model="bagel", prompt="a boat", size="64x32", extra_body=extra)  # type: ignore[call-overload]
    assert is_same(b64(alone.data[0]), images[1])
    assert output.usage is not None and output.usage.total_tokens > 0
    assert output.usage.output_tokens == 0  # steps of an image are not tokens
    assert output.usage.input_tokens == output.usage.input_tokens_details.text_tokens > 0


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
    assert told[2].usage.input_tokens == whole.usage.input_tokens > 0
    (only,) = client.images.generate(**asked, stream=True, extra_body=extra)
    assert only.type == "image_generation.completed" and is_same(b64(only), images[2])
    file = ("a.png", golden.png(golden.images[0]))
    edited: Any = client.images.edit(
        model="bagel", image=file, prompt="bluer", stream=True, partial_images=1, extra_body={"num_timesteps": 4}
    )
    assert [each.type for each in edited] == ["image_edit.partial_image", "image_edit.completed"]


def test_a_form_holds_the_text_about_a_picture(client: openai.OpenAI, golden: Any) -> None:
    picture = "data:image/png;base64," + base64.b64encode(golden.png(next(iter(golden.images)))).decode()
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "What is it?"}]
    for effort in ("none", "low"):
        answer = client.chat.completions.create(  # type: ignore[call-overload]
            model="bagel",
            messages=[{"role": "user", "content": content}],
            reasoning_effort=effort,
            max_tokens=120,
            extra_body={"choice": ["a boat", "a house"], "seed": 3},
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop" and choice.message.content in ("a boat", "a house")


def test_a_thought_comes_back_beside_its_image(client: openai.OpenAI) -> None:
    extra = {"think_mode": True, **SMALL}
    output = client.images.generate(model="bagel", prompt="a boat", extra_body=extra)
    assert output.data is not None and output.data[0].revised_prompt
    assert b64(output.data[0]).shape == (32, 64, 3)


def test_edits_take_one_or_several_images(client: openai.OpenAI, golden: Any, tiny_folder: Path) -> None:
    rule = read_sizes(tiny_folder).vae_rule
    files = [(f"{name}.png", golden.png(name)) for name in golden.images]
    one = client.images.edit(model="bagel", image=files[0], prompt="bluer", extra_body={"num_timesteps": 4})
    both = client.images.edit(model="bagel", image=list(files), prompt="join", extra_body={"num_timesteps": 4})
    for actual, name in ((one, golden.images[0]), (both, golden.images[-1])):
        with Image.open(io.BytesIO(golden.png(name))) as inputs:
            width, height = resized_size(inputs.size, rule)
        assert actual.data is not None and b64(actual.data[0]).shape == (height, width, 3)


def test_chat_reads_images_and_streams(client: openai.OpenAI, golden: Any) -> None:
    parts = [*(("image", golden.png(name)) for name in golden.images), ("text", "what is it?")]
    messages: Any = [{"role": "user", "content": contents(parts)}]
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
    body = {"messages": [{"role": "user", "content": "a boat"}], "modalities": ["image"], "model": "bagel", **SMALL}
    answer = httpx.post(f"{small.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert "iVBOR" in answer.text  # a PNG in base64


def test_steps_are_events_of_a_full_stream_only(small: Deployment) -> None:
    fields = {"text": "a boat", "output_modalities": "image", "model_kwargs": json.dumps({**SMALL, "num_timesteps": 6})}
    for events in ("full", "data"):
        inputs = {**fields, "stream_events": events}
        answer = httpx.post(f"{small.url}/generate", data=inputs, timeout=60)
        lines = [json.loads(line) for line in answer.text.splitlines() if line]
        told = [line["metadata"] for line in lines if line["modality"] == "progress"]
        expected = [{"step": number, "steps": 5} for number in range(1, 6)] if events == "full" else []
        assert told == expected
        assert [line["modality"] for line in lines if line["modality"] == "image"] == ["image"]
    with MStarClient(small.url) as sdk:
        output = sdk.generate(text="a boat", output_modalities=["image"], stream=True, **SMALL)
        assert [type(event).__name__ for event in output] == ["ImageChunk"]


def test_usage_tells_whether_an_image_was_guided(small: Deployment) -> None:
    for text, image, expected in ((4.0, 1.0, (1, 0)), (4.0, 1.5, (1, 1)), (1.0, 1.5, (0, 0))):
        kwargs = {**SMALL, "cfg_text_scale": text, "cfg_img_scale": image}
        answer = generate(small, [("text", "a boat")], output_modalities="image", model_kwargs=kwargs)
        assert (answer["usage"]["guidance"], answer["usage"]["image_guidance"]) == expected
        assert bool(answer["warnings"]) == (expected == (0, 0))


def test_usage_counts_the_steps_with_forward_passes(small: Deployment) -> None:
    for cached, expected in ((None, None), (0.0, None), (0.5, 11)):
        kwargs = {**SMALL, "num_timesteps": 21, **({} if cached is None else {"step_cache": cached})}
        answer = generate(small, [("text", "a boat")], output_modalities="image", model_kwargs=kwargs)
        assert answer["usage"].get("computed_steps") == expected
    wrong = httpx.post(f"{small.url}/v1/images/generations", json={"prompt": "a boat", "step_cache": 0.9}, timeout=60)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "step_cache")


def test_a_full_stream_of_generate_has_partial_images_that_were_asked_for(small: Deployment) -> None:
    kwargs = {**SMALL, "num_timesteps": 6, "partial_images": 1}
    fields = {"text": "a boat", "output_modalities": "image", "model_kwargs": json.dumps(kwargs)}
    for events, expected in (("full", ["partial_image", "image"]), ("data", ["image"])):
        answer = httpx.post(f"{small.url}/generate", data={**fields, "stream_events": events}, timeout=60)
        lines = [json.loads(line) for line in answer.text.splitlines() if line]
        assert [line["modality"] for line in lines if line["modality"].endswith("image")] == expected


# -- load, cancel, refusals -------------------------------------------------------------------------------------------


def test_ten_requests_of_different_kinds_at_once(client: openai.OpenAI, golden: Any) -> None:
    """Texts, readings, images, edits and thoughts through OpenAI's client: each is what it is alone."""
    file, both = golden.png(golden.images[0]), [golden.png(name) for name in golden.images]

    def chat(parts: Sequence[tuple[str, Any]], **fields: Any) -> str:
        messages: Any = [{"role": "user", "content": contents(parts)}]
        actual = client.chat.completions.create(model="bagel", messages=messages, seed=3, max_tokens=24, **fields)
        return str(actual.choices[0].message.content)

    def paint(**extra: Any) -> np.ndarray:
        output = client.images.generate(model="bagel", prompt="a boat", extra_body={"seed": 3, **SMALL, **extra})
        assert output.data is not None
        return b64(output.data[0])

    def edit(*files: bytes) -> np.ndarray:
        inputs = [(f"{number}.png", each) for number, each in enumerate(files)]
        extra = {"seed": 3, "num_timesteps": 4}
        made = client.images.edit(model="bagel", image=list(inputs), prompt="bluer", extra_body=extra)
        assert made.data is not None
        return b64(made.data[0])

    kinds: list[Callable[[], Any]] = [
        lambda: chat([("text", "hello")]),
        lambda: chat([("image", file), ("text", "what?")]),
        lambda: chat([("text", "see"), *(("image", each) for each in both), ("text", "what?")]),
        lambda: chat([("text", "why?")], extra_body={"think": True}),
        lambda: chat([("text", "a joke")], temperature=0.8),
        lambda: paint(),
        lambda: paint(cfg_text_scale=1.0),
        lambda: paint(think=True, max_think_tokens=8),
        lambda: edit(file),
        lambda: edit(*both),
    ]
    alone = [kind() for kind in kinds]
    with concurrent.futures.ThreadPoolExecutor(len(kinds)) as threads:
        together = [each.result() for each in [threads.submit(kind) for kind in kinds]]
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert is_same(one, other) if isinstance(one, np.ndarray) else one == other, number
    assert len({one if isinstance(one, str) else one.tobytes() for one in alone}) == len(kinds)


@pytest.mark.parametrize("kind", ["image", "thought"])
def test_a_cancel_in_the_middle_frees_everything(kind: str, small: Deployment) -> None:
    long = {"num_timesteps": 1000} if kind == "image" else {"think": True, "ignore_eos": True}
    fields = {"text": "a boat", "output_modalities": "image", "request_id": f"long-{kind}", "streaming": "false"}
    kwargs = {"model_kwargs": json.dumps({**SMALL, **long})}
    before = language_steps(small)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        call = threads.submit(httpx.post, f"{small.url}/generate", data={**fields, **kwargs}, timeout=120)
        until(small.leaks, "a running request")
        ended = httpx.post(f"{small.url}/v1/requests/long-{kind}/cancel", timeout=120)
        assert (ended.status_code, call.result(120).status_code) == (200, 499)
        small.assert_clean()
    assert language_steps(small) - before < FEW_STEPS


FEW_STEPS = 800
"""A request that is not ended early takes 1,000."""


def language_steps(server: Deployment) -> float:
    """Return the steps of the language model so far, as of its last telemetry."""
    lines = httpx.get(f"{server.url}/metrics", timeout=120).text.splitlines()
    counts = [line.split()[-1] for line in lines if line.startswith('mstar_step_seconds_count{node="LLM"}')]
    return sum(map(float, counts))


def test_a_client_that_leaves_after_a_partial_image_ends_its_request(small: Deployment) -> None:
    body = {"prompt": "a boat", "stream": True, "partial_images": 3, **SMALL, "num_timesteps": 1000}
    before = language_steps(small)
    with httpx.stream("POST", f"{small.url}/v1/images/generations", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        assert (
            json.loads(next(lines).removeprefix("data:"))["type"] == "image_generation.partial_image" and small.leaks()
        )
    small.assert_clean()
    assert language_steps(small) - before < FEW_STEPS


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": "x", "size": "64x40"}, 400, "height"),
    ({"prompt": "x", "size": "2048x1024"}, 400, "width"),
    ({"prompt": "x", "size": "1024x1024"}, 400, "width"),  # beyond the tiny checkpoint's table
    ({"prompt": " "}, 400, "prompt"),
    ({"prompt": "x", "size": "64by32"}, 400, "size"),
    ({"prompt": "x", "width": 8}, 400, "width"),
    ({"prompt": "x", "cfg_text_scale": 1000}, 400, "cfg_text_scale"),
    ({"prompt": "x", "cfg_text_scale": -1}, 400, "cfg_text_scale"),
    ({"prompt": "x", "cfg_img_scale": 101}, 400, "cfg_img_scale"),
    ({"prompt": "x", "cfg_renorm_min": 1.5}, 400, "cfg_renorm_min"),
    ({"prompt": "x", "timestep_shift": 0}, 400, "timestep_shift"),
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
    good, noise = golden.png(golden.images[0]), np.random.default_rng(1).bytes(UPLOAD_BYTES + 1)
    image, mask, broken = ("image", ("a.png", good)), ("mask", ("m.png", good)), ("image", ("a.png", good[:300]))
    cases = [
        ([image, mask], 400, ("unsupported_parameter", "mask")),
        ([broken], 422, ("undecodable_media", "files")),
        ([image] * 40, 413, ("too_many_files", None)),
        ([("image", ("a.png", noise))], 413, ("body_too_large", None)),
        ([("image", ("a.wav", b"RIFF\0\0\0\0WAVEfmt "))], 415, ("unsupported_media_type", "image")),
        ([("n", (None, "1"))], 400, ("missing_field", "image")),
    ]
    for files, status, expected in cases:
        answer = httpx.post(f"{small.url}/v1/images/edits", data={"prompt": "x"}, files=files, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, (error["code"], error["param"])) == (status, expected), answer.text


def test_more_images_than_fit_are_refused_with_their_tokens(small: Deployment) -> None:
    file = io.BytesIO()
    Image.new("RGB", (96, 96)).save(file, "PNG")
    files = [("image", (f"{number}.png", file.getvalue())) for number in range(30)]
    answer = httpx.post(f"{small.url}/v1/images/edits", data={"prompt": "join"}, files=files, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "text"), answer.text
    assert "2048" in error["message"] and "fewer or smaller images" in error["message"]


# -- the SDK and the command line -------------------------------------------------------------------------------------


def test_the_sdk_and_the_command_line_make_the_same_images(small: Deployment, golden: Any, tmp_path: Path) -> None:
    with MStarClient(small.url) as sdk:
        actual = sdk.generate_image("a boat", seed=3, **SMALL)
        edited = sdk.edit_image("bluer", golden.png(golden.images[0]), seed=3, num_timesteps=4)
    source = tmp_path / "in.png"
    source.write_bytes(golden.png(golden.images[0]))
    calls = [
        (actual, ["--text", "a boat", *(f"--param={name}={value}" for name, value in SMALL.items())]),
        (edited, ["--text", "bluer", "--image", str(source), "--param=num_timesteps=4"]),
    ]
    environment = {**os.environ, "MSTAR_RUNTIME_DIR": str(small.root)}
    for number, (expected, words) in enumerate(calls):
        out = tmp_path / f"{number}.png"
        command = [sys.executable, "-m", "mstarctl", "call", "small", *words, "--param=seed=3", "--out", str(out)]
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert is_same(picture(out.read_bytes()), picture(expected))
