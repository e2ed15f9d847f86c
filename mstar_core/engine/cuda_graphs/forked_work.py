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
import struct
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn

from mstar_core.process.system import die_with_parent

log = logging.getLogger(__name__)

STALL_S: Final = 60.0
"""Time without a finished piece of work after which the processes are ended."""

MOST_PIECES: Final = 16_384
"""Pieces whose numbers fit into a pipe."""

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
    children: list[int] = []
    try:
        for _ in range(processes):
            child = _fork()
            if child == 0:
                _serve(work, todo, results_end, prepare)
            children.append(child)
    except OSError as error:
        log.warning("%d of %d processes could be started: %s", len(children), processes, error)
    finally:
        os.close(todo)
        os.close(results_end)
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
    found: dict[int, float] = {}
    ended, rest = 0, b""
    while True:
        ready, _, _ = select.select([results], [], [], stall_s)
        if not ready:
            log.warning("forked work has stalled for %.0f s and is ended", stall_s)
            return found
        data = os.read(results, 1 << 16)
        if not data:
            return found
        rest += data
        whole = len(rest) // _RESULT.size * _RESULT.size
        for index, has_ended_well, took_s in _RESULT.iter_unpack(rest[:whole]):
            ended += 1
            if has_ended_well:
                found[index] = took_s
        rest = rest[whole:]
        on_done(ended)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads, which may hold locks. The work takes none that other threads of a worker use.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(
    work: Sequence[Callable[[], object]], todo: int, results: int, prepare: Callable[[], object]
) -> NoReturn:  # fmt: skip
    """Run pieces until none is left, and end the process without destructors, which could use the device."""
    try:
        gc.disable()
        die_with_parent()
        prepare()
        while len(number := os.read(todo, _NUMBER.size)) == _NUMBER.size:
            (index,) = _NUMBER.unpack(number)
            started, has_ended_well = time.monotonic(), True
            try:
                work[index]()
            except BaseException:  # noqa: BLE001 isolation boundary: the caller does the same work and sees the error
                has_ended_well = False
            os.write(results, _RESULT.pack(index, has_ended_well, time.monotonic() - started))
    finally:
        os._exit(0)
