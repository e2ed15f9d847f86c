"""Work spread over forked processes, for work whose results are files. Used by the compilation of kernels.

Part of compiling a kernel holds the GIL, so that threads share one core for it. A forked process has a copy of every
object, so the work may be any closure. It must not use the device: a forked process has no CUDA context.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NoReturn

from mstar_core.process.system import die_with_parent

log = logging.getLogger(__name__)

STALL_S: Final = 60.0
"""Time without a finished piece of work after which the processes are ended."""

MOST_PIECES: Final = 16_384
"""Pieces whose numbers fit into a pipe."""

MOST_TEXT: Final = 1 << 16
"""Most bytes of a text."""

_NUMBER: Final = struct.Struct("<H")
_RESULT: Final = struct.Struct("<HBf")


def run_forked(
    work: Sequence[Callable[[], object]],
    processes: int,
    on_done: Callable[[int], None] = lambda done: None,
    prepare: Callable[[], object] = lambda: None,
    stall_s: float = STALL_S,
) -> dict[int, float]:
    """Run each piece of work in one of so many forked processes, in order. Drops what it returns.

    on_done: called with the number of ended pieces whenever some end. prepare: called once in each process. Returns
    the seconds of each piece that ended without an error, by its index. Pieces of a process that dies or stalls for
    `stall_s` are missing.
    """
    todo, todo_end = os.pipe()
    results, results_end = os.pipe()
    os.write(todo_end, b"".join(_NUMBER.pack(index) for index in range(min(len(work), MOST_PIECES))))
    os.close(todo_end)

    def pieces() -> Iterator[tuple[int, Callable[[], object]]]:
        while len(number := os.read(todo, _NUMBER.size)) == _NUMBER.size:
            (index,) = _NUMBER.unpack(number)
            yield index, work[index]

    children = _start(processes, lambda: _serve(pieces(), results_end, prepare))
    os.close(todo)
    os.close(results_end)
    return _end(children, results, on_done, stall_s)


class ForkedStream:
    """Forked processes that take texts while the caller makes them. Its owner must call `finish`."""

    def __init__(
        self, work: Callable[[str], object], processes: int, prepare: Callable[[], object] = lambda: None
    ) -> None:
        """work: what to do with a text; its result is dropped. prepare: called once in each process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._results, results_end = os.pipe()
        self._texts = 0

        def pieces() -> Iterator[tuple[int, Callable[[], object]]]:
            ours.close()  # readers see the end of the stream once every copy of this end is closed
            while message := theirs.recv(MOST_TEXT):
                (index,) = _NUMBER.unpack_from(message)
                yield index, partial(work, message[_NUMBER.size :].decode())

        self._children = _start(processes, lambda: _serve(pieces(), results_end, prepare))
        theirs.close()
        os.close(results_end)
        ours.setblocking(False)
        self._own = ours

    def put(self, text: str) -> int | None:
        """Give a text to the next idle process. Returns its number, None if it cannot be taken now."""
        message = _NUMBER.pack(self._texts) + text.encode()
        if not self._children or len(message) > MOST_TEXT or self._texts == MOST_PIECES:
            return None
        try:
            self._own.send(message)
        except OSError:  # the processes are behind, or gone
            return None
        self._texts += 1
        return self._texts - 1

    def finish(self, on_done: Callable[[int], None] = lambda done: None, stall_s: float = STALL_S) -> dict[int, float]:
        """Wait for all texts and end the processes. Returns as `run_forked`."""
        self._own.close()
        return _end(self._children, self._results, on_done, stall_s)


def _start(processes: int, serve: Callable[[], NoReturn]) -> list[int]:
    """Fork processes that call `serve`. Returns their ids."""
    children: list[int] = []
    try:
        for _ in range(processes):
            child = _fork()
            if child == 0:
                serve()
            children.append(child)
    except OSError as error:
        log.warning("%d of %d processes could be started: %s", len(children), processes, error)
    return children


def _end(children: Sequence[int], results: int, on_done: Callable[[int], None], stall_s: float) -> dict[int, float]:
    try:
        return _gather(results, on_done, stall_s)
    finally:
        os.close(results)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)  # it has ended by itself, unless it stalls
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _gather(results: int, on_done: Callable[[int], None], stall_s: float) -> dict[int, float]:
    seconds: dict[int, float] = {}
    ended, rest = 0, b""
    while True:
        ready, _, _ = select.select([results], [], [], stall_s)
        if not ready:
            log.warning("forked work has stalled for %.0f s and is ended", stall_s)
            return seconds
        data = os.read(results, 1 << 16)
        if not data:
            return seconds
        rest += data
        whole = len(rest) // _RESULT.size * _RESULT.size
        for index, has_ended_well, took_s in _RESULT.iter_unpack(rest[:whole]):
            ended += 1
            if has_ended_well:
                seconds[index] = took_s
        rest = rest[whole:]
        on_done(ended)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads, which may hold locks. The work takes none that other threads of a worker use.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(pieces: Iterator[tuple[int, Callable[[], object]]], results: int, prepare: Callable[[], object]) -> NoReturn:
    """Run pieces until none is left, and end the process without destructors, which could use the device."""
    try:
        gc.disable()
        die_with_parent()
        prepare()
        for index, piece in pieces:
            started, has_ended_well = time.monotonic(), True
            try:
                piece()
            except BaseException:  # noqa: BLE001 isolation boundary: the caller does the same work and sees the error
                has_ended_well = False
            os.write(results, _RESULT.pack(index, has_ended_well, time.monotonic() - started))
    finally:
        os._exit(0)
