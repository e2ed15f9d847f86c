"""Log-probabilities of the content of an answer alone, without those of its thinking and its calls."""

from __future__ import annotations

from collections import deque

from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.output.token_scores import TokenScore
from mstar_core.plugin.chat.parts import CallArguments, Content, Part, Reasoning


class ContentScores:
    """Tokens of one answer that belong to no part yet.

    The parser cuts parts out of the text in order and leaves out markers and white space, so each part is looked for in
    the text behind the part before it.
    """

    def __init__(self) -> None:
        self._text = ""  # behind the last part
        self._start = 0  # characters before it
        self._waiting: deque[TokenScore] = deque()

    def add(self, chunk: EncodedChunk) -> None:
        """Take a chunk of text, before its parts."""
        self._text += chunk.data.decode()
        self._waiting += chunk.scores

    def of(self, part: Part) -> list[TokenScore]:
        """Return the tokens that begin within a part, if it is content. Those of other parts are dropped."""
        if not isinstance(part, Content | Reasoning | CallArguments):
            return []
        place = self._text.find(part.text)
        if place < 0:  # arguments that the model has quoted
            return []
        begin, end = self._start + place, self._start + place + len(part.text)
        self._text, self._start = self._text[place + len(part.text) :], end
        tokens = []
        while self._waiting and self._waiting[0].start < end:
            token = self._waiting.popleft()
            if token.start >= begin:
                tokens.append(token)
        return tokens if isinstance(part, Content) else []
