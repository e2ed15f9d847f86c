"""Processor of a model whose template shows tools, calls, their results and thinking, for api tests."""

from __future__ import annotations

import numpy as np

from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.processor import Inputs, PromptRequest
from tests.fakes import omni_model


class Processor(omni_model.Processor):
    """One id per byte of the formatted prompt: `{tools}`, then `<role>(thinking)text[call arguments]` for each turn."""

    def process_prompt(self, request: PromptRequest) -> Inputs:
        tools = "" if request.tool_choice.mode == "none" else "".join(f"{{{tool.name}}}" for tool in request.tools)
        laid = tools + "".join(self._turn(request, turn) for turn in request.turns) + "<assistant>"
        ids = np.frombuffer(laid.encode(), dtype=np.uint8).astype(np.int64)
        return Inputs(arrays={"tokens": ids}, prompt_tokens=len(ids))

    def _turn(self, request: PromptRequest, turn: Turn) -> str:
        thinking = f"({turn.reasoning})" if turn.reasoning else ""
        calls = "".join(f"[{call.name} {call.arguments}]" for call in turn.calls)
        name = f"{turn.name}: " if turn.name else ""
        return f"<{turn.role}>{thinking}{name}{self._words(request, turn.order)}{calls}"
