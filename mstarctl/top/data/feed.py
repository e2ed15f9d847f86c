"""Feeds of a deployment's watch and logs: read in threads, reconnected, with the state of the connection."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mstar_core.errors import MstarError, TransportError, Unreachable, UsageError
from mstar_core.observe.frames import API, Frame, HelloFrame
from mstarctl.client.store import decode
from mstarctl.client.watch import STALE_S

HELD: Final = 2000
"""Most frames that wait for the screen. The reader blocks at this limit, which stops the socket too."""

BACK_OFF_S: Final = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame with its line. at: time of arrival, on the reader's monotonic clock."""

    at: float
    raw: bytes
    frame: Frame


class Lines(Protocol):
    """The part of an admin client that is used here."""

    def raw_lines(self, path: str, **arguments: Any) -> Iterator[bytes]: ...


class Feed:
    """Reads the watch in a thread. Owned by the session, which calls `start`, `take` repeatedly, and `stop`."""

    def __init__(
        self,
        admin: Lines,
        hz: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        ending: Callable[[], str] = lambda: "",
    ) -> None:
        """ending: returns how the deployment ended, empty while it runs or if that is unknown."""
        self._admin, self._clock, self._ending = admin, clock, ending
        self._ended = ""
        self._wanted_hz = hz
        self._waiting: deque[Arrival] = deque()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._again = threading.Event()
        self._why = ""
        self._failure: Exception | None = None
        self._heard = clock()
        self._is_connected = False
        self._thread = threading.Thread(target=self._run, name="top-feed", daemon=True)

    def start(self) -> None:
        """Start to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading. The daemon thread ends with the next line or the end of its wait."""
        self._stopping.set()
        self._again.set()

    def set_rate(self, hz: float) -> None:
        """Change the frame rate: the next line ends this watch, and a new one is opened."""
        self._wanted_hz = hz
        self._again.set()

    def restart(self) -> None:
        """Open a new watch, because frames are missing."""
        self._again.set()

    def take(self) -> list[Arrival]:
        """Return the frames since the last call. Raises a permanent failure of the reader (API version, bug)."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            arrivals = list(self._waiting)
            self._waiting.clear()
        return arrivals

    @property
    def state(self) -> tuple[str, str]:
        """(`live`, `connecting`, `stale` or `ended`, reason)."""
        if self._ended:
            return "ended", self._ended
        silent = self._clock() - self._heard
        if self._is_connected and silent < STALE_S:
            return "live", ""
        if self._is_connected:
            return "stale", f"no frame for {silent:.0f} s"
        return ("stale", self._why) if self._why else ("connecting", "")

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self._read()
                failures = 0
                self._why = "the watch ended"
            except UsageError as error:
                self._failure = error
                return
            except (MstarError, OSError, ValueError) as error:
                self._why = _why(error)
            except Exception as error:  # noqa: BLE001  isolation boundary of the thread: the screen reports it
                self._failure = error
                return
            self._ended = self._ending()
            is_restart = self._again.is_set()
            self._again.clear()
            if self._is_connected:
                failures = 0
            self._is_connected = False
            if not is_restart:
                self._stopping.wait(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
                failures += 1

    def _read(self) -> None:
        for line in self._admin.raw_lines("/v1/watch", hz=self._wanted_hz):
            if self._stopping.is_set() or self._again.is_set():
                return
            self._heard = self._clock()
            frame = decode(line) if line.strip() else None
            if frame is None:
                continue
            if isinstance(frame, HelloFrame):
                check(frame)
            self._is_connected, self._why, self._ended = True, "", ""
            self._put(Arrival(self._heard, line, frame))

    def _put(self, arrival: Arrival) -> None:
        while len(self._waiting) >= HELD and not self._stopping.is_set():
            self._stopping.wait(0.05)
        with self._lock:
            self._waiting.append(arrival)


def check(hello: HelloFrame) -> None:
    """Raise UsageError if the API versions are incompatible."""
    if hello.min_api > API:
        raise UsageError(f"the deployment uses admin API {hello.min_api}, mstarctl {API}", hint="update mstarctl")
    if hello.api < API:
        raise UsageError(
            f"the deployment uses admin API {hello.api}, mstarctl {API}", hint="restart it: mstarctl restart"
        )


def _why(error: Exception) -> str:
    if isinstance(error, Unreachable) and "context" in error.facts:
        return error.title
    if isinstance(error, Unreachable):
        return "its supervisor does not answer"
    if isinstance(error, TransportError):
        return f"{error.title}"
    return str(error) or type(error).__name__


class LogFeed:
    """Reads the merged logs in a thread, from the first visit of the logs screen."""

    def __init__(self, admin: Any, tail: int = 200) -> None:
        self._admin, self._tail = admin, tail
        self._waiting: deque[dict[str, Any]] = deque(maxlen=10_000)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to read. Idempotent."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="top-logs", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop with the next line."""
        self._stopping.set()

    def take(self) -> list[dict[str, Any]]:
        """Return the lines since the last call."""
        lines = []
        while self._waiting:
            lines.append(self._waiting.popleft())
        return lines

    def _run(self) -> None:
        tail = self._tail
        while not self._stopping.is_set():
            try:
                for line in self._admin.lines("/v1/logs", follow=1, tail=tail):
                    if self._stopping.is_set():
                        return
                    if line is not None and "line" in line:
                        self._waiting.append(line)
            except (MstarError, OSError, ValueError) as error:
                self._waiting.append({"from": "top", "line": f"the logs cannot be read: {_why(error)}"})
            tail = 0  # earlier lines were shown already
            self._stopping.wait(2.0)
