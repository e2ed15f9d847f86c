"""Chat template of a checkpoint as text, and the form of tool calls and thinking that it shows. Imports no Jinja.

Models write calls and thinking as their template shows them, so the form follows from the text of the template.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from mstar_core.plugin.chat.format import HERMES, LLAMA, MISTRAL, ChatFormat, Effort, ReasoningFormat, ToolFormat
from mstar_core.plugin.json_fields import JsonFields

TEMPLATE: Final = "chat_template.jinja"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"


def read_template(folder: Path) -> str:
    """Return the chat template of a checkpoint; empty if it has none. A file of its own comes first, as on the hub."""
    file = folder / TEMPLATE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = JsonFields.read_if_any(folder / TOKENIZER_CONFIG).get("chat_template", "")
    if isinstance(template, list):  # several templates by name
        named = {each["name"]: each["template"] for each in template}
        template = named.get("tool_use") or named.get("default", "")
    return str(template)


def named_tokens(folder: Path) -> dict[str, str]:
    """Return the control tokens that templates name: of tokenizer_config.json, as texts or objects with `content`."""
    fields = JsonFields.read_if_any(folder / TOKENIZER_CONFIG)
    named = {name: fields.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


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
