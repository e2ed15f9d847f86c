"""Process of a child on another host, as its agent reports it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any, Final

from mstar_core.errors import StartError
from mstar_core.messages.hosts import ChildExited, ChildSpawned, LogLines

HOST_LOST: Final = "host_lost"
"""Code of the records of processes that ended with their host."""


class RemoteProcess:
    """A child on another host. Owned by the supervisor; the link to its agent passes on what the agent reports.

    spawned: set once it exists, or has failed to start (`check`). left: files that it left for the supervisor.
    """

    def __init__(self, key: int, name: str, host: str, send_signal: Callable[[int, signal.Signals], None]) -> None:
        self.key = key
        self.name = name
        self.host = host
        self.pid = 0
        self.was_standby = False
        self.exited = asyncio.Event()
        self.spawned = asyncio.Event()
        self.returncode: int | None = None
        self.left: dict[str, str] = {}
        self.cpu_s: float | None = None
        self.suspended = False
        self._error: StartError | None = None
        self._fatal: dict[str, Any] | None = None
        self._send_signal = send_signal
        self._write: Callable[[bytes], None] | None = None
        self._early: list[bytes] = []  # lines that came before `watch`

    async def watch(self, write: Callable[[bytes], None]) -> int:
        """See `ChildProcess.watch`."""
        self._write = write
        for line in self._early:
            write(line)
        self._early.clear()
        await self.exited.wait()
        return self.returncode or 0

    def signal(self, number: signal.Signals) -> None:
        """See `ChildProcess.signal`."""
        if self.returncode is None:
            self._send_signal(self.key, number)

    def fatal(self) -> dict[str, Any] | None:
        """See `ChildProcess.fatal`."""
        return self._fatal

    def computed_s(self) -> float | None:
        """See `ChildProcess.computed_s`."""
        return self.cpu_s

    def is_suspended(self) -> bool:
        """See `ChildProcess.is_suspended`."""
        return self.suspended

    def check(self) -> None:
        """Raise StartError if it could not be started."""
        if self._error is not None:
            raise self._error

    # -- reports of the agent ---------------------------------------------------------------------------------

    def take_spawned(self, report: ChildSpawned) -> None:
        """Note that it exists, or why it does not."""
        self.pid = report.pid
        if report.error:
            self.refuse(StartError(report.error, report.detail, report.hint, code=report.code or None))
        self.spawned.set()

    def refuse(self, error: StartError) -> None:
        """Note that it could not be started."""
        self._error = error
        self._end(1)

    def take_lines(self, message: LogLines) -> None:
        """Write its output into its log."""
        lines = [line + b"\n" for line in message.lines]
        if message.dropped:
            lines.insert(0, b"[%d earlier lines were dropped: it writes faster than they leave]\n" % message.dropped)
        if self._write is None:
            self._early += lines
            return
        for line in lines:
            self._write(line)

    def take_exit(self, report: ChildExited) -> None:
        """Note its end."""
        if report.fatal is not None:
            age_s = float(report.fatal.get("age_s", 0.0))
            times = {"monotonic": time.monotonic() - age_s, "time": time.time() - age_s}
            self._fatal = {**report.fatal, **times}
        self.left = report.left
        self._end(report.status)

    def lose(self, message: str, why: str) -> None:
        """Note its end with its host."""
        self._fatal = {
            "name": self.name,
            "pid": self.pid,
            "class": "HostLost",
            "code": HOST_LOST,
            "message": message,
            "detail": why,
            "hint": "its processes start again once another host has room for them",
            "monotonic": time.monotonic(),
            "time": time.time(),
        }
        if not self.spawned.is_set():
            self._error = StartError(message, why, code=HOST_LOST)
        self._end(-signal.SIGKILL)

    def _end(self, status: int) -> None:
        if self.returncode is None:
            self.returncode = status
        self.spawned.set()
        self.exited.set()
