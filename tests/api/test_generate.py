"""POST /generate between fake peers: forms, streams, whole answers."""

from __future__ import annotations

import base64
import json

import pytest

from tests.api.conftest import Started
from tests.fakes.conductor import say, speak

pytestmark = pytest.mark.asyncio


async def test_a_multipart_form_gives_one_line_per_chunk(started: Started) -> None:
    async with started(speak(3)) as api:
        answer = await api.client.post("/generate", files={"text": (None, "hi"), "output_modalities": (None, "audio")})
        assert answer.status_code == 200
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["modality"] for line in lines] == ["audio"] * 3
        assert [line["metadata"]["offset_samples"] for line in lines] == [0, 2048, 4096]
        assert api.service_is_clean
