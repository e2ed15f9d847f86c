"""Types of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mstar_core.api.schema.answers import Usage


class MediaUrl(msgspec.Struct, kw_only=True):
    """Location of media: a `data:` URL, or an http(s) URL of a host that the server allows."""

    url: str


class TextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text part of a message."""

    text: str


class ImagePart(msgspec.Struct, kw_only=True, tag_field="type", tag="image_url"):
    """Image part of a message."""

    image_url: MediaUrl | str


class VideoPart(msgspec.Struct, kw_only=True, tag_field="type", tag="video_url"):
    """Video part of a message."""

    video_url: MediaUrl | str


class AudioUrlPart(msgspec.Struct, kw_only=True, tag_field="type", tag="audio_url"):
    """Audio part of a message; of a video the audio track is used."""

    audio_url: MediaUrl | str


class InputAudio(msgspec.Struct, kw_only=True):
    """Audio sent within the message."""

    data: Annotated[str, Meta(description="base64 of a file")]
    format: Annotated[str, Meta(description="a label only; the format is detected from the content")] = "wav"


class InputAudioPart(msgspec.Struct, kw_only=True, tag_field="type", tag="input_audio"):
    """Audio part sent within the message."""

    input_audio: InputAudio


ContentPart = TextPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart


class ChatMessage(msgspec.Struct, kw_only=True):
    """Message of a chat. The order of the parts is kept."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None


class AudioWish(msgspec.Struct, kw_only=True):
    """Options of audio output."""

    voice: Annotated[Any, Meta(description="a name in any case, or {id: name}")] = None
    format: Annotated[str, Meta(description="wav, mp3, flac, opus or pcm16; streams support only pcm16")] | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct, kw_only=True):
    """Chat request. Other fields are parameters of the model."""

    messages: Annotated[
        list[ChatMessage], Meta(min_length=1, description="in order; formatted by the chat template of the model")
    ]
    model: Annotated[str, Meta(description="any name of the served model")] | None = None
    stream: Annotated[bool, Meta(description="respond with server-sent events")] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, description="number of answers; answer i uses seed + i")] = 1
    modalities: Annotated[list[str], Meta(description="output modalities; default: text")] | None = None
    audio: Annotated[AudioWish, Meta(description="options of audio output")] | None = None
    request_id: Annotated[str, Meta(description="the client's own id, as in the header X-Request-ID")] | None = None


class AnswerAudio(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Audio of an answer. It is not stored: expires_at is the time of its creation."""

    id: str
    data: Annotated[str, Meta(description="base64: a whole file, or PCM16 in a stream")] | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    transcript: str | UnsetType = UNSET


class AnswerPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Part of an answer with images."""

    type: Literal["text", "image_url"]
    text: str | UnsetType = UNSET
    image_url: MediaUrl | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Answer. content is a list of parts if it contains images."""

    role: Literal["assistant"] = "assistant"
    content: str | list[AnswerPart] | None = None
    audio: AnswerAudio | UnsetType = UNSET
    refusal: None = None


class Choice(msgspec.Struct, kw_only=True):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
    logprobs: None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Chat completion. system_fingerprint is `seed-` followed by the seed of the first answer."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New content. An image is sent as one data URL in `content`, in a delta of its own."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    audio: AnswerAudio | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """Delta of one of the n answers."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """Event of a stream. With include_usage, the last event has usage and no choices."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
