"""Answers of a request as they arrive: parts of the text of each item, with ids of calls, and its other outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import pybase64

from mstar_core.api.exchange import Exchange
from mstar_core.api.group import GroupPart
from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.parse.params import ParsedRequest
from mstar_core.plugin.chat.parser import AnswerParser
from mstar_core.plugin.chat.parts import Part

ID_CHARS = 9
"""Length of the id of a call. Templates of Mistral accept no other, and only letters and digits."""


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A chunk of an answer, and the parts that its text completes. chunk: None for parts held back until the end."""

    chunk: EncodedChunk | None
    parts: Sequence[Part] = ()


class AnswerReader:
    """Reader of one answer. key: of the request and the item, from which the ids of calls follow."""

    def __init__(self, parser: AnswerParser, key: str) -> None:
        self.reasoning_tokens = 0
        self._parser = parser
        self._key = key

    @property
    def calls(self) -> int:
        """Return the number of calls so far."""
        return self._parser.calls

    def call_id(self, index: int) -> str:
        """Return the id of a call, the same whenever the answer is repeated."""
        digest = hashlib.blake2b(f"{self._key}/{index}".encode()).digest()
        letters = pybase64.b64encode_as_string(digest).translate({ord(char): None for char in "+/="})
        return letters[:ID_CHARS]

    def read(self, piece: GroupPart) -> list[AnswerPiece]:
        """Return the pieces of one part of a group, with the last ones if it ends the item."""
        pieces = [AnswerPiece(chunk, self._text(chunk) if chunk.modality == "text" else ()) for chunk in piece.chunks]
        if piece.done is not None and (parts := self._parser.flush()):
            pieces.append(AnswerPiece(None, parts))
        return pieces

    def _text(self, chunk: EncodedChunk) -> list[Part]:
        was_thinking = self._parser.is_thinking
        parts = self._parser.push(chunk.data.decode())
        if was_thinking or self._parser.is_thinking:
            self.reasoning_tokens += chunk.tokens
        return parts


def answer_readers(exchange: Exchange, call: ParsedRequest, count: int) -> list[AnswerReader]:
    """Return a reader for each of the `count` items of a chat request."""
    form, options = exchange.service.model.chat, call.chat
    choice = options.choice
    names = [tool.name for tool in options.tools] if choice.mode != "none" else []
    return [
        AnswerReader(
            AnswerParser(
                form,
                tools=[choice.name] if choice.mode == "named" else names,
                begins_open=options.begins_open,
                is_single=not choice.parallel,
                is_constrained=options.constraint is not None,
            ),
            f"{exchange.request_id}/{exchange.created}/{index}",
        )
        for index in range(count)
    ]
