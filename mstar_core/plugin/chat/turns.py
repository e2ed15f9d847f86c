"""Turns of a conversation, and the tools that its answer may call. Made by the api's routes, read by processors."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that an answer made. arguments: JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that an answer may call.

    parameters: JSON schema of an object. strict: the arguments must obey it, whatever the choice of tools.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Choice of the tools that an answer calls. name: of the mode `named`. parallel: it may make several calls."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A chat message. order: its parts, as in `PromptRequest.order`.

    reasoning: thinking of an earlier answer. calls: those that an earlier answer made. call_id, name: of the call that
    a turn of the role `tool` answers; the name is that of the function, if it is known.
    ids: those that the model generated for the text of this turn, if it is an answer of the same session. A processor
    that uses them in place of the text repeats the answer exactly, see `generated_ids`.
    """

    role: Role
    order: Sequence[tuple[str, int]] = ()
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    call_id: str = ""
    name: str = ""
    ids: Sequence[int] = ()


def generated_ids(turn: Turn, control: Container[int]) -> list[int]:
    """Return the ids that the model generated for the text of an answer, without those that ended it.

    control: ids of control tokens. Empty if the ids are not known, or if control tokens are among them.
    """
    ids = list(turn.ids)
    while ids and ids[-1] in control:
        ids.pop()
    return [] if any(value in control for value in ids) else ids
