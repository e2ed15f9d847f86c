"""POST /v1/chat/completions: messages in, choices out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mstar_core.api.schema.answers import Usage


class MediaUrl(msgspec.Struct, kw_only=True):
    """Where media is: a `data:` URL, or an http(s) URL of a host that the server allows."""

    url: str


class TextPart(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class ImagePart(msgspec.Struct, kw_only=True, tag_field="type", tag="image_url"):
    """An image."""

    image_url: MediaUrl | str


class VideoPart(msgspec.Struct, kw_only=True, tag_field="type", tag="video_url"):
    """A video."""

    video_url: MediaUrl | str


class AudioUrlPart(msgspec.Struct, kw_only=True, tag_field="type", tag="audio_url"):
    """A sound, or a video whose sound is meant."""

    audio_url: MediaUrl | str


class InputAudio(msgspec.Struct, kw_only=True):
    """A sound in the message itself."""

    data: Annotated[str, Meta(description="base64 of a file")]
    format: Annotated[str, Meta(description="a label only; the kind is read from the content")] = "wav"


class InputAudioPart(msgspec.Struct, kw_only=True, tag_field="type", tag="input_audio"):
    """A sound in the message itself."""

    input_audio: InputAudio


ContentPart = TextPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message. The parts keep the order given."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None


class AudioWish(msgspec.Struct, kw_only=True):
    """How an answer that is spoken sounds."""

    voice: Annotated[Any, Meta(description="a name in any case, or {id: name}")] = None
    format: Annotated[str, Meta(description="wav, mp3, flac, opus or pcm16; streams are pcm16")] | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream tells beside the answer."""

    include_usage: bool = False


class ChatRequest(msgspec.Struct, kw_only=True):
    """Other fields are parameters of the model."""

    messages: Annotated[
        list[ChatMessage], Meta(min_length=1, description="in order; the model's own template lays them out")
    ]
    model: Annotated[str, Meta(description="any name of the served model")] | None = None
    stream: Annotated[bool, Meta(description="answer as server-sent events")] = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, description="answers to make; answer i has seed + i")] = 1
    modalities: Annotated[list[str], Meta(description="what the answer holds; text alone when absent")] | None = None
    audio: Annotated[AudioWish, Meta(description="of a spoken answer")] | None = None
    request_id: Annotated[str, Meta(description="the client's own id, as the header X-Request-ID")] | None = None


class AnswerAudio(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The sound of an answer. It is not kept: expires_at is when it was made."""

    id: str
    data: Annotated[str, Meta(description="base64: a whole file, or PCM16 in a stream")] | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    transcript: str | UnsetType = UNSET


class AnswerPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an answer with images."""

    type: Literal["text", "image_url"]
    text: str | UnsetType = UNSET
    image_url: MediaUrl | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, kw_only=True):
    """One answer. content is a list of parts where it holds images."""

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
    """A whole answer. system_fingerprint is `seed-` with the seed of the first answer."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new. An image comes as one data URL in `content`, alone in its delta."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    audio: AnswerAudio | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """One answer of a stream."""

    index: int
    delta: Delta
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. With include_usage the last one has no choices and the usage."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
