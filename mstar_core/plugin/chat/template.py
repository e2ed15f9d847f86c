"""Renderer of chat templates: Jinja in its sandbox, with the names that templates of the hub use. For processors."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mstar_core.errors import RequestError, WeightsError
from mstar_core.plugin.chat.turns import Tool, Turn

Message = Mapping[str, Any]
"""A chat message in the form that templates read."""


class ChatTemplate:
    """A compiled template. A template is a program of the checkpoint's author, so it runs in Jinja's sandbox."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        """tokens: control tokens by name, such as `bos_token`. Raises WeightsError for a template that is broken."""
        self._tokens = tokens
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateError as error:
            raise WeightsError("the chat template is broken", str(error), "download the tokenizer again") from error

    def render(self, messages: Sequence[Message], tools: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Return the prompt with the start of the answer. Raises RequestError for what the template refuses."""
        try:
            return self._template.render(
                **self._tokens, **variables, messages=messages, tools=tools or None, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise RequestError(
                "the chat template of the model refuses these messages",
                str(error),
                "change the order or the roles of the messages",
                field="messages",
            ) from error


def message_of(turn: Turn, content: str, guard: Callable[[Any], Any]) -> Message:
    """Return a turn as the template reads it. guard: applied to all texts of the client (see `guarded`)."""
    message: dict[str, Any] = {"role": turn.role, "content": guard(content)}
    if turn.reasoning:
        message["reasoning_content"] = guard(turn.reasoning)
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": guard(call.id),
                "type": "function",
                "function": {"name": guard(call.name), "arguments": guard(json.loads(call.arguments))},
            }
            for call in turn.calls
        ]
    if turn.role == "tool":
        message |= {"tool_call_id": guard(turn.call_id), "name": guard(turn.name)}
    return message


def function_of(tool: Tool, guard: Callable[[Any], Any]) -> Message:
    """Return a tool as the template reads it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": guard(function)}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    # Jinja's own filter escapes HTML characters.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)  # noqa: DTZ005 local
    return environment


class Generation(Extension):
    """`{% generation %}`: marks answers for training. The text inside is written as it is."""

    tags = {"generation"}  # noqa: RUF012 declared so by its base

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the inner nodes."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
