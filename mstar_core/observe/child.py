"""A child process towards its supervisor: hello, phases, beats, pings, death. Used by api, conductor and worker.

Nothing here waits, owns a socket or knows of an event loop: the process's own loop calls `beat` and `on`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from mstar_core.errors import ExitCode, MstarError
from mstar_core.messages.life import Beat, Hello, LogLevel, PeerDown, PeerUp, Phase, Ping, Stop, Telemetry
from mstar_core.messages.telemetry import EdgeNews, MetricSample, RequestNews, Span
from mstar_core.observe.logs import REQUEST_ID

HELLO_S: Final = 0.2
BEAT_S: Final = 1.0
PING_LIMIT_S: Final = 10.0
"""Silence of the supervisor after which a child ends: ten pings, as long as the supervisor waits for a child's beat.

The kernel ends children of a supervisor that died; this is for one that hangs, and no moment of a busy host is that.
"""

SUPERVISOR: Final = "supervisor"
_PR_SET_PDEATHSIG: Final = 1  # prctl(2)
_PR_SET_TIMERSLACK: Final = 29
_EXACT_NS: Final = 1000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BLOCK_BYTES: Final = 64 << 20
"""Blocks below this come from memory that is kept."""

KEPT_BYTES: Final = 256 << 20
"""Most that is kept at the end of it."""

log = logging.getLogger("mstar.child")


class Deployed(Protocol):
    """What this file needs of a DeploymentSpec."""

    @property
    def run_dir(self) -> str: ...

    @property
    def ipc_dir(self) -> Path: ...


class Post(Protocol):
    """What this file needs of a Courier."""

    def connect(self, name: str, endpoint: str, incarnation: int) -> bool: ...

    def disconnect(self, name: str, incarnation: int | None = None) -> int: ...

    def send(self, name: str, message: Any) -> bool: ...


class ChildLife:
    """One process's life. Owned by its main loop.

    stop_reason: set once the supervisor asks for the end or is lost. known: the supervisor has answered.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        spec: Deployed,
        courier: Post,
        *,
        supervisor: str = "",
        fd_endpoint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """supervisor: endpoint of its mailbox; empty: run alone (tests), nothing is sent and nobody is missed."""
        self.name = name
        self.incarnation = incarnation
        self.endpoint = f"ipc://{spec.ipc_dir / f'{name}.{incarnation}'}"
        self.known = False
        self.stop_reason: str | None = None
        self._run_dir = Path(spec.run_dir)
        self._courier = courier
        self._clock = clock
        self._fd_endpoint = fd_endpoint
        self._alone = not supervisor
        self._phase = ""
        self._next_send = clock()
        self._seen = clock()
        self._silence_s = 0.0
        if supervisor:
            courier.connect(SUPERVISOR, supervisor, 0)

    def beat(self, now: float, *, work_ready: bool = False, steps: int = 0) -> None:
        """Say hello until known, then beat each second; note how long the supervisor has been silent.

        Call it at least each second, after the mailbox was drained. Sets `stop_reason` when the supervisor is lost.
        """
        if self._alone:
            return
        # A stopped or busy process reads its pings late: only time in which this loop turned counts as silence.
        self._silence_s += min(now - self._seen, BEAT_S)
        self._seen = now
        if self.known and self._silence_s > PING_LIMIT_S and self.stop_reason is None:
            self.stop_reason = f"the supervisor has been silent for {PING_LIMIT_S:g} s"
        if now < self._next_send:
            return
        if self.known:
            self._next_send = now + BEAT_S
            self._send(Beat(name=self.name, incarnation=self.incarnation, work_ready=work_ready, steps=steps))
        else:
            self._next_send = now + HELLO_S
            self._send(self._hello())

    def wait_s(self, now: float) -> float:
        """Seconds until `beat` has something to do; for loops that wait on their own."""
        return max(0.0, min(self._next_send - now, BEAT_S))

    def on(self, message: object) -> bool:
        """Take a life message. Returns True when nothing is left to do with it.

        A peer that comes or goes is connected or disconnected here and False comes back, for the owner to act on.
        """
        match message:
            case Ping():
                self._silence_s = 0.0
            case PeerUp(name=self.name):
                self.known = self.known or message.incarnation == self.incarnation
                self._silence_s = 0.0
            case PeerUp():
                self._courier.connect(message.name, message.endpoint, message.incarnation)
                return False
            case PeerDown():
                self._courier.disconnect(message.name, message.incarnation)
                return False
            case LogLevel():
                logging.getLogger().setLevel(message.level)
                log.info("logging from %s on", message.level)
            case Stop():
                self.stop_reason = self.stop_reason or message.reason or "stopped by the supervisor"
            case _:
                return False
        return True

    def phase(
        self, phase: str, *, done: int = 0, total: int = 0, detail: str = "", facts: dict[str, Any] | None = None
    ) -> None:
        """Report a start-up phase or progress in one. done, total: bytes, or what `detail` says."""
        self._phase = phase
        self._send(
            Phase(
                name=self.name, incarnation=self.incarnation, phase=phase, done=done, total=total, detail=detail,
                facts=facts or {},
            )
        )  # fmt: skip

    def telemetry(
        self,
        values: dict[str, float],
        requests: list[RequestNews] | None = None,
        spans: list[Span] | None = None,
        edges: list[EdgeNews] | None = None,
        *,
        events: list[tuple[str, dict[str, Any]]] | None = None,
        dropped: int = 0,
        samples: list[MetricSample] | None = None,
    ) -> None:
        """Send one telemetry batch; the caller keeps the pace of at most one per 100 ms."""
        self._send(
            Telemetry(
                name=self.name, incarnation=self.incarnation, values=values, requests=requests or [],
                spans=spans or [], edges=edges or [], events=events or [], dropped=dropped,
                samples=samples or [],
            )
        )  # fmt: skip

    def fatal(self, error: BaseException) -> None:
        """Write why this process dies to the run directory and to its log. Never raises; the first cause is kept."""
        note_fatal(error, self.name, self.incarnation, self._run_dir, self._phase)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around a process's main: an error that ends it is written down, then becomes its exit code."""
        with _guarded(self.name, self.incarnation, self._run_dir, lambda: self._phase):
            yield

    def _hello(self) -> Hello:
        return Hello(
            name=self.name,
            incarnation=self.incarnation,
            pid=os.getpid(),
            endpoint=self.endpoint,
            fd_endpoint=self._fd_endpoint,
        )

    def _send(self, message: Any) -> None:
        if self._alone:
            return
        with suppress(MstarError):  # a supervisor that does not read is seen by its missing pings
            self._courier.send(SUPERVISOR, message)


def guarded_process(name: str, incarnation: int, spec: Deployed) -> AbstractContextManager[None]:
    """`ChildLife.guarded` for what comes before there is a ChildLife: reading the model, opening sockets."""
    return _guarded(name, incarnation, Path(spec.run_dir))


@contextmanager
def _guarded(name: str, incarnation: int, run_dir: Path, phase: Callable[[], str] = str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        note_fatal(error, name, incarnation, run_dir, phase())
        code = error.exit_code if isinstance(error, MstarError) else ExitCode.INTERNAL
        raise SystemExit(int(code)) from error


def note_fatal(error: BaseException, name: str, incarnation: int, run_dir: Path, phase: str = "") -> None:
    """Log a death and write its record to the run directory. Never raises."""
    record = {**fatal_record(error, name, incarnation), "phase": phase}
    log.critical("%s", record["message"], extra={"facts": {key: record[key] for key in ("class", "hint", "where")}})
    with suppress(OSError):
        write_fatal(run_dir / "children" / f"{name}.fatal.json", record)


def fatal_record(error: BaseException, name: str, incarnation: int) -> dict[str, Any]:
    """Facts of a death: times, class, sentence, numbers, place, memory, traceback. All values are plain JSON."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    facts = error.facts if isinstance(error, MstarError) else {}
    return {
        "time": time.time(),
        "monotonic": time.monotonic(),
        "name": name,
        "incarnation": incarnation,
        "pid": os.getpid(),
        "class": type(error).__name__,
        "code": error.code if isinstance(error, MstarError) else "internal_error",
        "message": (error.title if isinstance(error, MstarError) else str(error)) or type(error).__name__,
        "detail": error.detail if isinstance(error, MstarError) else "",
        "hint": error.hint if isinstance(error, MstarError) else "",
        "facts": {
            key: value if isinstance(value, (int, float, str, bool)) else str(value) for key, value in facts.items()
        },
        "request": REQUEST_ID.get(),
        "where": f"{last.filename}:{last.lineno}" if last else "",
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux reports KiB
        "traceback": "".join(traceback.format_exception(error)),
    }


def write_fatal(path: Path, record: dict[str, Any]) -> None:
    """Write `record` whole or not at all. A record of the same life that is there already stays: it came first."""
    with suppress(OSError, ValueError):
        if json.loads(path.read_bytes()).get("pid") == record["pid"]:
            return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1))
    os.replace(part, path)


def prepare_process() -> None:
    """End with the parent, and write all stacks to standard error on SIGUSR1. First thing in each child's main."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent()


def keep_start() -> None:
    """Leave what the start has made out of collections from now on; what of it is of no use is collected before.

    Called once, when a process is ready to serve. A full collection looks at everything that may be part of a circle,
    some 200,000 objects in a process with torch, and requests wait for it.
    """
    gc.collect()
    gc.freeze()


def die_with_parent() -> None:
    """Let the kernel end this process when its parent dies, whatever it is doing then (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        raise SystemExit(int(ExitCode.INTERNAL))


def set_exact_timers() -> None:
    """Let naps of this thread, and of those that it starts, end when they should and not up to 50 µs later (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _EXACT_NS)


def keep_freed_memory() -> None:
    """Let the C library use freed blocks of megabytes again instead of giving each back to the system.

    Clips and latents are 10 to 20 MB: the pages of a fresh block cost five times what a copy into known ones does.
    Up to KEPT_BYTES stay with the process. Nothing happens where the library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
