"""Tokenizer of a checkpoint: texts to ids, and the bytes of ids. For all tokenizers of the library."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from mstar_core.errors import WeightsError
from mstar_core.plugin.plain_text import spelled_bytes

FILE: Final = "tokenizer.json"
GUARD: Final = "\ufdd0"
"""A noncharacter of Unicode. It separates letters that must not be read as one control token, and is never encoded."""

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class TextTokenizer:
    """Tokenizer of prompts, and the bytes of every id."""

    def __init__(self, folder: Path, shown: Collection[str] = ()) -> None:
        """shown: control tokens that detokenizers write out. Raises WeightsError for a missing or broken file."""
        path = folder / FILE
        if not path.is_file():
            hint = "download it from the model's repository, or send prompt_token_ids"
            raise WeightsError(f"{path} is missing", "text cannot be tokenized without it", hint, file=str(path))
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise WeightsError(f"{path} cannot be read", str(error), "download it again", file=str(path)) from error
        decoder = json.loads(path.read_text(encoding="utf-8")).get("decoder") or {}
        self._is_byte_level = "ByteLevel" in json.dumps(decoder)
        self.strips_space = '"Strip"' in json.dumps(decoder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {number: str(token.content) for number, token in added.items()}
        self.control = {number: str(token.content) for number, token in added.items() if token.special}
        self._hidden = frozenset(number for number, text in self.control.items() if text not in shown)
        self._spelled = re.compile("|".join(re.escape(text) for text in self.control.values()) or r"(?!)")

    @property
    def size(self) -> int:
        """Number of ids."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def guarded(self, value: Any) -> Any:
        """Return a client's text with its spelled-out control tokens broken by GUARD; lists and maps too.

        Otherwise a client's text could end its turn and begin another one in a role of its choice.
        """
        if isinstance(value, str):
            plain = value.replace(GUARD, "")
            return self._spelled.sub(lambda match: f"{match[0][0]}{GUARD}{match[0][1:]}", plain)
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(each) for key, each in value.items()}
        return [self.guarded(each) for each in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Return the ids of `text`, control tokens included. adds_special: those that the tokenizer puts around it."""
        pieces = text.split(GUARD)
        ids: list[int] = list(self._tokenizer.encode(pieces[0], add_special_tokens=adds_special).ids)
        for piece in pieces[1:]:
            ids += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    @functools.lru_cache(maxsize=1 << 15)  # noqa: B019 the tokenizer lives as long as its process
    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of an id, which may be a part of a character; nothing for control and unknown ids."""
        if token in self._hidden:
            return b""
        if token in self._added:
            return self._added[token].encode()
        letters = self._tokenizer.id_to_token(token) or ""
        if self._is_byte_level:
            return spelled_bytes(letters)
        byte = _BYTE_TOKEN.fullmatch(letters)
        return bytes([int(byte[1], 16)]) if byte else letters.replace("▁", " ").encode()
