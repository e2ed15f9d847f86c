"""Turns of the user, found in probabilities of speech: their begins and ends. Used by the conversation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

FRAME_MS: Final = 32
"""Duration of the sound behind one probability."""

STARTING_FRAMES: Final = 2
"""Frames above the threshold that begin speech. One alone is a click more often than a word."""

HYSTERESIS: Final = 0.15
"""Speech goes on until the probability is this far below the threshold. Source: Silero's own iterator."""

FALSE_START_MS: Final = 200
"""Speech that is shorter counts as a false start."""

Eagerness = Literal["low", "medium", "high", "auto"]

PATIENCE_MS: Final[dict[Eagerness, int]] = {"low": 1500, "medium": 800, "auto": 800, "high": 400}
"""Silence that ends a turn of unknown words, by eagerness."""

PAUSE_FRAMES: Final = 6
"""Silent frames within a turn behind which its words so far are looked at."""

COMPLETE_SHARE, OPEN_SHARE = 0.5, 2.0
"""Factors of the silence behind a text that ends a sentence, and behind one that does not."""

SENTENCE_ENDS: Final = (".", "!", "?", "…", "。", "！", "？", "؟", "।")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRules:
    """Rules by which turns are found, and their effect.

    silence_ms: ends a turn. prefix_ms: sound before the begin of speech that belongs to it. idle_ms: silence behind an
    answer after which the model answers again; None: never. is_semantic: the silence depends on the words so far.
    """

    threshold: float = 0.5
    prefix_ms: int = 300
    silence_ms: int = 500
    idle_ms: int | None = None
    responds: bool = True
    interrupts: bool = True
    is_semantic: bool = False

    def silence_after(self, text: str | None) -> int:
        """Return the silence that ends a turn. text: transcript of the turn so far, None if it is unknown."""
        if not self.is_semantic or not text or not text.strip():
            return self.silence_ms
        is_complete = text.rstrip().endswith(SENTENCE_ENDS)
        return int(self.silence_ms * (COMPLETE_SHARE if is_complete else OPEN_SHARE))


class Edge(Enum):
    """A change between silence and speech."""

    BEGIN = "begin"
    END = "end"


class TurnDetector:
    """Finds the edges of turns, frame by frame. Owned by the conversation.

    began_ms: place of the begin of the last turn, without its prefix. spoken_ms: from there to its last speech.
    """

    def __init__(self, rules: TurnRules, start_ms: int = 0) -> None:
        """start_ms: place of the first frame on the time line of the session."""
        self.rules = rules
        self.is_speaking = False
        self.began_ms = start_ms
        self.spoken_ms = 0
        self.now_ms = start_ms
        self._loud_frames = 0
        self._silent_ms = 0

    @property
    def first_ms(self) -> int:
        """Return the place where the sound of the current turn begins, with its prefix."""
        return max(0, self.began_ms - self.rules.prefix_ms)

    @property
    def is_pausing(self) -> bool:
        """Return whether the last frame has made a silence within the turn a pause."""
        return self.is_speaking and self._silent_ms == PAUSE_FRAMES * FRAME_MS

    @property
    def is_false_start(self) -> bool:
        """Return whether the last turn was too short for a word."""
        return self.spoken_ms < FALSE_START_MS

    def heard(self, probability: float, text: str | None = None) -> Edge | None:
        """Take the next frame. text: transcript of the turn up to this pause, if there is one."""
        self.now_ms += FRAME_MS
        if not self.is_speaking:
            return self._in_silence(probability)
        if probability >= self.rules.threshold - HYSTERESIS:
            self._silent_ms = 0
            self.spoken_ms = self.now_ms - self.began_ms
            return None
        self._silent_ms += FRAME_MS
        if self._silent_ms < self.rules.silence_after(text):
            return None
        self.is_speaking, self._loud_frames = False, 0
        return Edge.END

    def _in_silence(self, probability: float) -> Edge | None:
        self._loud_frames = self._loud_frames + 1 if probability >= self.rules.threshold else 0
        if self._loud_frames < STARTING_FRAMES:
            return None
        self.is_speaking, self._silent_ms = True, 0
        self.spoken_ms = self._loud_frames * FRAME_MS
        self.began_ms = self.now_ms - self.spoken_ms
        return Edge.BEGIN
