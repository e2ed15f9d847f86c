"""Limits of uploaded media and the check of a request's media from their headers."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_core.errors import BadMedia, TooLarge

FIELD = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Media limits of one request. decoded_bytes: of all its media together, as pixels and samples."""

    image_pixels: int = 50_000_000
    image_side: int = 16_384
    audio_s: float = 1800.0
    video_s: float = 600.0
    video_frames: int = 768
    video_width: int = 4096
    video_height: int = 2304
    decoded_bytes: int = 1 << 30


def too_large(what: str, allowed: str) -> TooLarge:
    """Return the error of a file over a limit. what: such as "the image has 60000000 pixels"."""
    return TooLarge(f"{what}, allowed are {allowed}", field=FIELD, allowed=allowed, code="media_too_large")


def undecodable(kind: str, error: Exception | str) -> BadMedia:
    """Return the error of a file that its decoder cannot read. The decoder's message is the detail."""
    return BadMedia(f"the {kind} cannot be decoded", str(error), hint="send a whole, undamaged file", field=FIELD)


def check_decoded(size: int, limits: MediaLimits) -> None:
    """Raise TooLarge if the decoded bytes of a request exceed the limit."""
    if size > limits.decoded_bytes:
        raise too_large(f"the media of the request decode to {size} bytes", f"{limits.decoded_bytes} bytes")
