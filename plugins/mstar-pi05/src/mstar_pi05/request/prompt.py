"""The words that the language model reads: the instruction, and the state as numbers of bins. Used by the processor."""

from __future__ import annotations

from typing import Final

import numpy as np

from mstar_pi05.robots.conversion import Values

BINS: Final = 256
"""Bins of [-1, 1]; what lies above is in the last one, what lies below is printed as -1."""

Piece = tuple[str, bool]
"""A text that is tokenized by itself, and whether the id that begins a sequence stands in front of it."""


def cleaned(text: str) -> str:
    """An instruction as the model was trained on it: no ends, underscores or lines; the case stays."""
    return text.strip().replace("_", " ").replace("\n", " ")


def bins(state: Values) -> list[int]:
    """Numbers of the bins of normalised values. state: [n]. Not rounded: a bin holds its lower edge."""
    found: list[int] = np.clip(np.floor((state + 1.0) * (BINS / 2)), -1, BINS - 1).astype(np.int64).tolist()
    return found


def pieces(text: str, state: Values | None) -> list[Piece]:
    """What is tokenized for an instruction. state: normalised, [n]; None where the model was trained without it."""
    if state is None:
        # The answer's line is tokenized by itself, as in training: joined it might become another id.
        return [(cleaned(text), True), ("\n", False)]
    numbers = " ".join(map(str, bins(state)))
    return [(f"Task: {cleaned(text)}, State: {numbers};\nAction: ", True)]
