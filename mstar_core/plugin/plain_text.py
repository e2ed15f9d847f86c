"""Plain text of tokenizers: a client's text as plain letters, and the bytes of ids as text.

Used by processors; imports no tokenizer library.
"""

from __future__ import annotations

import codecs
import functools
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol


class Encoded(Protocol):
    """Ids of a text and the span of each, as the `tokenizers` package returns them."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def offsets(self) -> Sequence[tuple[int, int]]: ...


def plain_ids(encode: Callable[[str], Encoded], text: str, control: Container[int]) -> list[int]:
    """Return the ids of a text without control tokens, so that a client cannot end a turn or start another.

    encode: without added special tokens. control: ids of control tokens. One that the text spells out is split after
    its first character and read as letters; one of a single character, which cannot be split, is left out.
    """
    encoded = encode(text)
    spelled = [span for token, span in zip(encoded.ids, encoded.offsets, strict=True) if token in control]
    if not spelled:
        return list(encoded.ids)
    cuts = [0, *(start + 1 for start, _ in spelled), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    if text in pieces:
        return [token for token in encoded.ids if token not in control]
    return [token for piece in pieces for token in plain_ids(encode, piece, control)]


def spelled_bytes(letters: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, whose entries spell each byte as a letter."""
    return bytes(map(_byte_letters().__getitem__, letters))  # called for each id of a vocabulary


@functools.cache
def _byte_letters() -> Mapping[str, int]:
    """Return the byte of each letter of a byte-level vocabulary. Source: GPT-2.

    Printable Latin-1 letters are their own bytes; the other bytes are the letters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class ByteDetokenizer:
    """Incremental detokenizer of one answer. It keeps incomplete characters back."""

    def __init__(self, bytes_of: Callable[[int], bytes], *, strips_space: bool = False) -> None:
        """bytes_of: the UTF-8 bytes of an id, which may be a part of a character. strips_space: a first one."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strips = strips_space

    def go_on(self) -> None:
        """Keep a first space: the text follows another one."""
        self._strips = False

    def push(self, ids: Sequence[int]) -> str:
        """Return the characters that these ids complete."""
        text = self._decoder.decode(b"".join(map(self._bytes_of, ids)))
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Return the replacement character for an incomplete character at the end, else an empty text."""
        return self._decoder.decode(b"", final=True)
