"""Python client of a deployment's API over HTTP. It needs no torch, and loads httpx when a client is made."""

from __future__ import annotations

from mstar_core.client.async_client import AsyncMStarClient
from mstar_core.client.audio import AudioBuffer, WavFile
from mstar_core.client.chat import ChatResult, FunctionCall
from mstar_core.client.errors import (
    AuthError,
    BadRequest,
    BadRequestError,
    Cancelled,
    ClientError,
    Conflict,
    ConflictError,
    MStarError,
    Overloaded,
    OverloadedError,
    RequestCancelledError,
    RequestTimeoutError,
    StreamError,
    TimedOut,
    Unavailable,
    UnavailableError,
)
from mstar_core.client.events import (
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
from mstar_core.client.reader import Line
from mstar_core.client.results import GenerateResult, LatentResult, ModelInfo, ModelSample
from mstar_core.client.streams import AsyncStream
from mstar_core.client.sync_client import MStarClient, Stream

__all__ = [
    "ActionChunk",
    "AsyncMStarClient",
    "AsyncStream",
    "AudioBuffer",
    "AudioChunk",
    "AuthError",
    "BadRequest",
    "BadRequestError",
    "Cancelled",
    "ChatResult",
    "Chunk",
    "ClientError",
    "Conflict",
    "ConflictError",
    "ErrorEvent",
    "Event",
    "FunctionCall",
    "GenerateResult",
    "ImageChunk",
    "LatentResult",
    "Line",
    "MStarClient",
    "MStarError",
    "ModelInfo",
    "ModelSample",
    "Overloaded",
    "OverloadedError",
    "RequestCancelledError",
    "RequestTimeoutError",
    "ScalarChunk",
    "Stream",
    "StreamError",
    "TensorChunk",
    "TextChunk",
    "TimedOut",
    "Unavailable",
    "UnavailableError",
    "VideoChunk",
    "WavFile",
]
