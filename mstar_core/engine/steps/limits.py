"""Limits of captured steps, which the scheduler respects so that a step fits one replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

AHEAD: Final = (5, 2)
"""Iterations in one replay of a loop that appends and may run ahead. New requests wait for no more than these."""

AHEAD_TOKENS: Final = 2600
"""Most tokens of such a replay: with more, an iteration outlasts the host's work between two iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Sizes that the captured steps of a node take at present.

    captures_passes: whether passes of loops are captured; appending: sequences of their largest bucket that appends, 0
    without one. prompt_tokens, prompts: of the largest bucket of prompts of ids, 0 without one.
    """

    captures_passes: bool = False
    appending: int = 0
    prompt_tokens: int = 0
    prompts: int = 0
