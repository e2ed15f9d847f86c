"""Tools of a request, the choice among them, and the effort of thinking. Used by the chat routes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mstar_core.api.parse.capabilities import check_capability
from mstar_core.errors import RequestError, TooLarge, did_you_mean
from mstar_core.plugin.chat.format import Effort
from mstar_core.plugin.chat.turns import Tool, ToolChoice
from mstar_core.plugin.spec import ModelSpec

MOST_TOOLS: Final = 128
NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NAME_RULE: Final = "1 to 64 of the characters a-z, A-Z, 0-9, _ and -"


@dataclass(frozen=True, slots=True, kw_only=True)
class SentTool:
    """A tool as a client sends it. place: its field in the body."""

    place: str
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of an answer beside plain text. template: variables of the chat template.

    begins_open: the prompt ends within the thinking. thinks: the answer may begin with thinking, if the template has
    it. constraint: grammar that holds the answer, None without one.
    """

    tools: Sequence[Tool] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    template: Mapping[str, Any] = field(default_factory=dict)
    begins_open: bool = False
    thinks: bool = True
    constraint: str | None = None


def read_tools(
    spec: ModelSpec, sent: Sequence[SentTool], choice: ToolChoice, outputs: Sequence[str], max_bytes: int
) -> list[Tool]:
    """Return the tools of a request. choice: with a name, or the mode `required`, it needs tools.

    Raises RequestError, TooLarge.
    """
    if not sent:
        if choice.mode in ("required", "named"):
            raise RequestError("tool_choice needs tools", hint="send tools, or omit it", field="tool_choice")
        return []
    check_capability(spec, "tools", "tools")
    if tuple(outputs) != ("text",):
        others = ", ".join(name for name in outputs if name != "text")
        raise RequestError(
            f"tools are not supported together with {others}",
            hint="omit tools, or ask for text alone",
            field="tools",
            code="unsupported_parameter",
        )
    if len(sent) > MOST_TOOLS:
        raise RequestError(f"the request has more than {MOST_TOOLS} tools", field="tools", allowed=f"<= {MOST_TOOLS}")
    tools: dict[str, Tool] = {}
    for tool in sent:
        if tool.strict:
            check_capability(spec, "structured_outputs", f"{tool.place}.strict")
        tools[tool.name] = _tool(tool, known=tools)
    if len(msgspec.json.encode([dict(tool.parameters) for tool in tools.values()])) > max_bytes:
        raise TooLarge(f"the tools have more than {max_bytes} bytes", field="tools", code="body_too_large")
    if choice.mode == "named" and choice.name not in tools:
        raise RequestError(
            f"tool_choice names {choice.name[:80]!r}, which is not one of the tools",
            hint=did_you_mean(choice.name[:80], list(tools)),
            field="tool_choice",
            code="invalid_value",
        )
    return list(tools.values())


def _tool(sent: SentTool, known: Mapping[str, Tool]) -> Tool:
    check_tool_name(sent.name, f"{sent.place}.name")
    if sent.name in known:
        raise RequestError(f"two tools have the name {sent.name}", hint="rename one", field=f"{sent.place}.name")
    tool = Tool(name=sent.name, description=sent.description or "", strict=bool(sent.strict))
    if not sent.parameters:
        return tool
    kind = sent.parameters.get("type")
    if kind != "object":
        problem = "have no type" if kind is None else f"are of the type {json.dumps(kind)[:40]}"
        raise RequestError(
            f"the parameters of {sent.name} {problem}",
            hint='they must be a JSON schema of the type "object"',
            field=f"{sent.place}.parameters",
            allowed='{"type": "object"}',
        )
    return Tool(name=sent.name, description=tool.description, parameters=dict(sent.parameters), strict=tool.strict)


def check_tool_name(name: str, place: str) -> None:
    """Raise RequestError for a name that no function may have."""
    if not NAME.fullmatch(name):
        raise RequestError(
            f"{place} is {name[:80]!r}, but a name must have {NAME_RULE}", field=place, allowed=f"^{NAME.pattern}$"
        )


def read_effort(spec: ModelSpec, effort: Effort | None, field_name: str) -> tuple[Mapping[str, Any], bool]:
    """Return the variables of the template for an effort of thinking, and whether the prompt ends within the thinking.

    `none` is accepted for every model that never thinks. Raises RequestError.
    """
    reasoning = spec.chat.reasoning
    if reasoning is None:
        if effort not in (None, "none"):
            check_capability(spec, "reasoning", field_name)
        return {}, False
    if effort is None:
        return {}, reasoning.begins_open
    if effort not in reasoning.efforts:
        check_capability(spec, "reasoning_effort", field_name)
        allowed = ", ".join(reasoning.efforts)
        raise RequestError(
            f"{field_name} is {effort}, which the model does not have",
            hint=f"allowed: {allowed}",
            field=field_name,
            allowed=allowed,
            code="unsupported_parameter",
        )
    return reasoning.efforts[effort], reasoning.begins_open and effort != "none"
