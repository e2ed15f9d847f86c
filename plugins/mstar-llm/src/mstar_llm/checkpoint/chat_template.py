"""The chat template of a checkpoint as text, and what it says about tool calls and thinking. Standard library only.

Models write tool calls and thinking in the form that their template shows them, so the form follows from its text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mstar_core.plugin.chat.format import ChatFormat, Effort, ReasoningFormat, ToolFormat
from mstar_llm.checkpoint.config import Fields

TEMPLATE: Final = "chat_template.jinja"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"

HERMES: Final = ToolFormat(begin="<tool_call>", end="</tool_call>")
"""Source: Qwen 2.5 and 3, Hermes."""

MISTRAL: Final = ToolFormat(begin="[TOOL_CALLS]", end="", is_list=True)
LLAMA: Final = ToolFormat(begin="", end="", arguments_key="parameters")


def read_template(folder: Path) -> str:
    """Return the chat template of a checkpoint; empty if it has none. A file of its own comes first, as on the hub."""
    file = folder / TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not (folder / TOKENIZER_CONFIG).is_file():
        return ""
    template = Fields.read(folder / TOKENIZER_CONFIG).get("chat_template", "")
    if isinstance(template, list):  # several templates by name
        named = {each["name"]: each["template"] for each in template}
        template = named.get("tool_use") or named.get("default", "")
    return str(template)


def chat_format(template: str) -> ChatFormat:
    """Return the form of tool calls and thinking in a template."""
    return ChatFormat(tools=_tools(template), reasoning=_reasoning(template))


def _tools(template: str) -> ToolFormat | None:
    if HERMES.begin in template:
        return HERMES
    if MISTRAL.begin in template:
        return MISTRAL
    return LLAMA if re.search(r"""["']parameters["']: ?""", template) and "tool_call" in template else None


def _reasoning(template: str) -> ReasoningFormat | None:
    plain = ReasoningFormat()
    if plain.begin not in template:
        return None
    start = template.rpartition("add_generation_prompt")[2]
    if "enable_thinking" in template:
        think = {"enable_thinking": True}
        efforts: dict[Effort, dict[str, bool]] = {
            "none": {"enable_thinking": False},
            "low": think,
            "medium": think,
            "high": think,
        }
        return ReasoningFormat(efforts=efforts)
    return ReasoningFormat(begins_open=plain.begin in start and plain.end not in start)
