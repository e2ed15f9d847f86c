"""Grammars of tool calls: an answer calls the tools of a request in the form of the model's template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher

from mstar_core.plugin.chat.format import ChatFormat, ToolFormat
from mstar_core.plugin.chat.turns import Tool, ToolChoice

SPACE: Final = "SPACE: /[ \\n]{0,2}/"
ANY: Final = "(?s:.*)"
LENIENT: Final = {"x-guidance": {"lenient": True}}
"""Keywords that the compiler does not know are left out, for tools that are not strict."""


def of_tool_calls(form: ChatFormat, tools: Sequence[Tool], choice: ToolChoice, *, begins_open: bool = False) -> str:
    """Return the grammar of an answer. begins_open: the prompt ends within the thinking.

    `required` and `named`: the answer consists of calls, with thinking before them, and their arguments obey the
    schemas. `auto`: the answer is any text, but what begins as a call is one; arguments of strict tools obey their
    schemas, those of others are any object.
    """
    assert form.tools is not None
    is_forced = choice.mode in ("required", "named")
    chosen = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    lines = [_body(form.tools, is_forced=is_forced, is_single=not choice.parallel or choice.mode == "named")]
    if not is_forced:
        lines.insert(0, "start: body")
    elif form.reasoning is not None:
        begin = "" if begins_open else f"{_text(form.reasoning.begin)} "
        lines.insert(0, f"start: {'thought body' if begins_open else 'thought? body'}")
        lines += [f"thought: {begin}inner SPACE", f"inner[suffix={_text(form.reasoning.end)}]: /{ANY}/"]
    else:
        lines.insert(0, "start: body")
    lines += [SPACE, f"call: {' | '.join(f'call_{number}' for number in range(len(chosen)))}"]
    for number, tool in enumerate(chosen):
        lines += _call(form.tools, number, tool, has_schema=is_forced or tool.strict)
    return "\n".join(lines) + "\n"


def problem_of(constraint: str) -> str:
    """Return why a grammar cannot be compiled; empty if it can. May take 100 ms, outside of the interpreter lock."""
    return str(LLMatcher.validate_grammar(constraint, None) or "")


def _body(form: ToolFormat, *, is_forced: bool, is_single: bool) -> str:
    """Return the rules of the answer behind its thinking."""
    begin, end = (f"{_text(text)} " if text else "" for text in (form.begin, form.end))
    if form.is_list:
        inner = 'SPACE "[" call ' + ("" if is_single else '("," SPACE call)* ') + '"]"'
        rest = again = f"{inner} {f'SPACE {end}' if end else ''}"
        one = f"{begin}{rest}"
    else:
        rest = f"SPACE call {f'SPACE {end}' if end else ''}"
        one = f"{begin}{rest}"
        again = rest if is_single else f"{rest} (SPACE one)*"
    rules = [f"one: {one}"]
    if is_forced:
        return "\n".join([f"body: {one if is_single or form.is_list else 'one (SPACE one)*'}", *rules])
    if not form.begin:
        opener = r"\[" if form.is_list else r"\{"
        return "\n".join([f"body: | TEXT | {again}", f"TEXT: /[ \\n]*[^ \\n{opener}]{ANY}/", *rules])
    marker = "".join(f"\\{char}" if not char.isalnum() and char not in "_<>" else char for char in form.begin)
    return "\n".join(
        [
            f"body: TEXT | before {again}",
            f"before[suffix={_text(form.begin)}]: /{ANY}/",
            f"TEXT: /{ANY}/ & ~/{ANY}{marker}{ANY}/",
            *rules,
        ]
    )


def _call(form: ToolFormat, number: int, tool: Tool, *, has_schema: bool) -> list[str]:
    """Return the rules of the calls of one tool."""
    head = f"{{{json.dumps(form.name_key)}: {json.dumps(tool.name)}, {json.dumps(form.arguments_key)}: "
    schema: Mapping[str, Any] = {"type": "object"}
    if has_schema:
        schema = dict(tool.parameters) if tool.strict else {**tool.parameters, **LENIENT}
    arguments = f"arguments_{number}: %json {json.dumps(schema)}"
    return [f"call_{number}: {_text(head)} arguments_{number} {_text('}')}", arguments]


def _text(text: str) -> str:
    return json.dumps(text)
