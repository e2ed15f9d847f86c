"""Parts of an answer: content, thinking and tool calls. Made by the parser of answers, read by the api's routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the thinking before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins. index: its number in the answer."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Text of a call's arguments, which joined are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call is complete."""

    index: int


Part = Content | Reasoning | CallBegin | CallArguments | CallEnd


def merged(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with adjacent texts of one kind joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and last.index == part.index:
            joined[-1] = CallArguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined
