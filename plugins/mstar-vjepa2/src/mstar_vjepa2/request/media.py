"""Decoding of uploaded images and videos to RGB frames, bounded in pixels and frames. Used by the processors.

The container format is taken from the first bytes, so that a playlist in an upload cannot name another file.
"""

from __future__ import annotations

import io
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import BadMedia, RequestError, TooLarge

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_core.plugin.processor import MediaPart

    Frame = npt.NDArray[np.uint8]

MOST_PIXELS: Final = 40_000_000
"""Maximum pixels of one frame: a little over 8K video."""

MOST_FRAMES: Final = 20_000
"""Maximum frames of a clip: over ten minutes at 30 per second."""

THREADS: Final = 4
"""Threads of the decoder, and as many that resize frames. Both release the GIL."""

MOST_AHEAD: Final = MOST_PIXELS
"""Maximum pixels of full-size frames in memory."""

Choose = Callable[[int, float], Sequence[int]]
"""Function that selects ascending frame indices, given the number of frames and the rate (0 = unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Results of `keep` for the selected frames. total: frames of the video; rate: per second, 0 = unknown."""

    frames: list[Any]
    total: int
    rate: float


def read_image(part: MediaPart) -> Frame:
    """Decode an image to upright uint8 RGB [H, W, 3]; transparency is dropped. Raises BadMedia or TooLarge."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below replaces Pillow's
            image: Image.Image = Image.open(io.BytesIO(part.data))
        _check_pixels(image.width, image.height, "image")
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):
            # Pillow's conversion would clip 16-bit values at 255.
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, axis=2)
        return np.asarray(image.convert("RGB"))
    except RequestError:
        raise
    except Exception as error:
        raise _unreadable("image", error) from error


def read_video(part: MediaPart, choose: Choose, keep: Callable[[Frame], Any], *, needs_total: bool = True) -> Clip:
    """Decode selected frames of a video in order, with few full-size frames in memory at a time.

    choose: receives the number of frames and the rate; raises RequestError if they do not suffice. keep: receives each
    selected frame, uint8 RGB [H, W, 3]. needs_total: the selection depends on the number of frames; otherwise decoding
    stops after the last selected frame. Raises BadMedia, TooLarge.
    """
    total, rate = _counted(part)
    for _ in range(2):
        chosen = choose(total, rate)
        frames, seen = _decoded(part, chosen, keep, is_partial=not needs_total)
        if seen == total or (not needs_total and len(frames) == len(chosen)):
            return Clip(frames=frames, total=total, rate=rate)
        total = seen  # packets and decodable frames differ: select again
        if not total:
            break
    raise BadMedia(
        "the video has no frames that can be decoded", hint="send a complete MP4, WebM or AVI", field="video"
    )


def _decoded(
    part: MediaPart, chosen: Sequence[int], keep: Callable[[Frame], Any], *, is_partial: bool
) -> tuple[list[Any], int]:
    indices = deque(chosen)
    frames: list[Any] = []
    pending: deque[Future[Any]] = deque()
    seen = 0
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for frame in _frames(part):
                # Colours are converted on this thread: libswscale deadlocks when two threads use the context of one
                # frame.
                pixels = _upright(frame) if indices and indices[0] == seen else None
                while pixels is not None and indices and indices[0] == seen:
                    indices.popleft()
                    pending.append(pool.submit(keep, pixels))
                    if len(pending) >= ahead(frame.width, frame.height):
                        frames.append(pending.popleft().result())
                seen += 1
                if seen > MOST_FRAMES:
                    raise _too_many(seen)
                if is_partial and not indices:
                    break
            frames += [future.result() for future in pending]
    except RequestError:
        raise
    except Exception as error:
        raise _unreadable("video", error) from error
    return frames, seen


def ahead(width: int, height: int) -> int:
    """Return how many frames of this size may be resized at once. Resizing one takes longer than decoding ten."""
    return max(1, min(THREADS, MOST_AHEAD // (width * height)))


def _frames(part: MediaPart) -> Iterator[Any]:
    with _opened(part) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        stream.codec_context.thread_count = THREADS
        for frame in container.decode(stream):
            _check_pixels(frame.width, frame.height, "video")
            yield frame


def _upright(frame: Any) -> Frame:
    """Convert a decoded frame to RGB, rotated by its display matrix. Greyscale becomes three equal channels."""
    pixels: Frame = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _counted(part: MediaPart) -> tuple[int, float]:
    """Return the packet count and the frame rate of the first video stream."""
    try:
        with _opened(part) as container:
            stream = container.streams.video[0]
            _check_pixels(stream.codec_context.width, stream.codec_context.height, "video")
            rate = stream.average_rate or stream.guessed_rate or stream.base_rate
            count = 0
            for packet in container.demux(stream):
                count += packet.size > 0
                if count > MOST_FRAMES:
                    raise _too_many(count)
    except RequestError:
        raise
    except Exception as error:
        raise _unreadable("video", error) from error
    if not count:
        raise BadMedia("the video has no frames", hint="send a complete MP4, WebM or AVI", field="video")
    return count, float(rate) if rate else 0.0


def _opened(part: MediaPart) -> Any:
    import av

    container = av.open(io.BytesIO(part.data), format=_format(part.data))
    if not container.streams.video:
        container.close()
        raise BadMedia("the file has no video stream", hint="send a file with a video stream", field="video")
    return container


def _format(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return "mov"
    for magic, name in ((b"\x1aE\xdf\xa3", "matroska"), (b"OggS", "ogg")):
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    raise BadMedia("the video has an unknown format", hint="send MP4, WebM, Matroska, AVI or Ogg", field="video")


def _check_pixels(width: int, height: int, field: str) -> None:
    if width * height > MOST_PIXELS:
        raise TooLarge(
            f"the {field} has {width} x {height} pixels, allowed are {MOST_PIXELS}",
            hint="send a smaller one; it is resized to a few hundred pixels per side",
            field=field,
            value=f"{width}x{height}",
            allowed=str(MOST_PIXELS),
        )


def _too_many(count: int) -> TooLarge:
    return TooLarge(
        f"the video has more than {MOST_FRAMES} frames",
        hint="send the relevant part",
        field="video",
        value=str(count),
        allowed=str(MOST_FRAMES),
    )


def _unreadable(field: str, error: Exception) -> BadMedia:
    kinds = "PNG, JPEG or WebP" if field == "image" else "MP4, WebM or AVI"
    return BadMedia(f"the {field} cannot be decoded", type(error).__name__, f"send a complete {kinds}", field=field)
