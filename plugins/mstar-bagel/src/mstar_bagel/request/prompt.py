"""Token ids of text segments, in the reference's layout and in ChatML. Source: the specification, section 6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from mstar_bagel.checkpoint.config import ControlIds
    from mstar_bagel.request.tokenizer import TextTokenizer

THINK_TO_ANSWER: Final = (
    "You should first think about the reasoning process in the mind and then provide the user with the answer. \n"
    "The reasoning process is enclosed within <think> </think> tags, "
    "i.e. <think> reasoning process here </think> answer here"
)
THINK_TO_PAINT: Final = (
    "You should first think about the planning process in the mind and then generate the image. \n"
    "The planning process is enclosed within <think> </think> tags, "
    "i.e. <think> planning process here </think> image here"
)
ANSWERS: Final = "assistant\n"
"""Header of an answer in ChatML, after the start id."""


class PromptIds:
    """Ids of text segments. Made once per pool process."""

    def __init__(self, tokenizer: TextTokenizer, ids: ControlIds) -> None:
        self._tokenizer = tokenizer
        self._ids = ids

    def text(self, text: str) -> list[int]:
        """Return a text segment: start id, text, end id."""
        return [self._ids.start, *self._tokenizer.encode(text), self._ids.end]

    def message(self, role: str, text: str) -> list[int]:
        """Return a ChatML message with its line end."""
        return [*self.text(f"{role}\n{text}"), *self._tokenizer.encode("\n")]

    def answer(self) -> list[int]:
        """Return the header of an answer in ChatML. Decoding starts from its last id."""
        return [self._ids.start, *self._tokenizer.encode(ANSWERS)]


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    """Return the ids of all parts, in order."""
    return [token for part in parts for token in part]
