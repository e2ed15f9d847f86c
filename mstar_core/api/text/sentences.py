"""Sentences of a text that arrives in pieces. Used where a text is spoken while it is still being written."""

from __future__ import annotations

from typing import Final

import sentencex

LANGUAGE: Final = "en"
"""Language whose abbreviations do not end a sentence. Marks that end one are known in all languages."""


class Sentences:
    """Collects pieces of a text and returns its sentences. They depend on the text alone, if its pieces are the same.

    limit: characters of the longest sentence; a longer one is cut between two words, or within a word without a space.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = ""

    def push(self, text: str) -> list[str]:
        """Take a piece and return the sentences that end before its last one, which may go on."""
        *ended, self._rest = sentencex.segment(LANGUAGE, self._rest + text) or [""]
        sentences = [part for sentence in ended for part in self._parts(sentence)]
        if len(self._rest) > self._limit:
            *parts, self._rest = self._parts(self._rest)
            sentences += parts
        return sentences

    def end(self) -> list[str]:
        """Return the rest of the text as one sentence; empty if it says nothing."""
        rest, self._rest = self._rest, ""
        return self._parts(rest)

    def _parts(self, sentence: str) -> list[str]:
        """Return a sentence in parts within the limit, without those that say nothing."""
        parts = []
        while len(sentence) > self._limit:
            at = max((sentence.rfind(mark, 0, self._limit) for mark in (", ", "; ", ": ")), default=-1) + 1
            at = at or sentence.rfind(" ", 0, self._limit) + 1 or self._limit
            parts.append(sentence[:at])
            sentence = sentence[at:].lstrip()
        parts.append(sentence)
        return [part.strip() for part in parts if any(char.isalnum() for char in part)]
