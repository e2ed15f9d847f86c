"""Generated ids in a rendered chat template: a mark stands for an answer, and its ids take the place of the mark.

Used by processors for `Turn.ids`. Text of the client cannot be a mark: it would have to hold its number in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from mstar_core.plugin.chat.template import Message

MARK: Final = "\ufdd1"
"""A noncharacter of Unicode, around the number of a message."""


def with_marks(messages: Sequence[Message], answers: Mapping[int, Sequence[int]]) -> list[Message]:
    """Return messages with marks as the contents of the answers, which are given by their places."""
    return [
        {**message, "content": _mark(place)} if place in answers else message for place, message in enumerate(messages)
    ]


def encoded_with(
    prompt: str, answers: Mapping[int, Sequence[int]], encode: Callable[[str], Sequence[int]]
) -> list[int] | None:
    """Return the ids of a rendered prompt with answers at their marks.

    None if the template has changed a mark or left it out, or writes a space before an answer, which belongs to the
    first token of the text behind it.
    """
    ids: list[int] = []
    for place, answer in answers.items():
        before, mark, prompt = prompt.partition(_mark(place))
        if not mark or before.endswith(" ") or MARK in before:
            return None
        ids += [*encode(before), *answer]
    return None if MARK in prompt else [*ids, *encode(prompt)]


def _mark(place: int) -> str:
    return f"{MARK}{place}{MARK}"
