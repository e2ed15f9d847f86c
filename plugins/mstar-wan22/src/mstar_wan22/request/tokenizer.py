"""Prompts: cleaning and token ids."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Final

import ftfy
from tokenizers import Tokenizer

from mstar_core.errors import WeightsError
from mstar_wan22.checkpoint.config import TOKENIZER

END: Final = 1
LONGEST: Final = 512
"""Most ids of a text, the end included."""

_SPACE: Final = re.compile(r"\s+")


def cleaned(text: str) -> str:
    """Return a prompt with damaged characters mended, entities resolved and white space joined."""
    return _SPACE.sub(" ", html.unescape(html.unescape(ftfy.fix_text(text))).strip()).strip()


class PromptTokenizer:
    """The checkpoint's tokenizer. Raises WeightsError if it cannot be read."""

    def __init__(self, folder: Path) -> None:
        path = folder / TOKENIZER / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise WeightsError(f"{path} cannot be read", str(error), "download it again", file=str(path)) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def ids(self, text: str) -> list[int]:
        """Return the ids of a prompt, which end with END. A longer one is cut."""
        found: list[int] = self._tokenizer.encode(cleaned(text), add_special_tokens=False).ids
        return [*found[: LONGEST - 1], END]
