"""Processor of the omni fake whose context has little room."""

from __future__ import annotations

from mstar_core.errors import RequestError
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes import omni_model

ROOM = 100
LONG_ROOM = 400


class Processor(omni_model.Processor):
    """Refuses longer prompts as real processors do."""

    room = ROOM

    def process_prompt(self, request: PromptRequest) -> Inputs:
        inputs = super().process_prompt(request)
        if inputs.prompt_tokens > self.room:
            raise RequestError("the prompt is too long", field="messages", code="context_length_exceeded")
        return inputs


class LongProcessor(Processor):
    """The same with more room."""

    room = LONG_ROOM
