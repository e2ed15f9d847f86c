"""Processor of the omni fake whose context has room for 100 ids."""

from __future__ import annotations

from mstar_core.errors import RequestError
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes import omni_model

ROOM = 100


class Processor(omni_model.Processor):
    """Refuses longer prompts as real processors do."""

    def process_prompt(self, request: PromptRequest) -> Inputs:
        inputs = super().process_prompt(request)
        if inputs.prompt_tokens > ROOM:
            raise RequestError("the prompt is too long", field="messages", code="context_length_exceeded")
        return inputs
