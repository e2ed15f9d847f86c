"""Messages of `mstarctl chat` in the form of the chat route. Pure data, without sockets and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ChatMessages:
    """Messages so far, and parts of files for the next one. Owned by the session of a chat."""

    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str, parts: Sequence[dict[str, Any]] = ()) -> None:
        """Add a message of the user: the files that wait and `parts`, then its text."""
        files, self.waiting = [*self.waiting, *parts], []
        content: Any = [*files, {"type": "text", "text": text}] if files else text
        self.messages.append({"role": "user", "content": content})

    def sent(self) -> list[dict[str, Any]]:
        """Return the messages of a request."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def question(self) -> str | None:
        """Return the text of the last message of the user, None without one."""
        at = self._last_question()
        return None if at is None else text_of(self.messages[at])

    def undo(self) -> bool:
        """Remove the last message of the user and what follows. Returns whether there was one."""
        at = self._last_question()
        if at is not None:
            del self.messages[at:]
        return at is not None

    def reopen(self) -> bool:
        """Remove the answer to the last message of the user. Returns whether there is such a message."""
        at = self._last_question()
        if at is not None:
            del self.messages[at + 1 :]
        return at is not None

    def clear(self) -> None:
        """Start a new conversation."""
        self.messages.clear()
        self.waiting.clear()

    def _last_question(self) -> int | None:
        places = [at for at, message in enumerate(self.messages) if message["role"] == "user"]
        return places[-1] if places else None


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message; that of a user stands last, behind the texts of files."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    texts = [str(part.get("text") or "") for part in content or () if part.get("type") == "text"]
    return (texts[-1] if texts else "") if message["role"] == "user" else "".join(texts)
