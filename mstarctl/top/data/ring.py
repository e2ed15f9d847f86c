"""The last five minutes of frames, to step back through: a keyframe every ten seconds and what came between. Bounded.

Owned by the live session. Frames are numbered; a number stays valid until its block is dropped, oldest first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from mstar_core.observe.frames import HelloFrame, decode, encode
from mstar_core.observe.store import Store

SPAN_S: Final = 300.0
KEY_S: Final = 10.0
LIMIT_BYTES: Final = 64 * 2**20
EVENTS: Final = 200


@dataclass(slots=True)
class FrameBlock:
    """A keyframe (hello and snapshot, encoded) and the frames after it. first: number of the keyframe's picture."""

    first: int
    t: float
    hello: bytes
    snapshot: bytes
    frames: list[bytes] = field(default_factory=list)
    size: int = 0

    @property
    def last(self) -> int:
        return self.first + len(self.frames)


class Ring:
    """Pictures of the recent past by number."""

    def __init__(self, span_s: float = SPAN_S, limit_bytes: int = LIMIT_BYTES) -> None:
        self._blocks: deque[FrameBlock] = deque()
        self._span_s, self._limit = span_s, limit_bytes
        self._next = 0
        self.size_bytes = 0

    @property
    def newest(self) -> int:
        """The number of the newest picture, -1 when there is none."""
        return self._next - 1

    @property
    def oldest(self) -> int:
        """The number of the oldest picture that is still there."""
        return self._blocks[0].first if self._blocks else self._next

    def add(self, raw: bytes, store: Store, *, is_whole: bool) -> None:
        """A frame was applied to `store`. is_whole: it was a snapshot, which begins a block."""
        if not store.is_synced:
            return
        if not self._blocks or is_whole or store.t - self._blocks[-1].t >= KEY_S:
            hello = encode(HelloFrame(boot=store.boot, hz=store.hz, rev=store.rev, readonly=store.readonly))
            snapshot = encode(store.snapshot(events=EVENTS))
            self._blocks.append(FrameBlock(self._next, store.t, hello, snapshot, size=len(snapshot) + len(hello)))
            self.size_bytes += self._blocks[-1].size
        else:
            self._blocks[-1].frames.append(raw)
            self._blocks[-1].size += len(raw)
            self.size_bytes += len(raw)
        self._next += 1
        while len(self._blocks) > 1 and (self.size_bytes > self._limit or store.t - self._blocks[1].t > self._span_s):
            self.size_bytes -= self._blocks.popleft().size

    def at(self, number: int) -> Store:
        """The picture of that number, or the nearest one that is there. Raises LookupError when empty."""
        if not self._blocks:
            raise LookupError("nothing has been kept yet")
        wanted = min(max(number, self.oldest), self.newest)
        block = next(block for block in reversed(self._blocks) if block.first <= wanted)
        store = Store()
        for raw in (block.hello, block.snapshot, *block.frames[: wanted - block.first]):
            frame = decode(raw)
            if frame is not None:
                store.apply(frame)
        return store

    def before(self, t: float) -> int:
        """The number of the last picture whose block begins at or before `t`; the oldest when there is none."""
        found = next((block for block in reversed(self._blocks) if block.t <= t), None)
        return self.oldest if found is None else found.first
