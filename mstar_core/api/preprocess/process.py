"""One process that runs the model's processor, and its pipe. Owned by the pool."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from mstar_core.api.preprocess.child import serve
from mstar_core.api.preprocess.pipe import PoolPipe
from mstar_core.errors import BadMedia, StartError

START_S: Final = 300.0

LOOP_BYTES: Final = 1 << 20
"""Messages up to this size are written and read on the loop: that takes less than to wake a thread and wait for it."""

log = logging.getLogger("mstar.api.pool")


class ProcessorProcess:
    """One process and its pipe. Used by one thread at a time; `kill` and `prepare` may come from any.

    is_inline, is_parallel: its processor is a `InlineProcessor`, an `ParallelDecodeProcessor`.
    """

    def __init__(self, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        self._args = (target, folder, dict(model_kwargs))
        self._process: SpawnProcess | None = None
        self._pipe: PoolPipe | None = None
        self.jobs = 0
        self.is_inline = False
        self.is_parallel = False
        self.is_renewing = False
        self._successor: ProcessorProcess | None = None
        self._is_successor_ready = False
        self._is_ending = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process and wait for its processor. Raises what the processor raised, or StartError."""
        ours, theirs = PoolPipe.pair()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, *self._args), name="mstar-pool", daemon=True
        )
        process.start()
        theirs.close(is_shared=True)
        self._process, self._pipe, self.jobs = process, ours, 0
        if self._is_ending:
            self.kill()  # `end` may have come before there was anything to kill
        if not ours.poll(START_S):
            self.kill()
        value: Any
        ok, value = self._receive() or (False, StartError("a pool process ended while it started", phase="pool"))
        if not ok:
            self.stop()
            raise value
        self.is_inline, self.is_parallel = value

    @property
    def is_ready(self) -> bool:
        """Whether it takes a job now; else `renew` comes first."""
        return not self._is_successor_ready and self._process is not None and self._process.is_alive()

    def renew(self) -> None:
        """Change over to the successor, or start the process again. Raises as `start`."""
        if self._is_successor_ready:
            self._change_over()
        if not self.is_ready:
            self.stop()
            self.start()

    def do(self, name: str, args: tuple[Any, ...]) -> Any:
        """Do one job of any size. Raises the job's error, or BadMedia when the process died of it."""
        self.jobs += 1
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send((name, args))
        return self.result()

    def begin(self, name: str, args: tuple[Any, ...]) -> bool:
        """Give the process one job without waiting for it. False, and nothing is done, where it is too large."""
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if not self._pipe.put((name, args)):
                return False
        self.jobs += 1
        return True

    def hand_over(self, jobs: Sequence[bytes]) -> None:
        """Give the process small pickled jobs without waiting. Their answers come one by one, in order."""
        self.jobs += len(jobs)
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send_small(jobs)

    @property
    def answers(self) -> int:
        """The descriptor that can be read when an answer is there, or the process is gone."""
        assert self._pipe is not None
        return self._pipe.fileno()

    @property
    def is_gone(self) -> bool:
        """Whether it died of its last job, or was never started."""
        return self._pipe is None

    @property
    def has_answer(self) -> bool:
        """Whether an answer lies here, whole, that is read on the loop. False where it was cut off."""
        return self._pipe is not None and self._pipe.waits_at_most(LOOP_BYTES)

    def result(self) -> Any:
        """Wait for the answer of the job. Raises the job's error, or BadMedia when the process died of it."""
        found = self._receive()
        if found is None:
            code = self._process.exitcode if self._process is not None else None
            self.stop()
            log.error("a pool process ended with status %s in a job", code)
            raise BadMedia("the input could not be read", hint="a process died reading it, or it took too long")
        ok, value = found
        if not ok:
            raise value
        return value

    def prepare(self) -> None:
        """Start a successor beside the process, which works on; the first job after that changes over. Raises nothing.

        Called on a thread that lives as long as the pool: processes die with the thread that started them.
        """
        successor = self._successor = ProcessorProcess(*self._args)
        if self._is_ending:
            successor.end()
        try:
            successor.start()
        except Exception:  # isolation boundary: the process that runs is as good as it was
            if not self._is_ending:
                log.exception("a pool process could not be replaced and works on")
            self._successor, self.jobs, self.is_renewing = None, 0, False
            return
        self._is_successor_ready = True

    def end(self) -> None:
        """End it for good, also where it is only being started; the pool closes."""
        self._is_ending = True
        self.kill()

    def end_successor(self) -> None:
        """End one that is being started or waits for its first job; the pool closes."""
        self._is_ending = True
        if self._successor is not None:
            self._successor.end()

    def drop_successor(self) -> None:
        """Free one that waits for its first job, which will not come. No `prepare` may run."""
        if self._successor is not None:
            self._successor.stop()

    def _change_over(self) -> None:
        successor = self._successor
        assert successor is not None
        self.stop()
        self._process, self._pipe, self.jobs = successor._process, successor._pipe, 0
        self._successor, self._is_successor_ready, self.is_renewing = None, False, False

    def kill(self) -> None:
        """End the process now; a job that runs in it fails."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the process and free its pipe. Safe to call twice."""
        self.kill()
        if self._process is not None:
            self._process.join()
            self._process.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def _receive(self) -> tuple[bool, Any] | None:
        assert self._pipe is not None
        try:
            answer: tuple[bool, Any] = self._pipe.receive()[0]
        except (EOFError, OSError):
            return None
        return answer


MakeProcess = Callable[[str, Path | None, Mapping[str, Any]], ProcessorProcess]
"""A process for a processor, its model's folder and its settings."""
