"""Types of POST /v1/audio/speech and POST /v1/audio/transcriptions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mstar_core.api.schema.answers import Usage


class SpeechRequest(msgspec.Struct, kw_only=True):
    """Speech request. Other fields are parameters of the model."""

    input: Annotated[str, Meta(description="the text to speak or to answer; see `speech` in /v1/models")]
    voice: Annotated[Any, Meta(description="a name in any case, or {id: name}; default: the model's own")] = None
    model: Annotated[str, Meta(description="any name of the served model")] | None = None
    response_format: Annotated[
        Any, Meta(description="`wav`, `pcm` (PCM16 little endian), `flac`, `mp3` or `opus` (Ogg)")
    ] = "wav"
    stream: Annotated[bool, Meta(description="send the body while it is generated")] = False
    stream_format: Annotated[Literal["audio", "sse"], Meta(description="`sse` sends events and implies stream")] = (
        "audio"
    )
    instructions: Annotated[str, Meta(description="accepted with a warning; has no effect")] | None = None
    request_id: Annotated[str, Meta(description="the client's own id, as in the header X-Request-ID")] | None = None


class SpeechUsage(msgspec.Struct, kw_only=True):
    """Input and output tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int


class SpeechDelta(msgspec.Struct, kw_only=True):
    """Event with a piece of audio in the requested format."""

    audio: Annotated[str, Meta(description="base64")]
    type: Literal["speech.audio.delta"] = "speech.audio.delta"


class SpeechDone(msgspec.Struct, kw_only=True):
    """Last event of a speech stream."""

    usage: SpeechUsage
    warnings: list[str]
    type: Literal["speech.audio.done"] = "speech.audio.done"


class TranscriptionRequest(msgspec.Struct, kw_only=True):
    """Transcription request: a form with the audio as `file`. Other fields are parameters of the model."""

    model: Annotated[str, Meta(description="any name of the served model")] | None = None
    language: Annotated[str, Meta(max_length=64, description="language of the speech, as a code or a name")] | None = (
        None
    )
    prompt: Annotated[str, Meta(description="text that helps the model, such as names and terms")] | None = None
    response_format: Annotated[
        Literal["json", "text", "verbose_json", "srt", "vtt"],
        Meta(description="`verbose_json`, `srt` and `vtt` need timestamps, which no model provides"),
    ] = "json"
    stream: Annotated[bool, Meta(description="respond with server-sent events")] = False
    request_id: Annotated[str, Meta(description="the client's own id, as in the header X-Request-ID")] | None = None


class Transcription(msgspec.Struct, kw_only=True):
    """Transcript."""

    text: str
    usage: Usage


class TranscriptDelta(msgspec.Struct, kw_only=True):
    """Event with more text."""

    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"


class TranscriptDone(msgspec.Struct, kw_only=True):
    """Last event of a transcription stream, with the whole text."""

    text: str
    usage: Usage
    type: Literal["transcript.text.done"] = "transcript.text.done"
    warnings: list[str] | UnsetType = UNSET
