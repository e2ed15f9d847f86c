"""Ring of the last five minutes of frames, to step back: a keyframe every ten seconds, and the frames between.

Owned by the live session. States are numbered; a number is valid until its block is dropped, oldest first.
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
    """A keyframe (encoded hello and snapshot) and the frames after it. first: number of the keyframe's state."""

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
    """Recent states by number, bounded in time and memory."""

    def __init__(self, span_s: float = SPAN_S, limit_bytes: int = LIMIT_BYTES) -> None:
        self._blocks: deque[FrameBlock] = deque()
        self._span_s, self._limit = span_s, limit_bytes
        self._next = 0
        self.size_bytes = 0

    @property
    def newest(self) -> int:
        """Number of the newest state, -1 if the ring is empty."""
        return self._next - 1

    @property
    def oldest(self) -> int:
        """Number of the oldest state in the ring."""
        return self._blocks[0].first if self._blocks else self._next

    def add(self, raw: bytes, store: Store, *, is_whole: bool) -> None:
        """Add a frame that was applied to `store`. is_whole: it was a snapshot, which starts a block."""
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
        """Return the state with this number, or the nearest one. Raises LookupError if the ring is empty."""
        if not self._blocks:
            raise LookupError("the ring is empty")
        wanted = min(max(number, self.oldest), self.newest)
        block = next(block for block in reversed(self._blocks) if block.first <= wanted)
        store = Store()
        for raw in (block.hello, block.snapshot, *block.frames[: wanted - block.first]):
            frame = decode(raw)
            if frame is not None:
                store.apply(frame)
        return store

    def before(self, t: float) -> int:
        """Return the number of the last keyframe at or before `t`, else that of the oldest state."""
        found = next((block for block in reversed(self._blocks) if block.t <= t), None)
        return self.oldest if found is None else found.first
