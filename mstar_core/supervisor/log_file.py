"""Log files: bounded, rotated once; those of the children, of the supervisor, and `--log-stats`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mstar_core.config.resolved import KEEP_LOGS, LogConfig
from mstar_core.observe.request_log import RequestLog, RequestRecord

TAIL_LINES: Final = 200

log = logging.getLogger(__name__)


class LogFile:
    """Appends lines, keeps the last ones in memory, and rotates the file by size and age. Owned by its writer.

    listeners: events that are set with each line; followers of the log add and remove theirs. written: time of the last
    line on the monotonic clock.
    """

    def __init__(self, path: Path, limits: LogConfig = KEEP_LOGS, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._limits = limits
        self._clock = clock
        self._begun = clock()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.lines = 0
        self.written = 0.0
        self.listeners: set[asyncio.Event] = set()
        self._file = path.open("ab", buffering=0)
        self._size = self._file.tell()

    def write(self, line: bytes) -> None:
        """Append one line (with its newline) and wake followers. A full disk loses lines, but never blocks."""
        self.append(line)
        self.wake()

    def wake(self) -> None:
        """Wake followers. Called on the loop's thread only."""
        for listener in self.listeners:
            listener.set()

    def append(self, line: bytes) -> None:
        """Append one line (with its newline) without waking followers."""
        self.lines += 1
        self.written = time.monotonic()
        text = line.decode("utf-8", "replace").rstrip("\n")
        self.tail.append(text)
        try:
            self._file.write(line if line.endswith(b"\n") else line + b"\n")
            self._size += len(line)
            if self._is_full():
                self._rotate()
        except OSError as error:
            log.warning("a log line was lost: %s", error.strerror)

    def close(self) -> None:
        self._file.close()

    def _is_full(self) -> bool:
        rotate_s = self._limits.rotate_s
        is_old = rotate_s is not None and self._clock() - self._begun > rotate_s
        return is_old or self._size > self._limits.max_bytes

    def _rotate(self) -> None:
        self._file.close()
        self.path.replace(self.path.with_suffix(".log.1"))
        self._file = self.path.open("ab", buffering=0)
        self._size = 0
        self._begun = self._clock()


class LogStream:
    """A log file as the stream of a logging handler, for the supervisor's own log."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._is_writing = False

    def write(self, text: str) -> int:
        """Append one line. Lines that logging writes because this write failed are dropped."""
        if not self._is_writing:
            self._is_writing = True
            try:
                self._file.append(text.encode("utf-8", "replace"))
            finally:
                self._is_writing = False
            # Followers read the lines of other threads with the next line or heartbeat.
            if threading.current_thread() is threading.main_thread():
                self._file.wake()
        return len(text)

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""


STATS_FILE: Final = "stats.ndjson"


class StatsLog:
    """Appends to a file that only its owner can read. Owned by the supervisor; a full disk loses lines, nothing else.

    The request log calls `ended` once the last spans of a request have arrived.
    """

    def __init__(self, path: Path, requests: RequestLog, limits: LogConfig = KEEP_LOGS) -> None:
        self.path = path
        self._limits = limits
        self._requests = requests

    def ended(self, record: RequestRecord) -> None:
        """Write one request: its facts, and the sums of its spans by process, node, walk and kind."""
        trace = self._requests.trace(record)
        line = {**trace["request"], "sums": trace["sums"]}
        try:
            if self.path.exists() and self.path.stat().st_size > self._limits.max_bytes:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            with open(self.path, "a", encoding="utf-8", opener=_private) as file:
                file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:
            log.warning("a line of the statistics log was lost: %s: %s", self.path, error.strerror)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
