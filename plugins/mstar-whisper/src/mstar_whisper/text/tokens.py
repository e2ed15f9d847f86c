"""Tokenizer of a checkpoint: prompts to ids, ids to bytes. Timestamps and control tokens have no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mstar_core.families.tokenizer import TextTokenizer
from mstar_core.plugin.plain_text import ByteDetokenizer
from mstar_whisper.checkpoint.config import TokenIds


class Tokens:
    """Ids and texts of one checkpoint."""

    def __init__(self, folder: Path, ids: TokenIds) -> None:
        """Raises WeightsError for a missing or broken tokenizer.json."""
        self._tokenizer = TextTokenizer(folder)
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, in which control tokens are letters."""
        ids = self._tokenizer.encode(self._tokenizer.guarded(text), adds_special=False)
        return [number for number in ids if self.bytes_of(number)]

    def bytes_of(self, number: int) -> bytes:
        """Return the UTF-8 bytes of an id, which may be a part of a character; nothing for other ids."""
        return b"" if number >= self._ids.end else self._tokenizer.bytes_of(number)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    def detokenizer(self) -> ByteDetokenizer:
        """Return a detokenizer for one answer."""
        return ByteDetokenizer(self.bytes_of, strips_space=True)
