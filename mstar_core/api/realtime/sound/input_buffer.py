"""Sound of the user that is not yet an item, at one rate, with its place on the time line of the session."""

from __future__ import annotations

import numpy as np

from mstar_core.api.realtime.sound.formats import Pcm
from mstar_core.errors import TooLarge


class InputBuffer:
    """Samples [start, end) of all sound that the session has received. Owned by the conversation.

    start, end: in samples since the begin of the session.
    """

    def __init__(self, rate: int, longest_s: float) -> None:
        self.rate = rate
        self.start = 0
        self.end = 0
        self._longest_s = longest_s
        self._pieces: list[Pcm] = []

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def end_ms(self) -> int:
        return self.end * 1000 // self.rate

    def check_room(self, seconds: float) -> None:
        """Raise TooLarge if the buffer cannot take this much more sound."""
        if len(self) / self.rate + seconds > self._longest_s:
            raise TooLarge(
                f"the input audio buffer would hold more than {self._longest_s:g} s",
                hint="commit or clear it",
                field="audio",
                code="media_too_large",
            )

    def append(self, samples: Pcm) -> None:
        """Take sound behind the rest."""
        if len(samples):
            self._pieces.append(samples)
            self.end += len(samples)

    def copy(self, start: int, end: int) -> Pcm:
        """Return the sound from `start` to `end`."""
        whole = np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.int16)
        first = max(0, start - self.start)
        return whole[first : max(first, end - self.start)].copy()

    def take(self, start: int | None = None, end: int | None = None) -> Pcm:
        """Return the sound from `start` to `end`, by default all, and drop it with everything before it."""
        last = self.end if end is None else end
        taken, rest = self.copy(self.start if start is None else start, last), self.copy(last, self.end)
        self._pieces = [rest] if len(rest) else []
        self.start = self.end - len(rest)
        return taken

    def forget_before(self, place: int) -> None:
        """Drop whole pieces before a place."""
        while self._pieces and self.start + len(self._pieces[0]) <= place:
            self.start += len(self._pieces.pop(0))

    def clear(self) -> None:
        """Drop everything."""
        self._pieces, self.start = [], self.end
