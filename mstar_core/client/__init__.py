"""The Python client: speaks to a deployment's api over HTTP, to nothing else. No torch; httpx when a client is made."""

from __future__ import annotations

from mstar_core.client.api import ApiClient
from mstar_core.client.async_mstar import AsyncMStarClient
from mstar_core.client.async_stream import AsyncStream
from mstar_core.client.event import (
    ActionChunk,
    AudioChunk,
    Chunk,
    ErrorEvent,
    Event,
    ImageChunk,
    ScalarChunk,
    TensorChunk,
    TextChunk,
    VideoChunk,
)
from mstar_core.client.failure import (
    AuthError,
    BadRequest,
    Cancelled,
    Conflict,
    MStarError,
    Overloaded,
    StreamError,
    TimedOut,
    Unavailable,
)
from mstar_core.client.line import Line
from mstar_core.client.model_info import ModelInfo
from mstar_core.client.mstar import MStarClient
from mstar_core.client.result import GenerateResult, LatentResult
from mstar_core.client.sound import AudioBuffer
from mstar_core.client.stream import Stream
from mstar_core.client.wav import WavFile

__all__ = [
    "ActionChunk",
    "ApiClient",
    "AsyncMStarClient",
    "AsyncStream",
    "AudioBuffer",
    "AudioChunk",
    "AuthError",
    "BadRequest",
    "Cancelled",
    "Chunk",
    "Conflict",
    "ErrorEvent",
    "Event",
    "GenerateResult",
    "ImageChunk",
    "LatentResult",
    "Line",
    "MStarClient",
    "MStarError",
    "ModelInfo",
    "Overloaded",
    "ScalarChunk",
    "Stream",
    "StreamError",
    "TensorChunk",
    "TextChunk",
    "TimedOut",
    "Unavailable",
    "VideoChunk",
    "WavFile",
]
