"""A process's log on disk: bounded, rotated once, never in the way of the process.

Children's are written by the supervisor's pumps, its own by its logging.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from pathlib import Path
from typing import Final

LINE_LIMIT: Final = 1 << 20
FILE_LIMIT: Final = 200 << 20
TAIL_LINES: Final = 200

log = logging.getLogger(__name__)


class LogFile:
    """Appends lines, keeps the last ones in memory, turns the file over at its limit. Owned by who writes it.

    listeners: set with each line; whoever follows the log puts an event in and takes it out again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.lines = 0
        self.listeners: set[asyncio.Event] = set()
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def write(self, line: bytes) -> None:
        """Append one line (with its newline) and wake who follows. A full disk loses lines, never the child."""
        self.append(line)
        self.wake()

    def wake(self) -> None:
        """Tell who follows. On the loop's thread only."""
        for listener in self.listeners:
            listener.set()

    def append(self, line: bytes) -> None:
        """Append one line (with its newline) without a word to anybody."""
        self.lines += 1
        text = line.decode("utf-8", "replace").rstrip("\n")
        self.tail.append(text)
        try:
            self._file.write(line if line.endswith(b"\n") else line + b"\n")
            self._size += len(line)
            if self._size > FILE_LIMIT:
                self._turn_over()
        except OSError as error:
            log.warning("a log line was lost: %s", error.strerror)

    def close(self) -> None:
        self._file.close()

    def _turn_over(self) -> None:
        self._file.close()
        self.path.replace(self.path.with_suffix(".log.1"))
        self._file = self.path.open("ab", buffering=0)
        self._size = 0


class LogStream:
    """A log file as the stream that logging writes to: the supervisor's own log is told like a child's."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._is_writing = False

    def write(self, text: str) -> int:
        """Append one line. What a file that cannot be written has logging say of itself is left out."""
        if not self._is_writing:
            self._is_writing = True
            try:
                self._file.append(text.encode("utf-8", "replace"))
            finally:
                self._is_writing = False
            if threading.current_thread() is threading.main_thread():  # others are read with the next line or beat
                self._file.wake()
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


async def pump(reader: asyncio.StreamReader, into: LogFile) -> None:
    """Move a child's output into its log until it ends. Over-long lines are cut, not waited for."""
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as end:
            if end.partial:
                into.write(end.partial)
            return
        except asyncio.LimitOverrunError as long:
            line = await reader.readexactly(min(long.consumed or LINE_LIMIT, LINE_LIMIT))
        into.write(line)
