"""Log lines of processes on the way to the supervisor: in batches, bounded, with a count of those that were dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from mstar_core.errors import PeerStalled
from mstar_core.messages.hosts import LogLines

FLUSH_S: Final = 0.05
"""Interval of the batches while there are lines."""

BATCH_BYTES: Final = 256 << 10
MOST_BYTES: Final = 4 << 20
"""Most bytes of a process that wait here. A process that writes faster than they leave loses its oldest lines."""


class LogBuffer:
    """The lines of one process. Owned by the agent, which calls `flush`.

    send: passes a message to the supervisor; it raises PeerStalled if none can be taken now. filled: called when an
    empty buffer gets a line, by the thread that adds it.
    """

    def __init__(self, key: int, send: Callable[[LogLines], object], filled: Callable[[], object]) -> None:
        self.dropped = 0
        self._key = key
        self._send = send
        self._filled = filled
        self._lines: deque[bytes] = deque()
        self._size = 0

    @property
    def is_empty(self) -> bool:
        return not self._lines

    def add(self, line: bytes) -> None:
        """Keep one line, with or without its end."""
        text = line.rstrip(b"\n")
        self._lines.append(text)
        if len(self._lines) == 1:  # after the append: `flush` of another thread then sees the line, or this call does
            self._filled()
        self._size += len(text)
        while self._size > MOST_BYTES:
            self._size -= len(self._lines.popleft())
            self.dropped += 1

    def flush(self) -> bool:
        """Send one batch. Returns whether lines are left."""
        if not self._lines:
            return False
        batch: list[bytes] = []
        size = 0
        for line in self._lines:
            if batch and size + len(line) > BATCH_BYTES:
                break
            batch.append(line)
            size += len(line)
        try:
            self._send(LogLines(key=self._key, lines=batch, dropped=self.dropped))
        except PeerStalled:
            return False
        for _ in batch:
            self._lines.popleft()
        self._size -= size
        self.dropped = 0
        return bool(self._lines)
