"""A deployment whose worker sends audio at a steady pace to all open streams, one message per step and lane."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from mstar_core.messages.flow import Output, Outputs
from mstar_core.messages.requests import CancelRequest, NewRequest
from mstar_core.messages.wire import Message
from tests.fakes.conductor import FakeDeployment

SAMPLES: Final = 2048
RATE: Final = 24_000
PACE_S: Final = SAMPLES / RATE
"""A chunk of audio each 85.3 ms: 11.7 per second, as speech models generate them."""

STAMP_BYTES: Final = 16
LANES: Final = 4
"""Steps over which the streams are spread, like a worker's batches."""

LARGE: Final = 64
"""A prompt of `large` gets chunks this many times longer, without end, for clients that do not read."""


def chunk(index: int, stamp_ns: int, times: int = 1) -> np.ndarray:
    """Return chunk `index` of any stream: send time and number (i64 each), then the number in every sample."""
    made = np.full(SAMPLES * times, index & 0x7FFF, dtype=np.int16)
    made[: STAMP_BYTES // 2] = np.array([stamp_ns, index], dtype=np.int64).view(np.int16)
    return made


@dataclass(slots=True)
class Spoken:
    """One stream. left: chunks until its end."""

    handle: int
    lane: int
    left: int
    times: int
    index: int = 0


class PacedDeployment(FakeDeployment):
    """Answers every request with `chunks` chunks, large ones until cancelled. pace_s None: all at once.

    sent: chunks so far. behind_s: delay of each step, which shows the load of the machine.
    """

    def __init__(self, ipc: Path, *, chunks: int, pace_s: float | None = PACE_S) -> None:
        super().__init__(ipc)
        self.sent = 0
        self.behind_s: list[float] = []
        self.chunks = chunks
        self.pace_s = pace_s
        self._streams: dict[int, Spoken] = {}
        self._count = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.attach()
        self._task = asyncio.create_task(self._speak())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self.close()

    async def serve(self) -> None:
        """Wait for the api, and make the deployment ready."""
        await self.until(lambda: bool(self.received))
        self.ready()

    def _one(self, name: str, message: Message) -> None:
        super()._one(name, message)
        match message:
            case NewRequest():
                self._open(message)
            case CancelRequest():
                self._streams.pop(message.handle, None)

    def _open(self, request: NewRequest) -> None:
        self._count += 1
        times = LARGE if self.prompt(request) == "large" else 1
        stream = Spoken(request.handle, self._count % LANES, self.chunks, times)
        self._streams[request.handle] = stream
        if self.pace_s is None:
            while stream.handle in self._streams:
                self._step([stream])

    async def _speak(self) -> None:
        if self.pace_s is None:
            return
        due, step = time.monotonic(), 0
        while True:
            due, step = due + self.pace_s / LANES, step + 1
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late_s = time.monotonic() - due
            lane = [stream for stream in self._streams.values() if stream.lane == step % LANES]
            if lane:
                self.behind_s.append(late_s)
                self._step(lane)

    def _step(self, streams: list[Spoken]) -> None:
        stamp = time.monotonic_ns()
        items = [
            Output(
                handle=stream.handle,
                seq=stream.index,
                port="pcm",
                modality="audio",
                ref=self._tensors.put(chunk(stream.index, stamp, stream.times), "api"),
            )
            for stream in streams
        ]
        self.tell(Outputs(worker="worker-0", items=items), sender="worker-0")
        self.sent += len(items)
        for stream in streams:
            stream.index += 1
            stream.left -= stream.times == 1
            if not stream.left:
                del self._streams[stream.handle]
                self._seq[stream.handle] = stream.index
                self.finish(stream.handle, token=7 * stream.index)
