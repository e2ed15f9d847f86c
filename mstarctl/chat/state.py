"""State of a chat that commands change: conversation, settings, and what was used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mstarctl.call.ask import Card
from mstarctl.chat.answer import ChatAnswer
from mstarctl.chat.conversation import ChatMessages
from mstarctl.chat.settings import ChatSettings
from mstarctl.output.units import counted, duration_text


@dataclass(slots=True)
class ChatUsage:
    """Tokens and time of the answers of a session. rate: tokens per second of the last answer."""

    answers: int = 0
    prompt: int = 0
    completion: int = 0
    last: str = "no answer yet"

    def add(self, answer: ChatAnswer, first_s: float | None, total_s: float) -> None:
        """Count an answer. first_s: seconds to its first output, after which the rate counts."""
        prompt = int(answer.usage.get("prompt_tokens") or 0)
        completion = int(answer.usage.get("completion_tokens") or 0)
        thought = int((answer.usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0)
        self.answers, self.prompt, self.completion = (
            self.answers + 1,
            self.prompt + prompt,
            self.completion + completion,
        )
        first_s = total_s if first_s is None else first_s
        rate = (
            f", {(completion - 1) / (total_s - first_s):.1f} tokens/s" if completion > 1 and total_s > first_s else ""
        )
        tokens = f"{counted(prompt, 'token')} in, {completion} out{f' ({thought} of thinking)' if thought else ''}"
        self.last = (
            f"{tokens if answer.usage else 'stopped, so its tokens are not known'}; "
            f"first output after {duration_text(first_s)}, {duration_text(total_s)} in total{rate}"
        )

    def lines(self) -> list[str]:
        """Return the account as text."""
        total = f"{counted(self.answers, 'answer')}: {self.prompt} tokens in, {self.completion} out"
        return [f"last answer: {self.last}", f"since the start: {total}"]


@dataclass(slots=True, kw_only=True)
class ChatState:
    """One chat. Owned by the session. models: those that the server serves, adapters too.

    saved: file that /save wrote or /load read last. shows_thinking: thinking is displayed while it arrives.
    """

    talk: ChatMessages
    settings: ChatSettings
    models: tuple[Card, ...] = ()
    shows_thinking: bool = True
    last: ChatAnswer | None = None
    saved: Path | None = None
    usage: ChatUsage = field(default_factory=ChatUsage)

    @property
    def card(self) -> Card:
        """The model that answers."""
        return self.settings.card
