"""POST /v1/images/generations and /v1/images/edits: sizes, seeds, forms, file formats, and the OpenAI client."""

from __future__ import annotations

import base64
import io
from typing import Any

import httpx
import openai
from PIL import Image

from mstar_core.messages.requests import NewRequest
from tests.api.conftest import Started, running
from tests.fakes import media
from tests.fakes.conductor import FakeDeployment, echo
from tests.fakes.omni_model import SPEC

PAINT, EDIT = "/v1/images/generations", "/v1/images/edits"


def opened(data: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data)))


def paint(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: an image of the requested size, whose gray value is the seed, and no text."""
    fake.image(request.handle, request.params["width"], request.params["height"], value=request.seed % 200)
    fake.finish(request.handle)


async def test_n_images_have_the_size_and_the_seeds_asked_for(started: Started) -> None:
    async with started(paint, model=SPEC) as api:
        body = {
            "prompt": "a cat",
            "n": 2,
            "size": "32x16",
            "seed": 40,
            "model": "fake",
            "quality": "hd",
            "style": "vivid",
        }
        answer = (await api.client.post(PAINT, json=body)).json()
        assert [entry["seed"] for entry in answer["data"]] == [40, 41]
        for entry, grey in zip(answer["data"], (40, 41), strict=True):
            image = opened(entry["b64_json"])
            assert (image.format, image.size, image.getpixel((0, 0))) == ("PNG", (32, 16), (grey,) * 3)
            assert entry["url"] is None and entry["revised_prompt"] is None
        first = api.fake.requests[0]
        assert set(first.outputs) == {"image", "text"}
        assert first.params["max_output_tokens"] == 9  # set by the model's surface for this route
        await api.client.post(PAINT, json={"prompt": "a cat", "size": "32x16", "width": 24, "limit": 5})
        last = api.fake.requests[-1].params
        assert (last["width"], last["height"], last["max_output_tokens"]) == (24, 16, 5)
        assert (await api.client.post(PAINT, json={"prompt": "x", "size": "auto"})).status_code == 200
        await api.clean()


async def test_files_come_in_the_kind_asked_for_and_as_a_url(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        for form, magic in (("png", b"\x89PNG"), ("jpeg", b"\xff\xd8\xff"), ("webp", b"RIFF")):
            body = {"prompt": "think", "output_format": form, "response_format": "url"}
            (entry,) = (await api.client.post(PAINT, json=body)).json()["data"]
            head, _, data = entry["url"].partition(",")
            assert head == f"data:image/{form};base64" and base64.b64decode(data).startswith(magic)
            assert (entry["b64_json"], entry["revised_prompt"]) == (None, "think")


async def edit(client: httpx.AsyncClient, files: Any, **fields: str) -> httpx.Response:
    return await client.post(EDIT, data={"prompt": "bluer", **fields}, files=files)


async def test_edits_read_images_in_order_and_fields_as_json(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        one = ("image", ("a.png", media.image(9, 7)))
        answer = (await edit(api.client, [one], grid="[0.0, 1.0]", height="24", think="true", n="2", seed="3")).json()
        assert [entry["revised_prompt"] for entry in answer["data"]] == ["[image 9x7]bluer"] * 2
        params = api.fake.requests[0].params
        assert (list(params["grid"]), params["height"], params["think"]) == ([0.0, 1.0], 24, True)
        two = [("image[]", ("a", media.image(9, 7))), ("image[]", ("b", media.image(5, 4, "WEBP")))]
        answer = (await edit(api.client, two)).json()
        assert answer["data"][0]["revised_prompt"] == "[image 9x7][image 5x4]bluer"


PAINT_BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "missing_field", "prompt"),
    ({"prompt": " "}, "invalid_value", "prompt"),
    ({"prompt": 5}, "invalid_value", "prompt"),
    ({"prompt": "x", "size": "big"}, "invalid_value", "size"),
    ({"prompt": "x", "size": "0x5"}, "invalid_value", "size"),
    ({"prompt": "x", "size": "4096x16"}, "invalid_value", "width"),
    ({"prompt": "x", "n": 9}, "invalid_value", "n"),
    ({"prompt": "x", "response_format": "png"}, "invalid_value", "response_format"),
    ({"prompt": "x", "output_format": "gif"}, "invalid_value", "output_format"),
    ({"prompt": "x", "stream": True, "response_format": "url"}, "unsupported_parameter", "response_format"),
    ({"prompt": "x", "partial_images": 2}, "invalid_value", "partial_images"),
    ({"prompt": "x", "stream": True, "partial_images": 2}, "unsupported_parameter", "partial_images"),
    ({"prompt": "x", "stop": "x"}, "unsupported_parameter", "stop"),
    ({"prompt": "x", "colour": 1}, "unknown_parameter", "colour"),
]


async def test_bad_requests_name_their_field() -> None:
    async with running(echo, model=SPEC) as api:
        for body, code, param in PAINT_BAD:
            answer = await api.client.post(PAINT, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, code, param), (body, error)
        image = ("x.png", media.image())
        cases: list[tuple[Any, dict[str, str], int, str, str]] = [
            ([("mask", image), ("image", image)], {}, 400, "unsupported_parameter", "mask"),
            ([("photo", image)], {}, 400, "invalid_value", "photo"),
            ([("image", image)] * 3, {}, 400, "invalid_value", "image"),
            ([("image", ("x", media.wav()))], {}, 415, "unsupported_media_type", "image"),
            ([("image", ("x", b"nothing"))], {}, 415, "unsupported_media_type", "image"),
            ([("image", image)], {"size": "big"}, 400, "invalid_value", "size"),
            ([("image", image)], {"colour": "red"}, 400, "unknown_parameter", "colour"),
        ]
        for files, fields, status, code, param in cases:
            answer = await edit(api.client, files, **fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (files, error)
        json = await api.client.post(EDIT, json={"prompt": "x"})
        assert (json.status_code, json.json()["error"]["code"]) == (415, "unsupported_content_type")
        none = await api.client.post(EDIT, files={"prompt": (None, "x")})
        assert (none.status_code, none.json()["error"]["code"]) == (400, "missing_field")
        await api.clean()


async def test_a_model_that_gives_no_image_is_an_error_and_no_empty_answer(started: Started) -> None:
    async with started(lambda fake, request: fake.finish(request.handle), model=SPEC) as api:
        answer = await api.client.post(PAINT, json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


async def test_the_openai_client_paints_and_edits(started: Started) -> None:
    async with started(echo, model=SPEC) as api:
        async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="any") as client:
            made = await client.images.generate(model="fake", prompt="cat", n=2, size="auto", extra_body={"seed": 4})
            assert made.data is not None and len(made.data) == 2
            assert opened(made.data[0].b64_json or "").size == (16, 8)
            file = ("a.png", media.image(9, 7))
            edited = await client.images.edit(model="fake", image=file, prompt="more", extra_body={"width": 32})
            assert edited.data is not None and opened(edited.data[0].b64_json or "").size == (32, 8)
