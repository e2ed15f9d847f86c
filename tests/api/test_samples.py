"""GET /v1/samples: what a client needs to send a request that fits the model."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

from mstar_core.client import MStarClient
from mstar_core.plugin import ModelSpec, SampleInputs
from tests.api.conftest import running
from tests.fakes.speech_model import SPEC

PICTURE = b"\x89PNG, as far as this test goes"


def make_samples(spec: ModelSpec, source: str, folder: object) -> list[SampleInputs]:
    """Return a sample that says with what it was made."""
    return [
        SampleInputs(
            name="see",
            title=f"{spec.name}, {source}, {folder}",
            outputs=("audio",),
            text="What is it?",
            files=(("picture.png", PICTURE),),
            params={"seed": 1},
        )
    ]


async def test_samples_carry_their_files_and_the_client_sends_them_as_they_are() -> None:
    model = replace(SPEC, make_samples="tests.api.test_samples:make_samples")
    async with running(model=model, weights_source="mini", folder="/some/folder") as api:
        (entry,) = (await api.client.get("/v1/samples")).json()["data"]
        assert entry["title"] == f"{SPEC.name}, mini, /some/folder"
        assert entry["files"] == [{"name": "picture.png", "kind": "image", "data": base64.b64encode(PICTURE).decode()}]
        with MStarClient(api.url) as client:
            (sample,) = await asyncio.to_thread(client.samples)
    assert sample.arguments == {
        "text": "What is it?",
        "output_modalities": ("audio",),
        "images": [("picture.png", PICTURE)],
        "seed": 1,
    }


async def test_a_model_without_samples_has_none() -> None:
    async with running() as api:
        assert (await api.client.get("/v1/samples")).json() == {"object": "list", "data": []}
