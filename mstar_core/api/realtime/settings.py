"""Settings of a session and of one response. Immutable; a change replaces them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from mstar_core.api.parse.tools import SentTool
from mstar_core.api.realtime.sound.formats import SoundFormat
from mstar_core.api.realtime.sound.turn_detection import TurnRules
from mstar_core.plugin.chat.format import Effort
from mstar_core.plugin.chat.turns import ToolChoice

OutputKind = Literal["text", "audio"]

RETENTION: Final = 0.8
"""Share of a full context that stays. Each drop reads the rest again, so a drop makes room for several turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptRules:
    """Rules for transcripts of the user's sound. prompt: words that the sound may hold."""

    language: str | None = None
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Treatment of a conversation that is longer than the context: its oldest items are dropped.

    is_off: it is refused. keeps: share of its tokens that stay, at most. most: limit of the tokens behind the
    instructions, None for the context's.
    """

    is_off: bool = False
    keeps: float = RETENTION
    most: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RealtimeSettings:
    """Settings of responses and of input. tools: None for none. params: parameters of the model, unchecked.

    effort: of thinking, None for the model's own. limit: most output tokens, None for the model's own limit.
    """

    output: OutputKind
    instructions: str = ""
    voice: str | None = None
    heard: SoundFormat = field(default_factory=SoundFormat)
    spoken: SoundFormat = field(default_factory=SoundFormat)
    turns: TurnRules | None = None
    transcripts: TranscriptRules | None = None
    tools: Sequence[SentTool] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    effort: Effort | None = None
    limit: int | None = None
    truncation: Truncation = field(default_factory=Truncation)
    params: Mapping[str, Any] = field(default_factory=dict)
