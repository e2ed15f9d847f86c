"""The bounded pool of processes that run the model's processor. Owned by the api; one job at a time per process.

A job that kills its process, or takes too long, fails alone: its process is replaced and the other jobs do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from mstar_core.api.preprocess.inline import InlineProcessing
from mstar_core.api.preprocess.job import PoolJob, drop, readable, settle
from mstar_core.api.preprocess.process import MakeProcess, ProcessorProcess
from mstar_core.errors import Unavailable
from mstar_core.plugin.media.limits import MediaLimits, check_decoded
from mstar_core.plugin.processor import Inputs, MediaPart, PromptRequest

JOBS_PER_PROCESS: Final = 500
"""A process is replaced after so many jobs: decoders leak. It works on until its successor can."""

JOB_S: Final = 60.0

MOST_APART: Final = 4
CORES_EACH: Final = 4
"""Where nobody says how many processes there are, and files are read apart: this many at most, one per so many cores.
The rest is for workers, conductor and the api itself.
"""

TOGETHER: Final = 64
TOGETHER_BYTES: Final = 48 << 10
"""Most small jobs that are handed over at once, and their bytes: with what Linux adds to each they fit into a pipe."""


class Pool:
    """Processes behind one queue. Jobs of requests that have gone are not started. begun: jobs so far.

    Small jobs that wait go to a process together, and their answers come back one by one. With a hundred streams open
    the loop needs long for a turn, and each job by itself took several, or a thread that had to get the interpreter
    from the loop: the last of many new requests waited until streams of others ended.
    """

    def __init__(
        self,
        target: str,
        folder: Path | None,
        model_kwargs: Mapping[str, Any],
        *,
        size: int | None = 1,
        cores: int | None = None,
        job_s: float = JOB_S,
        jobs: int = JOBS_PER_PROCESS,
        make: MakeProcess = ProcessorProcess,
    ) -> None:
        """size: how many processes; None: one, or as many as `cores` allow where files are read apart.

        cores: of the machine, None: those that this process may use. jobs: after how many a process is replaced.
        """
        self.busy = 0
        self.begun = 0
        self._target = (target, folder, model_kwargs)
        self._inline: InlineProcessing | None = None
        self._job_s = job_s
        self._jobs = jobs
        self._make = make
        self._most = size or min(MOST_APART, (cores or len(os.sched_getaffinity(0))) // CORES_EACH)
        self._processes = [make(target, folder, model_kwargs) for _ in range(size or 1)]
        self._working: set[ProcessorProcess] = set()
        self._threads = ThreadPoolExecutor(max(1, self._most), thread_name_prefix="mstar-pool")
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="mstar-pool-start")
        self._idle: deque[ProcessorProcess] = deque()
        self._waiting: deque[PoolJob] = deque()
        self._running: set[asyncio.Future[None]] = set()
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Start all processes and wait for their processors. Raises what a processor raised."""
        loop = asyncio.get_running_loop()
        await self._start(self._processes)
        if all(process.is_parallel for process in self._processes) and not self._closing:
            more = [self._make(*self._target) for _ in range(self._most - len(self._processes))]
            self._processes += more
            await self._start(more)
        if any(process.is_inline for process in self._processes) and not self._closing:
            self._inline = await loop.run_in_executor(self._threads, InlineProcessing.load, *self._target)
        self._idle.extend(self._processes)
        self._dispatch()

    async def _start(self, processes: Sequence[ProcessorProcess]) -> None:
        loop = asyncio.get_running_loop()
        self._working |= set(processes)  # so that a close does not wait for a start
        await asyncio.gather(*(loop.run_in_executor(self._threads, process.start) for process in processes))
        self._working.clear()

    def at_once(self, request: PromptRequest) -> Inputs | None:
        """Run `process_prompt` here where it is quick; None where it is not. Raises its error."""
        return self._inline.prompt(request) if self._inline is not None and self._inline.takes(request) else None

    async def prompt(self, request: PromptRequest) -> Inputs:
        """Run `process_prompt`. Raises its error, or BadMedia when it killed its process."""
        inputs = self.at_once(request)
        if inputs is None and self._inline is not None and len(self._idle) > 1:
            places = self._inline.parallel_files(request)
            if len(places) > 1:
                request = await self._decode_in_parallel(request, places)
                inputs = self.at_once(request)
        return await self._job("prompt", request) if inputs is None else inputs

    async def _decode_in_parallel(self, request: PromptRequest, places: Sequence[int]) -> PromptRequest:
        """The request with tensors in the places of some files, which the processes that are free read side by side."""
        free = min(len(self._idle), len(places))
        media, size, jobs = list(request.media), 0, []
        for first in range(free):
            mine = places[first::free]
            counted = tuple(number_within(media, place) for place in mine)
            jobs.append((mine, PoolJob.of("decode", request.limits, counted, *(media[place] for place in mine))))
        try:
            self._waiting.extend(job for _, job in jobs)
            self._dispatch()
            for mine, job in jobs:
                for place, (decoded, part) in zip(mine, await job.answer, strict=True):
                    size += decoded
                    media[place] = part
        finally:
            drop([job for _, job in jobs])
        check_decoded(size, request.limits)
        return dataclasses.replace(request, media=media)

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
        for process in self._working:
            process.end()
        for process in self._processes:
            process.end_successor()
        while self._running:  # an answer that was cut off goes on as a task
            await asyncio.gather(*self._running, return_exceptions=True)
            await asyncio.sleep(0)  # who is done leaves only now: Python 3.12 waits for nothing then
        for job in self._waiting:
            if not job.answer.done():
                job.answer.set_exception(Unavailable("the deployment stops", code="draining"))
        self._waiting.clear()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._end_starts)
        if self._processes:
            await asyncio.gather(*(loop.run_in_executor(self._threads, process.stop) for process in self._processes))
        self._processes = []
        self._threads.shutdown(wait=False)

    def _end_starts(self) -> None:
        self._starter.shutdown(cancel_futures=True)
        for process in self._processes:
            process.drop_successor()

    async def _job(self, name: str, *args: Any) -> Any:
        job = PoolJob.of(name, *args)
        self._waiting.append(job)
        self._dispatch()
        return await job.answer

    def _dispatch(self) -> None:
        while self._idle and self._waiting:
            job = self._waiting.popleft()
            if job.answer.done():
                continue  # whoever asked has gone
            process = self._idle.popleft()
            jobs = deque([job, *self._followers(job)])
            self.busy += 1
            self.begun += len(jobs)
            self._working.add(process)
            if process.is_ready and self._handed_over(process, jobs):
                self._await_answer(process, jobs)
            else:
                self._spawn(self._run(process, jobs))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _followers(self, first: PoolJob) -> list[PoolJob]:
        """Small jobs that go to the same process together with a small one, where no other process is free."""
        found: list[PoolJob] = []
        size = len(first.data or b"")
        while first.data and not self._idle and self._waiting and len(found) < TOGETHER - 1:
            data = self._waiting[0].data
            if data is None or size + len(data) > TOGETHER_BYTES:
                break
            size += len(data)
            job = self._waiting.popleft()
            if not job.answer.done():
                found.append(job)
        return found

    def _handed_over(self, process: ProcessorProcess, jobs: deque[PoolJob]) -> bool:
        """Give a process its jobs without waiting. False where a thread has to, or something is wrong with one."""
        first = jobs[0]
        if first.data is not None:
            process.hand_over([job.data for job in jobs if job.data is not None])
            return True
        if first.is_large:
            return False
        with contextlib.suppress(Exception):  # what it holds cannot be pickled: `_run` finds that too, and says so
            return process.begin(first.name, first.args)
        return False

    def _await_answer(self, process: ProcessorProcess, jobs: deque[PoolJob]) -> None:
        """Take the answers as they come, in calls of the loop: a task takes three turns more for each."""
        loop, pipe = asyncio.get_running_loop(), process.answers
        limit = loop.call_later(self._job_s, process.kill)
        over = loop.create_future()
        self._running.add(over)

        def answered() -> None:
            limit.cancel()
            loop.remove_reader(pipe)
            while jobs and process.has_answer:
                settle(jobs.popleft(), process.result)
            if jobs and not process.is_gone:
                self._spawn(self._rest(process, jobs))
            else:
                self._end(process, jobs)
            self._running.discard(over)
            over.set_result(None)

        loop.add_reader(pipe, answered)

    async def _run(self, process: ProcessorProcess, jobs: deque[PoolJob]) -> None:
        try:
            await self._do(process, jobs)
        finally:
            self._end(process, deque())

    async def _rest(self, process: ProcessorProcess, jobs: deque[PoolJob]) -> None:
        try:
            await self._collect(process, jobs)
        finally:
            self._end(process, deque())

    def _end(self, process: ProcessorProcess, jobs: deque[PoolJob]) -> None:
        """A process is free again. jobs: of its own that it had not begun when it died."""
        self._waiting.extendleft(reversed(jobs))
        self.busy -= 1
        self._working.discard(process)
        if process.jobs >= self._jobs and not process.is_renewing and not self._closing:
            process.is_renewing = True
            self._starter.submit(process.prepare)
        self._idle.append(process)
        if not self._closing:
            self._dispatch()

    async def _do(self, process: ProcessorProcess, jobs: deque[PoolJob]) -> None:
        if not process.is_ready:  # a start has a limit of its own
            started = asyncio.get_running_loop().run_in_executor(self._threads, process.renew)
            await asyncio.wait({started})
            if started.exception() is not None:
                for job in jobs:
                    settle(job, started.result)
                return
        first = jobs[0]
        if first.data is not None:
            process.hand_over([job.data for job in jobs if job.data is not None])
        elif not self._begun(process, first):
            if not first.answer.done():
                with self._limited(process):
                    await self._in_thread(first, process.do, first.name, first.args)
            return
        await self._collect(process, jobs)

    def _begun(self, process: ProcessorProcess, job: PoolJob) -> bool:
        """Hand a job over without waiting. False where a thread has to, or where it failed already."""
        if job.is_large:
            return False
        try:
            return process.begin(job.name, job.args)
        except Exception as error:  # noqa: BLE001  one job's: what it holds cannot be pickled
            if not job.answer.done():
                job.answer.set_exception(error)
            return False

    async def _collect(self, process: ProcessorProcess, jobs: deque[PoolJob]) -> None:
        while jobs and not process.is_gone:
            with self._limited(process):
                await readable(process.answers)
                if not process.has_answer:
                    await self._in_thread(jobs.popleft(), process.result)
                while jobs and process.has_answer:
                    settle(jobs.popleft(), process.result)
        self._waiting.extendleft(reversed(jobs))  # one killed the process; the others were not begun

    @contextlib.contextmanager
    def _limited(self, process: ProcessorProcess) -> Iterator[None]:
        limit = asyncio.get_running_loop().call_later(self._job_s, process.kill)
        try:
            yield
        finally:
            limit.cancel()

    async def _in_thread(self, job: PoolJob, call: Callable[..., Any], *args: Any) -> None:
        working = asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
        await asyncio.wait({working})
        settle(job, working.result)


def number_within(media: Sequence[MediaPart], place: int) -> int:
    """Which file of its modality the one at `place` is, from 0."""
    return sum(part.modality == media[place].modality for part in media[:place])
