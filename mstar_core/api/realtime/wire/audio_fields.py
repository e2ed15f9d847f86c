"""Fields of a session's sound as clients send them, and their meaning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mstar_core.api.realtime.settings import TranscriptRules
from mstar_core.api.realtime.sound.formats import PCM_RATE, PHONE_RATE, SoundFormat
from mstar_core.api.realtime.sound.turn_detection import PATIENCE_MS, Eagerness, TurnRules
from mstar_core.errors import RequestError


class WireFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all fields: an unknown name is an error."""


class PcmFields(WireFields, tag_field="type", tag="audio/pcm"):
    """PCM16, little endian."""

    rate: Literal[24000] = 24000


class PcmuFields(WireFields, tag_field="type", tag="audio/pcmu"):
    """G.711, mu-law."""


class PcmaFields(WireFields, tag_field="type", tag="audio/pcma"):
    """G.711, A-law."""


FormatFields = PcmFields | PcmuFields | PcmaFields


class ServerVadFields(WireFields, tag_field="type", tag="server_vad"):
    """Turns that end with a silence."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=10_000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=32, le=60_000)] = 500
    idle_timeout_ms: Annotated[int, Meta(ge=1000, le=600_000)] | None = None
    create_response: bool = True
    interrupt_response: bool = True


class SemanticVadFields(WireFields, tag_field="type", tag="semantic_vad"):
    """Turns that end with a silence whose length depends on the words."""

    eagerness: Eagerness = "auto"
    create_response: bool = True
    interrupt_response: bool = True


class TranscriptFields(WireFields):
    """Transcripts of the user. model: a label; the served model transcribes."""

    model: str | None = None
    language: str | None = None
    prompt: str | None = None


class InputSoundFields(WireFields):
    """Sound of the user. turn_detection: some clients send false in place of null."""

    format: FormatFields = msgspec.field(default_factory=PcmFields)
    noise_reduction: dict[str, Any] | None = None
    transcription: TranscriptFields | None = None
    turn_detection: ServerVadFields | SemanticVadFields | bool | None = None


class VoiceFields(WireFields):
    """A voice as an object."""

    id: str


class OutputSoundFields(WireFields):
    """Speech of the model."""

    format: FormatFields = msgspec.field(default_factory=PcmFields)
    voice: str | VoiceFields | None = None
    speed: float = 1.0


class SoundFields(WireFields):
    """Sound in both directions."""

    input: InputSoundFields = msgspec.field(default_factory=InputSoundFields)
    output: OutputSoundFields = msgspec.field(default_factory=OutputSoundFields)


def format_of(fields: FormatFields) -> SoundFormat:
    """Return a format."""
    match fields:
        case PcmFields():
            return SoundFormat(rate=PCM_RATE)
        case PcmuFields():
            return SoundFormat(rate=PHONE_RATE, law="mu")
        case PcmaFields():
            return SoundFormat(rate=PHONE_RATE, law="a")


def turns_of(fields: ServerVadFields | SemanticVadFields | bool | None) -> TurnRules | None:
    """Return the rules of turns, None without detection. Raises RequestError for true, which names no detection."""
    match fields:
        case None | False:
            return None
        case True:
            place = "session.audio.input.turn_detection"
            raise RequestError(f"{place} is true", hint='send {"type": "server_vad"}, or null', field=place)
        case ServerVadFields():
            return TurnRules(
                threshold=fields.threshold,
                prefix_ms=fields.prefix_padding_ms,
                silence_ms=fields.silence_duration_ms,
                idle_ms=fields.idle_timeout_ms,
                responds=fields.create_response,
                interrupts=fields.interrupt_response,
            )
        case SemanticVadFields():
            return TurnRules(
                silence_ms=PATIENCE_MS[fields.eagerness],
                responds=fields.create_response,
                interrupts=fields.interrupt_response,
                is_semantic=True,
            )


def transcripts_of(fields: TranscriptFields | None) -> TranscriptRules | None:
    """Return the rules of transcripts, None without them."""
    return None if fields is None else TranscriptRules(language=fields.language, prompt=fields.prompt)
