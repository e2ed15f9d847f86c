"""Check of grammars: whether they can be compiled, within limits, and whether any text obeys them.

Runs in a process of the api's own, which ends if the compiler takes too long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits

from mstar_core.constraints.vocabulary import TokenTable

NO_TEXT: Final = "no text obeys it"
REASON: Final = re.compile(
    r"(?:at )?(?P<place>\d+\(\d+\)): (?:failed to compile JSON schema: )?(?P<text>.*)", re.DOTALL
)
"""Message of the compiler: a place in the grammar, and what is wrong there."""


class GrammarChecker:
    """Checker of one process. Its vocabulary is the bytes, with which every model can write.

    cpu_s: CPU time limit of a check. Real schemas take 1 to 100 ms, the largest that are accepted about a second.
    """

    cpu_s = 3

    def __init__(self, folder: Path | None, settings: Mapping[str, Any]) -> None:
        """folder, settings: those of every process of a pool. Not used."""

    @cached_property
    def _table(self) -> TokenTable:
        end = 256
        return TokenTable([*(bytes([byte]) for byte in range(end)), b"<|end|>"], special=[end], ends=[end])

    def problem(self, constraint: str) -> str:
        """Return why a grammar cannot hold an answer; empty if it can."""
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._table.tokenizer, constraint, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return ""
        if "NoExtension" in matcher.get_error():
            return NO_TEXT
        return _said(matcher.get_error(), has_place=constraint.startswith("{"))


def _said(error: str, *, has_place: bool) -> str:
    """Return a message of the compiler in one line, without the grammar that it quotes.

    has_place: the grammar is the client's own, so lines and columns in it have a meaning.
    """
    text = re.split(r"\n\s*\d+ \| |\n<", error, maxsplit=1)[0]
    match = REASON.fullmatch(text)
    if match is not None:
        text = f"{match['place']}: {match['text']}" if has_place else match["text"]
    return " ".join(text.split())
