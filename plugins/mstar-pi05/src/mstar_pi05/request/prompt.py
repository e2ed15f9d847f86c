"""Text prompt of the language model and its tokenizer. Used by the processor.

The prompt contains the instruction, and the state as bin numbers. The tokenizer is PaliGemma's, from tokenizer.json or
a SentencePiece file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from mstar_core.errors import WeightsError
from mstar_pi05.request.conversion import Values
from mstar_pi05.request.sentencepiece import read_sentencepiece

BINS: Final = 256
"""Bins of [-1, 1]. Values above are in the last bin; values below are written as -1."""

Piece = tuple[str, bool]
"""A text that is tokenized separately, and whether a BOS token precedes it."""


def cleaned(text: str) -> str:
    """Clean an instruction as in training: strip it, and replace underscores and line breaks. The case is kept."""
    return text.strip().replace("_", " ").replace("\n", " ")


def bins(state: Values) -> list[int]:
    """Return the bin numbers of normalised values [n], rounded down."""
    indices: list[int] = np.clip(np.floor((state + 1.0) * (BINS / 2)), -1, BINS - 1).astype(np.int64).tolist()
    return indices


def pieces(text: str, state: Values | None) -> list[Piece]:
    """Return the pieces to tokenize. state: normalised, [n]; None if the model was trained without it in the prompt."""
    if state is None:
        # The line break is tokenized separately, as in training: joined it may become another token.
        return [(cleaned(text), True), ("\n", False)]
    numbers = " ".join(map(str, bins(state)))
    return [(f"Task: {cleaned(text)}, State: {numbers};\nAction: ", True)]


FILES: Final = ("tokenizer.json", "tokenizer/tokenizer.json", "paligemma_tokenizer.model", "tokenizer.model")
BEGIN: Final = "<bos>"


class PromptTokenizer:
    """Tokenizer of prompts. Control tokens spelled in a text are tokenized as plain text."""

    def __init__(self, folder: Path) -> None:
        path = next((folder / name for name in FILES if (folder / name).is_file()), None)
        if path is None:
            raise WeightsError(
                f"{folder} has no tokenizer",
                f"looked for {', '.join(FILES)}",
                "put tokenizer.json of google/paligemma-3b-pt-224 there, or openpi's paligemma_tokenizer.model",
                file=str(folder / FILES[0]),
            )
        self.path = path
        self._tokenizer = _read(path)
        self._tokenizer.encode_special_tokens = True  # for users' texts; BOS is added by id
        begin = self._tokenizer.token_to_id(BEGIN)
        if begin is None:
            raise WeightsError(f"{path} has no token {BEGIN}", hint="use PaliGemma's tokenizer", file=str(path))
        self._begin: int = begin

    @property
    def vocab(self) -> int:
        """Return the largest id plus one."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the ids of all pieces in order. No EOS is added."""
        ids: list[int] = []
        for text, begins in pieces:
            ids += [self._begin] if begins else []
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _read(path: Path) -> Tokenizer:
    if path.suffix == ".model":
        return read_sentencepiece(path)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(f"{path} cannot be read", str(error), "fetch this file again", file=str(path)) from error
