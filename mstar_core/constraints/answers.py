"""Grammars of answers: thinking, if the template has it, and then a text in a form, tool calls, or either."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from llguidance import regex_to_lark

from mstar_core.constraints.content import ChosenText, ContentForm, JsonText, WrittenText
from mstar_core.constraints.json_schemas import json_rule
from mstar_core.constraints.tool_calls import ANY, call_rules, free_rules, quoted
from mstar_core.plugin.chat.format import ChatFormat
from mstar_core.plugin.chat.turns import Tool, ToolChoice

SPACE: Final = "SPACE: /[ \\n]{0,2}/"
OPTIONS: Final = '%llguidance {"no_forcing": true}'
"""A grammar of few bytes can force a text of gigabytes, which the compiler would write out before its first mask."""

SENT: Final = "sent"
"""Name of the grammar that a client has sent, within that of the answer."""


def of_answer(
    form: ChatFormat,
    *,
    content: ContentForm | None = None,
    tools: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
    begins_open: bool = False,
    most_thinking: int | None = None,
) -> str:
    """Return the grammar of an answer. begins_open: the prompt ends within the thinking. most_thinking: its characters.

    With `content`, the answer is such a text, or calls if the choice is `auto`. Without, `required` and `named` admit
    calls alone, and `auto` any text in which what begins as a call is one. Thinking comes before what is held.
    """
    choice = choice or ToolChoice()
    has_calls = bool(tools) and choice.mode != "none"
    if content is None and choice.mode == "auto":
        assert form.tools is not None
        return _joined(["start: body", *free_rules(form.tools, tools, choice), SPACE])
    rules = _thought(form, begins_open=begins_open, most=most_thinking)
    rules.append(f"body: {' | '.join((*(['content'] if content else []), *(['calls'] if has_calls else [])))}")
    if content is not None:
        rules.append(f"content: {_content(content)}")
    if has_calls:
        assert form.tools is not None
        rules += call_rules(form.tools, tools, choice)
    grammar = _joined([*rules, SPACE])
    if not isinstance(content, WrittenText) or content.form == "regex":
        return grammar
    return json.dumps({"grammars": [{"lark_grammar": grammar}, {"name": SENT, "lark_grammar": content.text}]})


def _joined(rules: Sequence[str]) -> str:
    return "\n".join([OPTIONS, *rules]) + "\n"


def _thought(form: ChatFormat, *, begins_open: bool, most: int | None) -> list[str]:
    """Return the rules of an answer with its thinking, of so many characters. Its end then is all that may follow."""
    if form.reasoning is None:
        return ["start: body"]
    begin = "" if begins_open else f"{quoted(form.reasoning.begin)} "
    return [
        f"start: {'thought body' if begins_open else 'thought? body'}",
        f"thought: {begin}inner SPACE",
        f"inner[suffix={quoted(form.reasoning.end)}]: /{ANY if most is None else f'(?s:.{{0,{most}}})'}/",
    ]


def _content(content: ContentForm) -> str:
    match content:
        case JsonText(schema=schema, is_strict=is_strict):
            return json_rule(schema, is_strict=is_strict)
        case ChosenText(texts=texts):
            return " | ".join(map(quoted, texts))
        case WrittenText(form="regex", text=text):
            return f"/{regex_to_lark(text, 'd')}/"  # digits are those of ASCII, as in JSON
        case WrittenText():
            return f"@{SENT}"
