"""Audio formats of requests: their names on the routes, and their media types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.sound_files import FORMATS, AudioFormat, can_encode

CHAT_FORMATS: Final = {"pcm16" if name == "pcm" else name: form for name, form in FORMATS.items()}
"""The formats by their names in chats."""


def audio_format(
    name: object, field: str = "response_format", formats: Mapping[str, AudioFormat] = FORMATS
) -> AudioFormat:
    """Return the format of a request. Raises RequestError if the server cannot encode it."""
    audio = formats.get(name) if isinstance(name, str) else None
    allowed = ", ".join(formats)
    if audio is None:
        raise RequestError(
            f"{field} is {str(name)[:40]!r}, but must be one of {allowed}",
            field=field,
            allowed=allowed,
            code="unsupported_parameter",
        )
    if audio.codec and not can_encode(audio):
        raise RequestError(
            f"the server cannot encode {audio.name}", hint=f"use {field} wav", field=field, code="unsupported_parameter"
        )
    return audio


def content_type(form: AudioFormat, rate: int, channels: int) -> str:
    """Return the media type; raw PCM includes rate and channels."""
    return f"{form.content_type};rate={rate};channels={channels}" if form.name == "pcm" else form.content_type
