"""The api loads what its first text needs before it is ready: a large tokenizer would hold its event loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mstar_core.errors import WeightsError
from tests.api.conftest import Started
from tests.fakes import omni_model


class Processor(omni_model.Processor):
    """A processor that loads its tokenizer lazily. model_kwargs: `lacks` makes that fail."""

    loaded: ClassVar[list[Processor]] = []

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        super().__init__(folder, model_kwargs)
        self.loaded.clear()

    def warm_up(self) -> None:
        if "lacks" in self.kwargs:
            raise WeightsError("the tokenizer is missing")
        self.loaded.append(self)


MODEL = dataclasses.replace(omni_model.SPEC, processor="tests.api.test_text_warmup:Processor")


async def test_the_tokenizer_of_texts_is_read_before_ready(started: Started) -> None:
    async with started(model=MODEL) as api:
        (warmed,) = Processor.loaded
        assert warmed is api.process._text_processor


async def test_a_tokenizer_that_cannot_be_read_is_left_to_the_requests(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(model=MODEL, model_kwargs={"lacks": "the tokenizer"}):
        assert "could not be warmed up" in caplog.text
