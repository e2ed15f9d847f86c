"""Process that runs the model's processor, and its pipe. Owned by the pool."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from mstar_core.api.preprocess.child import Answer, JobCall, serve
from mstar_core.api.preprocess.pipe import PoolPipe
from mstar_core.errors import BadMedia, StartError

START_S: Final = 300.0

log = logging.getLogger("mstar.api.pool")


class ProcessorProcess:
    """A process and its pipe. Used by one thread at a time; `kill` and `end` may be called from any thread.

    is_inline, is_parallel: its processor implements `InlineProcessor`, `ParallelDecodeProcessor`.
    """

    def __init__(self, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        self._args = (target, folder, dict(model_kwargs))
        self._process: SpawnProcess | None = None
        self._pipe: PoolPipe | None = None
        self._is_ending = False
        self.jobs = 0
        self.is_inline = False
        self.is_parallel = False

    @property
    def pid(self) -> int | None:
        """Return the id of the running process."""
        return self._process.pid if self._process is not None else None

    @property
    def is_ready(self) -> bool:
        """Return whether it accepts jobs; otherwise call `start` first."""
        return self._process is not None and self._process.is_alive()

    @property
    def answers(self) -> int:
        """Return the descriptor that becomes readable with an answer, or when the process ends."""
        assert self._pipe is not None
        return self._pipe.fileno()

    def start(self) -> None:
        """Start the process, in place of a dead one, and wait for its processor. Raises its error, or StartError."""
        self.stop()
        ours, theirs = PoolPipe.pair()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, *self._args), name="mstar-pool", daemon=True
        )
        process.start()
        theirs.close(is_shared=True)
        self._process, self._pipe, self.jobs = process, ours, 0
        if self._is_ending:
            self.kill()  # `end` may have been called before there was a process
        if not ours.poll(START_S):
            self.kill()
        try:
            is_started, value = ours.receive()
        except (EOFError, OSError):
            is_started, value = False, StartError("a pool process ended while it was starting", phase="pool")
        if not is_started:
            self.stop()
            raise value
        self.is_inline, self.is_parallel = value

    def send(self, calls: Sequence[JobCall]) -> None:
        """Send jobs without blocking. Raises pickling errors, and MemoryError if they are too large."""
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # found again by `answer`
            self._pipe.send(calls)
        self.jobs += len(calls)

    def note(self) -> int | None:
        """Return the size of an answer once `answers` is readable; None if the process died."""
        assert self._pipe is not None
        try:
            return self._pipe.note()
        except (EOFError, OSError):
            return None

    def load(self, size: int) -> list[Answer]:
        """Return the answers of this size."""
        assert self._pipe is not None
        found: list[Answer] = self._pipe.load(size)
        return found

    def run(self, calls: Sequence[JobCall]) -> list[Answer]:
        """Run jobs of any size and wait for their answers. Raises BadMedia if the process dies."""
        self.send(calls)
        return self.answer(self.note())

    def answer(self, size: int | None) -> list[Answer]:
        """Return the answers of this size, and free a dead process (None). Raises BadMedia if it died."""
        if size is not None:
            return self.load(size)
        if self._process is not None:
            self._process.join()
            log.error("a pool process ended with status %s during a job", self._process.exitcode)
        self.stop()
        raise BadMedia("the input could not be read", hint="decoding it crashed or took too long")

    def end(self) -> None:
        """Kill the process for good, even while it starts."""
        self._is_ending = True
        self.kill()

    def kill(self) -> None:
        """Kill the process; its current jobs fail."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """Kill the process and free its pipe. Safe to call twice."""
        self.kill()
        if self._process is not None:
            self._process.join()
            self._process.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


MakeProcess = Callable[[str, Path | None, Mapping[str, Any]], ProcessorProcess]
"""Creates a process from the processor's target, the model's folder and its settings."""
