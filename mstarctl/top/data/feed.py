"""Reads a deployment's watch in a thread of its own and hands the frames over whole. Reconnects; says how it stands."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mstar_core.errors import MstarError, TransportError, Unreachable, UsageError
from mstar_core.observe.frames import API, STALE_S, Frame, HelloFrame, decode

HELD: Final = 2000
"""Frames that may wait for the screen; the reader stops then, and the socket with it."""

BACK_OFF_S: Final = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame with the line that it came in. at: the reader's monotonic clock."""

    at: float
    raw: bytes
    frame: Frame


class Lines(Protocol):
    """What is asked of an admin client."""

    def raw_lines(self, path: str, **arguments: Any) -> Iterator[bytes]: ...


class Feed:
    """Owned by the session: `start`, `take` as often as one likes, `stop`."""

    def __init__(self, admin: Lines, hz: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._admin, self._clock = admin, clock
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
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """End soon. The thread ends with the next line or the end of its wait; it is a daemon and holds nothing."""
        self._stopping.set()
        self._again.set()

    def ask(self, hz: float) -> None:
        """Ask for another pace: the next line ends this watch and a new one begins."""
        self._wanted_hz = hz
        self._again.set()

    def ask_again(self) -> None:
        """Begin a new watch: frames are missing."""
        self._again.set()

    def take(self) -> list[Arrival]:
        """All frames since the last call. Raises what ended the reader for good (another API version, a bug)."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            found = list(self._waiting)
            self._waiting.clear()
        return found

    @property
    def state(self) -> tuple[str, str]:
        """(live, connecting or stale, why)."""
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
            except Exception as error:  # noqa: BLE001  the isolation boundary of the thread: the screen tells of it
                self._failure = error
                return
            was_asked = self._again.is_set()
            self._again.clear()
            if self._is_connected:
                failures = 0
            self._is_connected = False
            if not was_asked:
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
            self._is_connected, self._why = True, ""
            self._put(Arrival(self._heard, line, frame))

    def _put(self, arrival: Arrival) -> None:
        while len(self._waiting) >= HELD and not self._stopping.is_set():
            self._stopping.wait(0.05)
        with self._lock:
            self._waiting.append(arrival)


def check(hello: HelloFrame) -> None:
    """Raises UsageError when one side must be updated."""
    if hello.min_api > API:
        raise UsageError(f"the deployment speaks admin API {hello.min_api}, this is {API}", hint="update mstarctl")
    if hello.api < API:
        raise UsageError(
            f"the deployment speaks admin API {hello.api}, this is {API}", hint="restart it: mstarctl restart"
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
    """Reads the merged logs in a thread, from the moment the screen first asks for them."""

    def __init__(self, admin: Any, tail: int = 200) -> None:
        self._admin, self._tail = admin, tail
        self._waiting: deque[dict[str, Any]] = deque(maxlen=10_000)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to read; again does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="top-logs", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End with the next line."""
        self._stopping.set()

    def take(self) -> list[dict[str, Any]]:
        """Lines since the last call."""
        found = []
        while self._waiting:
            found.append(self._waiting.popleft())
        return found

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
            tail = 0  # what came before was shown
            self._stopping.wait(2.0)
