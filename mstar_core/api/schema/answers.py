"""Response types shared by several routes: usage and errors."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class PromptTokens(msgspec.Struct, kw_only=True):
    """Prompt tokens by kind. Cached media counts as cached."""

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
    """Token usage of a request. The stop token is counted but not returned."""

    prompt_tokens: Annotated[int, Meta(description="tokens that the language model reads, media included")]
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class NativeUsage(Usage, kw_only=True):
    """Usage on /generate. Times are in milliseconds since arrival."""

    images: int = 0
    audio_seconds: float = 0.0
    action_steps: int = 0
    frames: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0


class ErrorObject(msgspec.Struct, kw_only=True):
    """Error of a request: what is wrong, where, and what is allowed."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, kw_only=True):
    """Error response of every route."""

    error: ErrorObject
    detail: Annotated[str, Meta(description="the message again, on /generate only")] | msgspec.UnsetType = msgspec.UNSET
