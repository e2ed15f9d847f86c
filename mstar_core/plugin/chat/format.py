"""Form of thinking and tool calls in a chat template: facts from which parsers and grammars follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""Amount of thinking before an answer, in the terms of OpenAI."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Text of tool calls: `begin`, one JSON object {name_key: ..., arguments_key: {...}}, `end`; again for each call.

    is_list: `begin` and `end` enclose one JSON list of all calls instead. With an empty `begin`, an answer that starts
    with `{` is a call.
    """

    begin: str
    end: str
    name_key: str = "name"
    arguments_key: str = "arguments"
    is_list: bool = False


HERMES: Final = ToolFormat(begin="<tool_call>", end="</tool_call>")
"""Source: Hermes, Qwen 2.5 and 3."""

MISTRAL: Final = ToolFormat(begin="[TOOL_CALLS]", end="", is_list=True)
LLAMA: Final = ToolFormat(begin="", end="", arguments_key="parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """Text of thinking: between `begin` and `end`, before the answer.

    begins_open: the prompt ends within the thinking, so the answer starts without `begin`. efforts: variables of the
    template for each effort that the model can have; others are refused.
    """

    begin: str = "<think>"
    end: str = "</think>"
    begins_open: bool = False
    efforts: Mapping[Effort, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """Offer of a text head to the chat routes beside plain text. None: nothing of this kind."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that parsers look for. Detokenizers write them out even if they are control tokens."""
        tools = (self.tools.begin, self.tools.end) if self.tools is not None else ()
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning is not None else ()
        return tuple(text for text in (*tools, *reasoning) if text)
