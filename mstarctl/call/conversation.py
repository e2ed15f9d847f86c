"""Conversation of `mstarctl chat`: messages in the form of the chat route. Pure data, without sockets."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import UsageError
from mstarctl.call.ask import read_bytes
from mstarctl.output.units import counted

SOUND: Final = {".wav": "wav", ".mp3": "mp3", ".flac": "flac", ".ogg": "ogg", ".m4a": "m4a"}


@dataclass(slots=True)
class Conversation:
    """Messages so far, and files for the next one. Owned by the command. inputs: modalities of the model."""

    inputs: tuple[str, ...]
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)

    def attach(self, kind: str, path: Path) -> str:
        """Add a file to the next message and return a notice. Raises UsageError, ConfigError."""
        if kind not in self.inputs:
            raise UsageError(f"the model does not accept {kind} input", hint=f"it accepts {', '.join(self.inputs)}")
        data = base64.b64encode(read_bytes(path.expanduser(), kind)).decode()
        if kind == "audio":
            form = SOUND.get(path.suffix.lower(), "wav")
            self.waiting.append({"type": "input_audio", "input_audio": {"data": data, "format": form}})
        else:
            content_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
            name = f"{kind}_url"
            self.waiting.append({"type": name, name: {"url": f"data:{content_type};base64,{data}"}})
        return f"{path.name} goes with the next message ({counted(len(self.waiting), 'file')})"

    def ask(self, text: str) -> list[dict[str, Any]]:
        """Add the user's message, with the attached files before its text, and return all messages to send."""
        parts, self.waiting = self.waiting, []
        content: Any = [*parts, {"type": "text", "text": text}] if parts else text
        self.messages.append({"role": "user", "content": content})
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def answered(self, text: str) -> None:
        """Add the answer, or as much of it as arrived. Without any text the question is withdrawn."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        elif self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def clear(self) -> None:
        """Start a new conversation."""
        self.messages.clear()
        self.waiting.clear()


def delta_of(event: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """Return (text, PCM16 samples, finish reason) of one streamed event; empty values if it has none."""
    choices = event.get("choices") or []
    if not choices:
        return "", b"", ""
    delta: Mapping[str, Any] = choices[0].get("delta") or {}
    content, audio = delta.get("content"), delta.get("audio") or {}
    data = base64.b64decode(audio.get("data") or "")
    text = content if isinstance(content, str) else ""
    return text, data, str(choices[0].get("finish_reason") or "")
