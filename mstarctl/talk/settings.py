"""Settings of a conversation, and the fields of its session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from mstarctl.talk.functions import realtime_tools

TurnKind = Literal["server", "semantic"]
TURNS: Final[Mapping[str, str]] = {"server": "server_vad", "semantic": "semantic_vad"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkSettings:
    """Settings of one conversation.

    recorder, player: commands, None without. folder: of the answers' sound, None to keep none. turns: detection of the
    end of a spoken turn. hears: the model takes sound. interrupts: speech ends an answer; otherwise the microphone is
    silent while one is heard. is_fast: files are sent at once, not at the speed of their sound. tools: functions that
    the model may call; command: program that computes their results, which otherwise are typed.
    """

    is_terminal: bool
    recorder: tuple[str, ...] | None = None
    player: tuple[str, ...] | None = None
    folder: Path | None = None
    turns: TurnKind = "server"
    hears: bool = True
    interrupts: bool = True
    has_transcripts: bool = True
    is_fast: bool = False
    instructions: str | None = None
    voice: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    command: tuple[str, ...] = ()

    def session(self) -> dict[str, Any]:
        """Return the fields of `session.update`."""
        fields: dict[str, Any] = dict(self.params)
        if self.instructions is not None:
            fields["instructions"] = self.instructions
        if self.tools:
            fields["tools"] = realtime_tools(self.tools)
        audio: dict[str, Any] = {}
        if self.hears:
            detection = {"type": TURNS[self.turns], "interrupt_response": self.interrupts}
            audio["input"] = {"turn_detection": None if self.recorder is None else detection}
            if self.has_transcripts:
                audio["input"]["transcription"] = {}
        if self.voice is not None:
            audio["output"] = {"voice": self.voice}
        return {**fields, "audio": audio} if audio else fields
