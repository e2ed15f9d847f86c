"""Answers of a conversation: content, thinking and tool calls. Made from whole responses of the chat route."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mstar_core.client.errors import ClientError


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function that an answer calls. arguments: JSON text of an object."""

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name. Raises ClientError if the limit of tokens has cut them off."""
        try:
            values = json.loads(self.arguments)
        except ValueError as error:
            detail = f"the arguments of {self.name} are {self.arguments[:80]!r}"
            raise ClientError(
                "the call is not complete", detail, "raise max_output_tokens", code="malformed"
            ) from error
        return dict(values)

    def result(self, content: str) -> dict[str, Any]:
        """Return the message that answers this call."""
        return {"role": "tool", "tool_call_id": self.id, "content": content}


@dataclass(frozen=True, slots=True)
class ChatResult:
    """An answer of a conversation. content: empty beside calls. reasoning: empty unless the model thinks.

    message: the answer as a message of the conversation. finish_reason: `stop`, `length` or `tool_calls`.
    """

    content: str
    reasoning: str = ""
    tool_calls: list[FunctionCall] = field(default_factory=list)
    message: Mapping[str, Any] = field(default_factory=dict, repr=False)
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


def chat_fields(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, params: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a chat request. tools: as the API has them, or functions alone."""
    sent = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools or ()]
    given = {name: value for name, value in params.items() if value is not None}
    return {"messages": list(messages), **({"tools": sent} if sent else {}), **given}


def chat_result_of(body: Mapping[str, Any]) -> ChatResult:
    """Return the first answer of a response. Raises ClientError for a response without any."""
    choices = body.get("choices")
    if not choices:
        raise ClientError("the response has no answer", hint="check the address", code="malformed")
    message, content = choices[0]["message"], choices[0]["message"].get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return ChatResult(
        content="".join(part.get("text") or "" for part in parts),
        reasoning=message.get("reasoning_content") or "",
        tool_calls=[
            FunctionCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ],
        message={name: value for name, value in message.items() if value is not None and name != "audio"},
        finish_reason=choices[0].get("finish_reason"),
        usage=body.get("usage"),
        raw=body,
    )
