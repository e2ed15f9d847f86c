"""Calls and their results among the messages of a chat: their fields, and the order in which they may follow."""

from __future__ import annotations

from collections.abc import Sequence

from mstar_core.api.http.strict_json import parse_object
from mstar_core.api.parse.capabilities import check_capability
from mstar_core.api.parse.tools import check_tool_name
from mstar_core.api.schema import ChatMessage, ChatToolCall, TextPart
from mstar_core.errors import RequestError
from mstar_core.plugin.chat.call_reader import NO_ARGUMENTS
from mstar_core.plugin.chat.turns import ToolCall
from mstar_core.plugin.spec import ModelSpec


class CallOrder:
    """Calls of a conversation, message by message. Every call needs its result in the messages right behind it."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._open: dict[str, tuple[str, str]] = {}  # id -> name and place of a call without a result
        self._answered: set[str] = set()  # ids of the last message with calls

    def calls(self, message: ChatMessage, place: str) -> tuple[ToolCall, ...]:
        """Return the calls of a message of another role than `tool`. Raises RequestError."""
        self.end()
        if message.tool_call_id is not None:
            raise RequestError(
                f"a message of the role {message.role} has no tool_call_id", field=f"{place}.tool_call_id"
            )
        if not message.tool_calls:
            return ()
        if message.role != "assistant":
            raise RequestError(f"a message of the role {message.role} has no tool_calls", field=f"{place}.tool_calls")
        check_capability(self._spec, "tools", f"{place}.tool_calls")
        self._answered.clear()
        return tuple(
            self._call(call, f"{place}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls)
        )

    def result(self, message: ChatMessage, place: str) -> tuple[str, str]:
        """Return the id and the name of the call that a message of the role `tool` answers. Raises RequestError."""
        check_capability(self._spec, "tools", f"{place}.role")
        if message.tool_calls:
            raise RequestError("a message of the role tool has no tool_calls", field=f"{place}.tool_calls")
        field = f"{place}.tool_call_id"
        if message.tool_call_id is None:
            raise RequestError(f"{field} is missing", hint="give the id of a call", field=field, code="missing_field")
        if message.content is None:
            raise RequestError(f"{place}.content is missing", field=f"{place}.content", code="missing_field")
        if isinstance(message.content, list) and not all(isinstance(part, TextPart) for part in message.content):
            raise RequestError("the result of a call must be text", field=f"{place}.content")
        if message.tool_call_id not in self._open:
            shown = message.tool_call_id[:80]
            problem = "is answered already" if shown in self._answered else "is not a call of the message before"
            raise RequestError(f"{shown!r} {problem}", hint=f"calls without a result: {self._listed}", field=field)
        name, _ = self._open.pop(message.tool_call_id)
        self._answered.add(message.tool_call_id)
        return message.tool_call_id, name

    def end(self) -> None:
        """Raise RequestError if a call has no result, although another message, or the end, follows."""
        for call, (_, place) in self._open.items():
            raise RequestError(
                f"the call {call[:80]!r} has no result",
                hint="a message of the role tool must follow for each call, before any other message",
                field=place,
            )

    @property
    def _listed(self) -> str:
        return ", ".join(repr(call[:80]) for call in list(self._open)[:8]) or "none"

    def _call(self, call: ChatToolCall, place: str) -> ToolCall:
        check_tool_name(call.function.name, f"{place}.function.name")
        if not call.id or call.id in self._open:
            problem = "is the id of two calls" if call.id else "is empty"
            raise RequestError(f"{place}.id {problem}", field=f"{place}.id")
        arguments = call.function.arguments.strip() or NO_ARGUMENTS
        parse_object(arguments, f"{place}.function.arguments")
        self._open[call.id] = (call.function.name, place)
        return ToolCall(id=call.id, name=call.function.name, arguments=arguments)


def texts_of(calls: Sequence[ToolCall]) -> list[str]:
    """Return the texts of calls that a template writes out."""
    return [text for call in calls for text in (call.name, call.arguments)]
