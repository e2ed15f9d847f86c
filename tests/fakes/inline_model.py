"""The small speech model with an inline processor; outputs tell which process prepared the prompt."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final

from mstar_core.api.preprocess.pool import INLINE_BYTES
from mstar_core.errors import WeightsError
from mstar_core.plugin import ModelSpec, TensorData
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes.speech_model import SPEC as SPEECH
from tests.fakes.speech_model import Processor as SpeechProcessor

SLOW: Final = "slow: "
"""Texts with this prefix do not run inline."""

WRONG: Final = "wrong"
"""For this text the processor fails to decide."""


class Processor(SpeechProcessor):
    """Texts run inline. model_kwargs: `lacks` disables the warm-up; `inline_bytes` sets the size limit."""

    is_warm = False

    @property
    def inline_bytes(self) -> int:
        return int(self.kwargs.get("inline_bytes", INLINE_BYTES))

    def warm_up(self) -> None:
        if "lacks" in self.kwargs:
            raise WeightsError("the tokenizer is missing")
        self.is_warm = True

    def is_inline(self, request: PromptRequest) -> bool:
        assert self.is_warm and request.text != WRONG
        return not (request.text or "").startswith(SLOW)

    def process_prompt(self, request: PromptRequest) -> Inputs:
        made = super().process_prompt(request)
        facts: dict[str, Any] = {"pid": os.getpid()}
        return dataclasses.replace(made, metadata={"audio": facts})


SPEC: Final[ModelSpec] = dataclasses.replace(
    SPEECH, name="fake_quick", inputs=(*SPEECH.inputs, TensorData()), processor="tests.fakes.inline_model:Processor"
)
