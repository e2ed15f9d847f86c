"""Rules of tool calls: an answer calls the tools of a request in the form of the model's template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mstar_core.constraints.json_schemas import json_rule
from mstar_core.plugin.chat.format import ToolFormat
from mstar_core.plugin.chat.turns import Tool, ToolChoice

ANY: Final = "(?s:.*)"
MOST_CALLS: Final = 32
"""Most calls of one answer. Without a bound a model may call forever."""

MORE: Final = f"{{0,{MOST_CALLS - 1}}}"


def call_rules(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice) -> list[str]:
    """Return the rules of `calls`: one or several calls and nothing else. They need the terminal SPACE.

    `required` and `named`: the arguments obey the schemas. `auto`: those of strict tools obey them, others are any
    object.
    """
    is_single = not choice.parallel or choice.mode == "named"
    rest, _ = _sequences(form, is_single=is_single)
    begin = f"{quoted(form.begin)} " if form.begin else ""
    rules = ["calls: one" if is_single or form.is_list else f"calls: one (SPACE one){MORE}", f"one: {begin}{rest}"]
    return [*rules, *_each_call(form, tools, choice)]


def free_rules(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice) -> list[str]:
    """Return the rules of `body`: any text, but what begins as a call is one. They need the terminal SPACE."""
    rest, again = _sequences(form, is_single=not choice.parallel)
    if not form.begin:
        opener = r"\[" if form.is_list else r"\{"
        rules = [f"body: | TEXT | {again}", f"TEXT: /[ \\n]*[^ \\n{opener}]{ANY}/", f"one: {rest}"]
        return [*rules, *_each_call(form, tools, choice)]
    marker = "".join(f"\\{char}" if not char.isalnum() and char not in "_<>" else char for char in form.begin)
    rules = [
        f"body: TEXT | before {again}",
        f"before[suffix={quoted(form.begin)}]: /{ANY}/",
        f"TEXT: /{ANY}/ & ~/{ANY}{marker}{ANY}/",
        f"one: {quoted(form.begin)} {rest}",
    ]
    return [*rules, *_each_call(form, tools, choice)]


def quoted(text: str) -> str:
    """Return a text as a literal of a grammar."""
    return json.dumps(text)


def _sequences(form: ToolFormat, *, is_single: bool) -> tuple[str, str]:
    """Return what follows the first `begin`: of one call, or of a list of calls; and of all calls of the answer."""
    end = f"SPACE {quoted(form.end)}" if form.end else ""
    if form.is_list:
        more = "" if is_single else f'("," SPACE call){MORE} '
        rest = f'SPACE "[" call {more}"]" {end}'
        return rest, rest
    rest = f"SPACE call {end}"
    return rest, rest if is_single else f"{rest} (SPACE one){MORE}"


def _each_call(form: ToolFormat, tools: Sequence[Tool], choice: ToolChoice) -> list[str]:
    is_forced = choice.mode in ("required", "named")
    chosen = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(chosen)))}"]
    for number, tool in enumerate(chosen):
        rules += _call(form, number, tool, has_schema=is_forced or tool.strict)
    return rules


def _call(form: ToolFormat, number: int, tool: Tool, *, has_schema: bool) -> list[str]:
    """Return the rules of the calls of one tool."""
    head = f"{{{json.dumps(form.name_key)}: {json.dumps(tool.name)}, {json.dumps(form.arguments_key)}: "
    schema: Mapping[str, Any] = tool.parameters if has_schema else {"type": "object"}
    arguments = json_rule(schema, is_strict=has_schema and tool.strict)
    return [f"call_{number}: {quoted(head)} arguments_{number} {quoted('}')}", f"arguments_{number}: {arguments}"]
