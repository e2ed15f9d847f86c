"""A model whose prompts are divided at bars into parts that may run side by side: ids are bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from mstar_core.plugin import ModelSpec, Text, param
from mstar_core.plugin.plain_text import ByteDetokenizer
from mstar_core.plugin.processor import InputPart, Inputs, PromptRequest
from tests.fakes.speech_model import SPEC as SPEECH
from tests.fakes.speech_model import Processor as SpeechProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    at_once: int = param(1, "parts that run side by side", ge=1, le=64)


SPEC: Final[ModelSpec] = replace(
    SPEECH,
    name="fake_divided",
    aliases=(),
    inputs=(Text(),),
    outputs=(Text(),),
    params=Params,
    routes=frozenset(),
    at_once="at_once",
    processor="tests.fakes.divided_model:Processor",
)


class Processor(SpeechProcessor):
    """Reads a text with bars. Each part knows its number."""

    def process_prompt(self, request: PromptRequest) -> Inputs:
        inputs = super().process_prompt(request)
        words, spans, start = (request.text or "").split("|"), [], 0
        for word in words:
            spans.append((start, start + len(word)))
            start += len(word) + 1
        parts = [InputPart(spans={"tokens": span}, facts={"part": number}) for number, span in enumerate(spans)]
        return replace(inputs, parts=parts if len(parts) > 1 else (), usage={"bars": len(parts) - 1})

    def detokenizer(self) -> ByteDetokenizer:  # type: ignore[override]  # the other one strips nothing
        return ByteDetokenizer(lambda number: bytes([number]), strips_space=True)
