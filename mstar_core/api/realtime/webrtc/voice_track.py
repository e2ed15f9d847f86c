"""Audio track of the model's voice: sound in, frames of 20 ms at the speed of their sound out."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Final

import numpy as np
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame

from mstar_core.api.realtime.sound.formats import Pcm
from mstar_core.api.realtime.sound.resampling import PieceResampler

TRACK_RATE: Final = 48_000
FRAME_S: Final = 0.02
FRAME: Final = round(TRACK_RATE * FRAME_S)


class VoiceTrack(MediaStreamTrack):  # type: ignore[misc]  # aiortc has no types
    """The track of one call. Silent where no sound waits. played: samples of the current item that have been sent.
    is_idle: set while no sound waits.

    The peer connection calls `recv`. The other methods belong to the call.
    """

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self.item_id = ""
        self.played = 0
        self.is_idle = asyncio.Event()
        self._waiting = np.zeros(0, np.int16)
        self._resampler: PieceResampler | None = None
        self._rate = 0
        self._begin: float | None = None
        self._sent = 0

    @property
    def is_speaking(self) -> bool:
        """Return whether sound waits."""
        return len(self._waiting) > 0

    @property
    def played_ms(self) -> int:
        """Return how much of the item was sent."""
        return self.played * 1000 // TRACK_RATE

    def push(self, item_id: str, samples: Pcm, rate: int) -> None:
        """Append sound of an item. rate: of these samples."""
        if item_id != self.item_id:
            self.item_id, self.played = item_id, 0
        if self._resampler is None or rate != self._rate:
            self._resampler, self._rate = PieceResampler(rate, TRACK_RATE), rate
        self._waiting = np.concatenate([self._waiting, self._resampler.push(samples)])
        self.is_idle.clear()

    def finish(self) -> None:
        """Append what the conversion of the rate held back."""
        if self._resampler is not None:
            self._waiting = np.concatenate([self._waiting, self._resampler.flush()])
            self._resampler = None

    def clear(self) -> None:
        """Drop the sound that waits."""
        self._waiting = np.zeros(0, np.int16)
        self._resampler = None
        self.is_idle.set()

    async def recv(self) -> AudioFrame:
        """Return the next frame, when it is due."""
        if self.readyState != "live":
            raise MediaStreamError
        loop = asyncio.get_running_loop()
        if self._begin is None:
            self._begin = loop.time()
        await asyncio.sleep(self._begin + self._sent * FRAME_S - loop.time())
        samples, self._waiting = self._waiting[:FRAME], self._waiting[FRAME:]
        self.played += len(samples)
        if not self.is_speaking:
            self.is_idle.set()
        frame = AudioFrame.from_ndarray(np.pad(samples, (0, FRAME - len(samples)))[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = TRACK_RATE, self._sent * FRAME, Fraction(1, TRACK_RATE)
        self._sent += 1
        return frame
