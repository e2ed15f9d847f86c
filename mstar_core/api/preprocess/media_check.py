"""Check of a request's media against the limits, from their headers. Called in the api's pool before decoding."""

from __future__ import annotations

from collections.abc import Sequence

from mstar_core.plugin.media.images import CHANNELS, image_size
from mstar_core.plugin.media.limits import MediaLimits, check_decoded
from mstar_core.plugin.media.sounds import sound_bytes, sound_seconds
from mstar_core.plugin.media.videos import VideoFile
from mstar_core.plugin.processor import MediaPart


def check_media(parts: Sequence[MediaPart], limits: MediaLimits) -> None:
    """Raise TooLarge for a file over a limit, BadMedia for an unreadable header.

    The frames of a video are counted later, while they are decoded.
    """
    total = 0
    for part in parts:
        total += decoded_bytes(part, limits)
        check_decoded(total, limits)


def heard_s(parts: Sequence[MediaPart]) -> float:
    """Return the seconds of audio in some files, by their headers. Raises BadMedia."""
    return sum(sound_seconds(part.data) for part in parts if part.modality == "audio")


def decoded_bytes(part: MediaPart, limits: MediaLimits) -> int:
    """Return the decoded size of one file. Raises TooLarge, BadMedia."""
    match part.modality:
        case "image":
            width, height = image_size(part.data, limits)
            return width * height * CHANNELS
        case "audio":
            return sound_bytes(part.data, limits)
        case "video":
            with VideoFile(part.data, limits) as video:
                width, height = video.size
                return width * height * CHANNELS
        case _:
            return len(part.data)
