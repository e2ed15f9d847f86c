"""Text of load tests: sentences of common words, drawn from a seed."""

from __future__ import annotations

import random
from typing import Final

_STARTS: Final = ("after", "before", "while", "because", "when", "although", "since", "unless")
_WHO: Final = (
    "driver",
    "teacher",
    "captain",
    "gardener",
    "neighbour",
    "doctor",
    "painter",
    "farmer",
    "sailor",
    "child",
)
_HOW: Final = ("old", "quiet", "careful", "young", "tired", "cheerful", "patient", "curious", "busy", "famous")
_DOES: Final = ("opened", "carried", "followed", "counted", "repaired", "watched", "painted", "found", "moved", "sold")
_WHAT: Final = ("door", "boat", "window", "letter", "basket", "engine", "garden", "bridge", "table", "lantern")
_WHERE: Final = (
    "near the river",
    "behind the station",
    "in the market",
    "on the hill",
    "under the trees",
    "beside the lake",
    "at the harbour",
    "along the road",
    "by the old wall",
    "across the field",
)


def _clause(chance: random.Random) -> str:
    pick = chance.choice
    return f"the {pick(_HOW)} {pick(_WHO)} {pick(_DOES)} the {pick(_HOW)} {pick(_WHAT)} {pick(_WHERE)}"


def sentence(chance: random.Random, words: int) -> str:
    """Return `words` words of text as sentences. Texts of different generators share almost no prefix."""
    spoken: list[str] = []
    while len(spoken) < words:
        joined = f"{chance.choice(_STARTS)} {_clause(chance)}, {_clause(chance)}".capitalize()
        spoken += f"{joined}.".split()
    return " ".join(spoken[:words]).rstrip(".,") + "."
