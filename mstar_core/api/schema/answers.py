"""Parts of answers that several routes share: usage and errors. Written by routes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class PromptTokens(msgspec.Struct, kw_only=True):
    """Prompt tokens by kind. Media from a cache counts as cached."""

    cached_tokens: int = 0
    text_tokens: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0
    video_tokens: int = 0


class CompletionTokens(msgspec.Struct, kw_only=True):
    """Completion tokens by kind."""

    text_tokens: int = 0
    audio_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """What a request used; the stop token is counted, not shown."""

    prompt_tokens: Annotated[int, Meta(description="what the language model reads, media included")]
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class NativeUsage(Usage, kw_only=True):
    """Usage on /generate. Times in milliseconds from arrival."""

    images: int = 0
    audio_seconds: float = 0.0
    action_steps: int = 0
    frames: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


class ErrorObject(msgspec.Struct, kw_only=True):
    """What was wrong, where, and what would be right."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, kw_only=True):
    """Every error of every route."""

    error: ErrorObject
    detail: Annotated[str, Meta(description="the message again, on /generate")] | msgspec.UnsetType = msgspec.UNSET
