"""Tokenizer of the checkpoint, which reads spelled-out control tokens as text. Used by the processor."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from mstar_core.errors import WeightsError
from mstar_core.plugin.plain_text import plain_ids

FILE = "tokenizer.json"


class TextTokenizer:
    """Byte-level BPE without control tokens from the text."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        if not path.is_file():
            hint = "download it from the model's repository, or send prompt_token_ids"
            raise WeightsError(f"{path} is missing", "text cannot be tokenized without it", hint, file=str(path))
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            hint = "download this file again"
            raise WeightsError(f"{path} cannot be read", str(error), hint, file=str(path)) from error
        self._control = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._prefix = self._tokenizer.encode("").ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` after the tokenizer's default special ids (`<|begin_of_text|>`)."""
        return [*self._prefix, *self._plain(text)]

    def _plain(self, text: str) -> list[int]:
        """Encode plain text. A spelled-out control token is split after its first character and read as letters."""
        return plain_ids(partial(self._tokenizer.encode, add_special_tokens=False), text, self._control)
