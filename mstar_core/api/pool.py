"""The bounded pool of processes that run the model's processor. Owned by the api; one job at a time per process.

A job that kills its process, or takes too long, fails alone: its process is replaced and the other jobs do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Final

from mstar_core.api.pool_child import serve
from mstar_core.errors import BadMedia, StartError
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.processor import Inputs, PromptRequest

JOBS_PER_PROCESS: Final = 500
"""A process is replaced after so many jobs: decoders leak."""

JOB_S: Final = 60.0
START_S: Final = 300.0

log = logging.getLogger("mstar.api.pool")


class ProcessorProcess:
    """One process and its pipe. Used by one thread at a time; `kill` may come from any."""

    def __init__(self, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        self._args = (target, folder, dict(model_kwargs))
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self.jobs = 0

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process and wait for its processor. Raises what the processor raised, or StartError."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, *self._args), name="mstar-pool", daemon=True)
        process.start()
        theirs.close()
        self._process, self._pipe, self.jobs = process, ours, 0
        if not ours.poll(START_S):
            self.kill()
        ok, value = self._receive() or (False, StartError("a pool process ended while it started", phase="pool"))
        if not ok:
            self.stop()
            raise value

    def do(self, name: str, args: tuple[Any, ...]) -> Any:
        """Do one job. Raises the job's error, or BadMedia when the process died of it."""
        if self._process is None or self.jobs >= JOBS_PER_PROCESS or not self._process.is_alive():
            self.stop()
            self.start()
        self.jobs += 1
        assert self._pipe is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipe.send((name, args))
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
            answer: tuple[bool, Any] = self._pipe.recv()
        except (EOFError, OSError):
            return None
        return answer


class Pool:
    """`size` processes behind one queue. Jobs of requests that have gone are not started."""

    def __init__(
        self, target: str, folder: Path | None, model_kwargs: Mapping[str, Any], *, size: int = 1, job_s: float = JOB_S
    ) -> None:
        self.busy = 0
        self._job_s = job_s
        self._processes = [ProcessorProcess(target, folder, model_kwargs) for _ in range(size)]
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="mstar-pool")
        self._free: asyncio.Queue[ProcessorProcess] = asyncio.Queue()
        self._running: set[asyncio.Task[Any]] = set()
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Start all processes and wait for their processors. Raises what a processor raised."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._threads, process.start) for process in self._processes))
        for process in self._processes:
            self._free.put_nowait(process)

    async def prompt(self, request: PromptRequest) -> Inputs:
        """Run `process_prompt`. Raises its error, or BadMedia when it killed its process."""
        inputs: Inputs = await self._job("prompt", request)
        return inputs

    async def postprocess(self, array: Any, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Run `postprocess`."""
        chunk: tuple[bytes, dict[str, Any]] = await self._job("postprocess", array, modality)
        return chunk

    async def recode(self, data: bytes, form: str, limits: MediaLimits) -> bytes:
        """An image file as another kind: `png`, `jpeg` or `webp`."""
        made: bytes = await self._job("recode", data, form, limits)
        return made

    async def close(self) -> None:
        """End all processes; jobs that run fail. Safe to call twice."""
        self._closing = True
        for process in self._processes:
            process.kill()
        await asyncio.gather(*self._running, return_exceptions=True)
        loop = asyncio.get_running_loop()
        if self._processes:
            await asyncio.gather(*(loop.run_in_executor(self._threads, process.stop) for process in self._processes))
        self._processes = []
        self._threads.shutdown(wait=False)

    async def _job(self, name: str, *args: Any) -> Any:
        process = await self._free.get()
        task = asyncio.create_task(self._run(process, name, args))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)  # a job cannot be called back: its process is busy until it ends

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: the request that asked may have gone

    async def _run(self, process: ProcessorProcess, name: str, args: tuple[Any, ...]) -> Any:
        self.busy += 1
        loop = asyncio.get_running_loop()
        limit = loop.call_later(self._job_s, process.kill)
        try:
            return await loop.run_in_executor(self._threads, process.do, name, args)
        finally:
            limit.cancel()
            self.busy -= 1
            self._free.put_nowait(process)
