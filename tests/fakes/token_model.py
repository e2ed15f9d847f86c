"""A model of raw prompts: ids are bytes, 256 begins a text, and the vector of a prompt counts its ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mstar_core.errors import RequestError
from mstar_core.messages.requests import NewRequest
from mstar_core.plugin import Embedding, ModelSpec, Text
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes.conductor import FakeDeployment
from tests.fakes.omni_model import TEXT_ONLY
from tests.fakes.omni_model import Processor as OmniProcessor
from tests.fakes.speech_model import Utf8

BEGIN: Final = 256
BEGIN_TEXT: Final = "<s>"
DIM: Final = 4

SPEC: Final[ModelSpec] = replace(
    TEXT_ONLY,
    name="fake_tokens",
    inputs=(Text(),),
    outputs=(Text(), Embedding(dim=DIM)),
    routes=frozenset({"chat", "completion", "embedding", "tokenize"}),
    processor="tests.fakes.token_model:Processor",
)


class Processor(OmniProcessor):
    """Reads raw prompts and conversations."""

    def process_prompt(self, request: PromptRequest) -> Inputs:
        ids = self.tokenize(request, adds_special=True)
        if not ids:
            raise RequestError("the prompt is empty", field="text")
        if len(ids) > request.max_seq_len:
            raise RequestError("the prompt is too long", field="text", code="context_length_exceeded")
        return Inputs(arrays={"tokens": np.array(ids, dtype=np.int64)}, prompt_tokens=len(ids))

    def tokenize(self, request: PromptRequest, *, adds_special: bool) -> Sequence[int]:
        if not request.is_raw:
            return [int(value) for value in super().process_prompt(request).arrays["tokens"]]
        if request.ids:
            self.spell(request.ids)
            return request.ids
        text = (request.text or "").encode()
        return [*([BEGIN] if adds_special and text else []), *text]

    def spell(self, ids: Sequence[int]) -> Sequence[bytes]:
        wrong = next((token for token in ids if token > BEGIN), None)
        if wrong is not None:
            raise RequestError(f"{wrong} is not the id of a token", field="ids", value=wrong)
        return [BEGIN_TEXT.encode() if token == BEGIN else bytes([token]) for token in ids]

    def detokenizer(self) -> Utf8:
        return Utf8()


def prompt_ids(fake: FakeDeployment, request: NewRequest) -> list[int]:
    """Return the ids that the model reads."""
    return [int(value) for value in fake.input(request, "tokens")]


def vector_of(ids: Sequence[int]) -> Any:
    """Return the vector of a prompt, float32 [DIM], length 1."""
    raw = np.array([len(ids), sum(ids) % 7, ids[-1] % 5, 1], dtype=np.float64)
    return (raw / np.linalg.norm(raw)).astype(np.float32)


def serve(fake: FakeDeployment, request: NewRequest) -> None:
    """Script: the vector of a prompt; or its text in upper case with the seed, one id at a time."""
    ids = prompt_ids(fake, request)
    if "embedding" in request.outputs:
        fake.output(request.handle, "embedding", vector_of(ids), port="vector")
        fake.finish(request.handle)
        return
    text = bytes(value for value in ids if value < BEGIN).decode().upper()
    for byte in f"{text}/{request.seed}".encode():
        fake.text(request.handle, bytes([byte]))
    fake.finish(request.handle)
