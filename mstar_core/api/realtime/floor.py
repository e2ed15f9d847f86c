"""Speaker of a conversation, and its counts, as operators see them. Owned by the conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mstar_core.api.realtime.response import RealtimeResponse

Speaker = Literal["user", "model", "interrupted", "thinking", "silence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationStatus:
    """State of a conversation; see `SessionNews`."""

    speaks: Speaker
    answers: int
    interrupts: int
    false_starts: int
    items: int
    request: str
    first_audio_s: float | None


@dataclass(slots=True)
class Floor:
    """Speaker and counts. Times are of the service's clock.

    The model speaks until the sound that was sent has been played, if its client plays it at once. Text alone counts as
    speech while its response runs.
    """

    answers: int = 0
    interrupts: int = 0
    false_starts: int = 0
    first_audio_s: float | None = None
    _voice: RealtimeResponse | None = None
    _since: float = 0.0
    _is_cut: bool = False

    def sounded(self, response: RealtimeResponse, now: float) -> None:
        """Note the first sound of a response."""
        self._voice, self._since = response, now

    def user_began(self, active: RealtimeResponse | None, now: float, *, interrupts: bool) -> bool:
        """Note the begin of speech of the user. Returns whether it interrupts an answer."""
        self._is_cut = interrupts and (active is not None or self.plays(now))
        self.interrupts += self._is_cut
        if self._is_cut:
            self._voice = None
        return self._is_cut

    def plays(self, now: float) -> bool:
        """Return whether sound of the model is heard."""
        voice = self._voice
        if voice is None or voice.state == "cancelled" or voice.speech is None:
            return False
        return now < self._since + voice.speech.duration_ms / 1000

    def speaker(self, active: RealtimeResponse | None, now: float, *, is_user_speaking: bool) -> Speaker:
        """Return the speaker."""
        if is_user_speaking:
            return "interrupted" if self._is_cut else "user"
        if self.plays(now) or (active is not None and active.outputs):
            return "model"
        return "silence" if active is None else "thinking"
