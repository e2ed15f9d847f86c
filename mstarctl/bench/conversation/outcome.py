"""Outcome of one turn and of one conversation, as a client sees them. Times are seconds of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TurnOutcome:
    """One turn. Filled by its client.

    spoken: end of its sound. stopped: arrival of `speech_stopped`. marks, lengths: arrival and seconds of each piece of
    the answer's sound. interrupted: arrival of `speech_started` during the answer. status: of its response; empty
    without one. reason: of a status other than `completed`, or the code of its error. splits: answers that began within
    the turn, because the server found its end too early. input_tokens, cached_tokens: of its prompt; 0 where the server
    does not report what was cached, as for a cancelled answer.
    """

    spoken: float = 0.0
    stopped: float | None = None
    marks: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    interrupted: float | None = None
    status: str = ""
    reason: str = ""
    splits: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0

    @property
    def is_answered(self) -> bool:
        return bool(self.marks) and self.status in ("completed", "incomplete", "cancelled")

    @property
    def is_completed(self) -> bool:
        """Whether the answer came to its end: the model's own, or the limit of tokens."""
        is_limited = self.status == "incomplete" and self.reason == "max_output_tokens"
        return self.status == "completed" or is_limited

    @property
    def cause(self) -> str:
        """Return why it has no whole answer; empty if it has one, or if it was interrupted."""
        if self.is_completed:
            return "" if self.marks else "an answer without sound"
        if self.status == "cancelled" and self.interrupted is not None:
            return ""
        if self.status:
            return f"{self.status}: {self.reason or 'without a reason'}"
        if not self.spoken:
            return "not spoken: the conversation had ended"
        return "no end of speech was found" if self.stopped is None else "no answer in time"

    def heard_s(self, now: float) -> float:
        """Return the seconds of the arrived sound that a player has played by now, with pauses for late pieces."""
        until = played = 0.0
        for mark, length in zip(self.marks, self.lengths, strict=True):
            until = max(until, mark) + length
            played += length
        return max(0.0, played - max(0.0, until - now))

    def split(self) -> None:
        """Forget an answer that the rest of the turn has ended."""
        self.splits += 1
        self.marks, self.lengths = [], []
        self.stopped, self.status, self.reason = None, "", ""

    def count_tokens(self, usage: dict[str, Any]) -> None:
        """Take the counts of a response, if they say how much of the prompt was cached."""
        details = usage.get("input_token_details")
        if details is None:
            return
        self.input_tokens = int(usage.get("input_tokens") or 0)
        self.cached_tokens = int(details.get("cached_tokens") or 0)


@dataclass(slots=True)
class ConversationOutcome:
    """One conversation. false_starts: speech that the server found in silence. errors: messages.

    lags_s: for each piece of the microphone, the seconds that the client sent it late.
    """

    turns: list[TurnOutcome] = field(default_factory=list)
    false_starts: int = 0
    errors: list[str] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
