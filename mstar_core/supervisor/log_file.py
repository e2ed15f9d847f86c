"""A child's log on disk: bounded, rotated once, never in the way of the child. Written by the supervisor's pumps."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from pathlib import Path
from typing import Final

LINE_LIMIT: Final = 1 << 20
FILE_LIMIT: Final = 200 << 20
TAIL_LINES: Final = 200

log = logging.getLogger(__name__)


class LogFile:
    """Appends lines, keeps the last ones in memory, turns the file over at its limit. Owned by its child's pump.

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
        """Append one line (with its newline). A full disk loses lines, never the child."""
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
        for listener in self.listeners:
            listener.set()

    def close(self) -> None:
        self._file.close()

    def _turn_over(self) -> None:
        self._file.close()
        self.path.replace(self.path.with_suffix(".log.1"))
        self._file = self.path.open("ab", buffering=0)
        self._size = 0


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
