"""Limits of media, and the errors of those who go beyond them. Filled from the deployment's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from mstar_core.errors import BadMedia, TooLarge

FIELD = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """What one request may send. decoded_bytes: of all its media together, as pixels and samples."""

    image_pixels: int = 50_000_000
    image_side: int = 16_384
    audio_s: float = 1800.0
    video_s: float = 600.0
    video_frames: int = 768
    video_width: int = 4096
    video_height: int = 2304
    decoded_bytes: int = 1 << 30


def too_large(what: str, allowed: str) -> TooLarge:
    """A file is over a limit. what: "the image has 60000000 pixels"."""
    return TooLarge(f"{what}, allowed are {allowed}", field=FIELD, allowed=allowed, code="media_too_large")


def undecodable(kind: str, error: Exception | str) -> BadMedia:
    """A file of a known kind that its decoder cannot read; what the decoder says goes to the log."""
    return BadMedia(f"the {kind} cannot be decoded", str(error), hint="send a whole, undamaged file", field=FIELD)


def check_decoded(size: int, limits: MediaLimits) -> None:
    """Raises TooLarge when the decoded bytes of a request go beyond the limit."""
    if size > limits.decoded_bytes:
        raise too_large(f"the media of the request decode to {size} bytes", f"{limits.decoded_bytes} bytes")
