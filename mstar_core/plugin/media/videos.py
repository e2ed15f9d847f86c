"""Video reader: container facts first, then the requested frames one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mstar_core.closing import Closing
from mstar_core.errors import BadMedia, MstarError
from mstar_core.plugin.media.containers import open_container, seconds_of
from mstar_core.plugin.media.limits import FIELD, MediaLimits, check_decoded, too_large, undecodable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Frame = npt.NDArray[np.uint8]

MOST_RATE = 240
"""Highest frame rate. With the longest length it bounds the number of frames that are scanned."""


class VideoFile(Closing):
    """A video, open for the length of a `with` block. Size and length are checked when it is opened.

    Raises TooLarge, BadMedia.
    """

    def __init__(self, data: bytes, limits: MediaLimits) -> None:
        self._limits = limits
        self._data = data
        try:
            self._container = open_container(data)
        except Exception as error:
            raise undecodable("video", error) from error
        try:
            self._stream = self._picture()
            self._check()
        except BaseException:
            self._container.close()
            raise

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the first frame by the container."""
        context = self._stream.codec_context
        return int(context.width), int(context.height)

    @property
    def rate(self) -> float:
        """Frames per second; 0 where it is not known."""
        rate = self._stream.average_rate or self._stream.guessed_rate
        return float(rate) if rate else 0.0

    @property
    def seconds(self) -> float | None:
        """Length, None if the container does not have it."""
        return seconds_of(self._container, self._stream)

    def count(self) -> int:
        """Count the frames by their packets, without decoding. May be called once, before `frames`."""
        total = 0
        with open_container(self._data) as container:
            for packet in container.demux(container.streams.video[0]):
                total += packet.size > 0
                self._check_seen(total)
        return total

    def frames(self, chosen: Sequence[int]) -> Iterator[Frame]:
        """Yield the frames of ascending indices, uint8 RGB [height, width, 3], rotated as the file says.

        One frame is held at a time. Raises TooLarge beyond the limit of frames or bytes, BadMedia (`too_few_frames`)
        if the video ends before the last index.
        """
        limits = self._limits
        if len(chosen) > limits.video_frames:
            raise too_large(f"{len(chosen)} frames of a video are requested", f"{limits.video_frames}")
        wanted, given, size = iter(chosen), 0, 0
        next_one = next(wanted, None)
        for index, frame in enumerate(self._decoded()):
            self._check_seen(index + 1)
            _check_frame(frame.width, frame.height, limits)
            while next_one == index:
                size += frame.width * frame.height * 3
                check_decoded(size, limits)
                yield _pixels(frame)
                given += 1
                next_one = next(wanted, None)
            if next_one is None:
                return
        if next_one is not None:
            raise BadMedia(
                f"the video has no frame {next_one}",
                f"{given} of {len(chosen)} were found",
                "send a longer video",
                field=FIELD,
                code="too_few_frames",
            )

    def close(self) -> None:
        """Free the decoder. Safe to call twice."""
        self._container.close()

    def _decoded(self) -> Iterator[Any]:
        self._stream.thread_type = "AUTO"
        try:
            yield from self._container.decode(self._stream)
        except MstarError:
            raise
        except Exception as error:
            raise undecodable("video", error) from error

    def _picture(self) -> Any:
        if not self._container.streams.video:
            raise BadMedia("the file has no video track", hint="send a file with video", field=FIELD)
        stream = self._container.streams.video[0]
        if stream.codec_context is None:
            raise undecodable("video", "its codec is not known")
        return stream

    def _check(self) -> None:
        _check_frame(*self.size, self._limits)
        seconds = self.seconds
        if seconds is not None and seconds > self._limits.video_s:
            raise too_large(f"the video takes {seconds:g} s", f"{self._limits.video_s:g} s")

    def _check_seen(self, count: int) -> None:
        most = int(self._limits.video_s * MOST_RATE)
        if count > most:
            raise too_large(f"the video has more than {most} frames", f"{most}")


def _check_frame(width: int, height: int, limits: MediaLimits) -> None:
    if max(width, height) > limits.video_width or min(width, height) > limits.video_height:
        raise too_large(
            f"the video has frames of {width} x {height} pixels", f"{limits.video_width} x {limits.video_height}"
        )


def _pixels(frame: Any) -> Frame:
    try:
        return _upright(frame)
    except Exception as error:
        raise undecodable("video", error) from error


def _upright(frame: Any) -> Frame:
    import numpy as np

    pixels: Frame = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels
