"""Keeper of a gateway: owns the lock and the listening sockets, starts the worker, and starts it again after a death.

A restart is rolling: the next worker listens on the same sockets before the old one stops accepting, so that no
connection is refused. Signals: SIGTERM drains and ends, SIGHUP reads the file again, SIGUSR2 restarts.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Final

from mstar_core.errors import ExitCode, StartError
from mstar_core.gateway.process.spec import GatewaySpec

log = logging.getLogger("mstar.gateway")

ENTRY: Final = "mstar_core.process.entry"
WORKER: Final = "mstar_core.gateway.process"
READY: Final = b"1"
END_S: Final = 15.0
"""Time after the drain in which a worker must end."""

START_S: Final = 60.0
PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses before restarts after deaths that follow each other."""

STEADY_S: Final = 30.0
"""Life after which a death is the first of a row again."""

HANDOVER: Final = signal.SIGUSR2
HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, HANDOVER, signal.SIGCHLD)


@dataclass(slots=True)
class WorkerProcess:
    """One worker process. ready: end of the pipe on which it reports that it serves."""

    process: subprocess.Popen[bytes]
    ready: IO[bytes]
    begun: float
    is_ready: bool = False

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None


@dataclass(slots=True)
class GatewayKeeper:
    """The keeper's state. Owned by `main`, which calls `run` until it returns the exit code.

    current: the worker that serves. next: one that will replace it. old: those that drain.
    """

    spec: GatewaySpec
    listener: socket.socket
    admin: socket.socket
    log_file: IO[bytes]
    current: WorkerProcess | None = None
    next: WorkerProcess | None = None
    old: list[WorkerProcess] = field(default_factory=list)
    deaths: int = 0
    has_served: bool = False
    end_at: float | None = None
    restart_at: float | None = None
    _signals: list[int] = field(default_factory=list)

    def run(self) -> ExitCode:
        """Keep one worker serving until a signal ends the gateway."""
        with self._woken() as wakes, selectors.DefaultSelector() as selector:
            selector.register(wakes, selectors.EVENT_READ)
            self.current = self._start(selector)
            while True:
                for key, _ in selector.select(self._timeout_s()):
                    if key.fileobj is wakes:
                        wakes.recv(4096)
                    elif isinstance(key.data, WorkerProcess):
                        self._heard(key.data, selector)
                while self._signals:
                    self._handle(self._signals.pop(0), selector)
                code = self._reap(selector)
                if code is not None:
                    return code

    @contextmanager
    def _woken(self) -> Iterator[socket.socket]:
        """Yield a socket that becomes readable with each signal."""
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        reader.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        handlers = {number: signal.signal(number, note) for number in HANDLED}
        try:
            yield reader
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            reader.close()
            writer.close()

    def _start(self, selector: selectors.BaseSelector) -> WorkerProcess:
        read, write = os.pipe()
        fds = (self.listener.fileno(), self.admin.fileno(), write)
        arguments = [self.spec.run_dir, *map(str, fds)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", ENTRY, str(os.getpid()), WORKER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self.log_file,
                stderr=self.log_file,
                pass_fds=fds,
            )
        except OSError as error:
            os.close(read)
            raise StartError("the gateway's worker cannot be started", error.strerror or "", phase="spawn") from error
        finally:
            os.close(write)
        worker = WorkerProcess(process, os.fdopen(read, "rb", buffering=0), time.monotonic())
        selector.register(worker.ready, selectors.EVENT_READ, worker)
        return worker

    def _heard(self, worker: WorkerProcess, selector: selectors.BaseSelector) -> None:
        """Read the pipe of a worker: it serves, or it has ended."""
        selector.unregister(worker.ready)
        worker.is_ready = worker.ready.read(1) == READY
        worker.ready.close()
        if not worker.is_ready:
            return
        self.has_served = True
        if worker is self.next:
            if self.current is not None:
                self.old.append(self.current)
                send(self.current, HANDOVER)
            self.current, self.next = worker, None
            log.info("a new worker serves, pid %d", worker.process.pid)

    def _handle(self, number: int, selector: selectors.BaseSelector) -> None:
        match number:
            case signal.SIGTERM | signal.SIGINT:
                self._end()
            case signal.SIGHUP:
                send(self.current, signal.SIGHUP)
            case _ if number == HANDOVER and self.next is None and self.end_at is None:
                self.next = self._start(selector)

    def _end(self) -> None:
        if self.end_at is None:
            self.end_at = time.monotonic() + self.spec.serve.drain_timeout_s + END_S
        for worker in (self.next, self.current):
            send(worker, signal.SIGTERM)

    def _timeout_s(self) -> float | None:
        moments = [moment for moment in (self.end_at, self.restart_at) if moment is not None]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _reap(self, selector: selectors.BaseSelector) -> ExitCode | None:
        """Notice the ends of workers. Returns the exit code once the gateway has ended."""
        now = time.monotonic()
        self.old = [worker for worker in self.old if not worker.has_ended]
        if self.next is not None and self.next.has_ended:
            log.error("the new worker ended before it served; the old one goes on")
            self.next = None
        if self.end_at is not None:
            workers = [worker for worker in (self.current, self.next, *self.old) if worker is not None]
            if all(worker.has_ended for worker in workers):
                return ExitCode.DONE
            if now >= self.end_at:
                for worker in workers:
                    send(worker, signal.SIGKILL)
            return None
        if self.current is not None and self.current.has_ended:
            return self._died(self.current, now)
        if self.current is None and self.restart_at is not None and now >= self.restart_at:
            self.restart_at = None
            self.current = self._start(selector)
        return None

    def _died(self, worker: WorkerProcess, now: float) -> ExitCode | None:
        status = worker.process.returncode
        self.current = None
        if not self.has_served:
            return ExitCode.START_FAILED
        self.deaths = 0 if now - worker.begun > STEADY_S else self.deaths + 1
        pause_s = PAUSES_S[min(self.deaths, len(PAUSES_S) - 1)]
        self.restart_at = now + pause_s
        log.error("the worker ended with status %d; it is started again in %g s", status, pause_s)
        return None


def send(worker: WorkerProcess | None, number: int) -> None:
    """Send a signal to a worker that runs."""
    if worker is not None and not worker.has_ended:
        with suppress(ProcessLookupError):
            worker.process.send_signal(number)


def spec_file(run_dir: str) -> Path:
    """Return the file of the spec, which holds changes that were made while the gateway runs."""
    return Path(run_dir) / "spec.json"
