"""Text prompt of the language model: the instruction, and the state as bin numbers. Used by the processor."""

from __future__ import annotations

from typing import Final

import numpy as np

from mstar_pi05.robots.conversion import Values

BINS: Final = 256
"""Bins of [-1, 1]. Values above are in the last bin; values below are written as -1."""

Piece = tuple[str, bool]
"""A text that is tokenized separately, and whether a BOS token precedes it."""


def cleaned(text: str) -> str:
    """Clean an instruction as in training: strip it, and replace underscores and line breaks. The case is kept."""
    return text.strip().replace("_", " ").replace("\n", " ")


def bins(state: Values) -> list[int]:
    """Return the bin numbers of normalised values [n], rounded down."""
    found: list[int] = np.clip(np.floor((state + 1.0) * (BINS / 2)), -1, BINS - 1).astype(np.int64).tolist()
    return found


def pieces(text: str, state: Values | None) -> list[Piece]:
    """Return the pieces to tokenize. state: normalised, [n]; None if the model was trained without it in the prompt."""
    if state is None:
        # The line break is tokenized separately, as in training: joined it may become another token.
        return [(cleaned(text), True), ("\n", False)]
    numbers = " ".join(map(str, bins(state)))
    return [(f"Task: {cleaned(text)}, State: {numbers};\nAction: ", True)]
