"""Log-probabilities of the tokens of a text, and when each token is sent: with the text that it begins.

Filled by the output encoder. Chat and completions format them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mstar_core.constraints.vocabulary import TokenTable


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token and its log-probability. data: its bytes, which may be a part of a character."""

    id: int
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        """Return its text; an incomplete character is replaced."""
        return self.data.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token of a text. start: characters of the text before it. most_likely: the alternatives, best first."""

    token: Likelihood
    start: int
    most_likely: Sequence[Likelihood]


class TokenScores:
    """Tokens of one text that have not been sent. Owned by its encoder.

    A token belongs to the text that follows its start, so one that ends within a character, or whose text is held back,
    waits. What a stop string cuts off takes its tokens with it. Control tokens that write nothing are left out.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._special = frozenset(table.special)
        self._rows: deque[Sequence[float]] = deque()
        self._waiting: deque[TokenScore] = deque()
        self._written = 0
        self._sent = 0

    def add(self, numbers: npt.NDArray[np.generic]) -> None:
        """Take the numbers of the next ids: float64 [n, 1 + 2k], see `surface.LOGPROBS`."""
        self._rows += numbers.tolist()

    def wrote(self, token: int, text: str) -> None:
        """Note the text that the detokenizer gave for the next id."""
        row = self._rows.popleft() if self._rows else None
        if row is not None and (text or token not in self._special):
            pairs = zip(row[1::2], row[2::2], strict=True)
            most_likely = [self._likelihood(int(other), value) for other, value in pairs if other >= 0]
            self._waiting.append(TokenScore(self._likelihood(token, row[0]), self._written, most_likely))
        self._written += len(text)

    def sent(self, text: str) -> list[TokenScore]:
        """Return the tokens that belong to a text that is sent now."""
        self._sent += len(text)
        tokens = []
        while self._waiting and self._waiting[0].start < self._sent:
            tokens.append(self._waiting.popleft())
        return tokens

    def rest(self) -> list[TokenScore]:
        """Return the tokens that are left at the end of a text that no stop string has cut."""
        tokens = list(self._waiting)
        self._waiting.clear()
        return tokens

    def _likelihood(self, token: int, logprob: float) -> Likelihood:
        data = self._table.tokens[token] if token < len(self._table) else b""
        return Likelihood(token, data, logprob)
