"""Bounded pool of processes that run the model's processor, and the inline path beside it. Owned by the api.

A job that crashes its process, or exceeds its time limit, fails alone: the process is restarted, other jobs go on.
Prompts that are cheaper to process than to send to a pool process run inline, on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np

from mstar_core.api.preprocess.child import Answer, JobCall, answer, load_processor
from mstar_core.api.preprocess.pipe import KEPT_BYTES
from mstar_core.api.preprocess.process import MakeProcess, ProcessorProcess
from mstar_core.errors import MstarError, PluginError, Unavailable
from mstar_core.plugin.media.limits import MediaLimits, check_decoded
from mstar_core.plugin.processor import (
    InlineProcessor,
    Inputs,
    MediaPart,
    ParallelDecodeProcessor,
    PromptRequest,
    TextReader,
    TextStreamProcessor,
)

JOBS_PER_PROCESS: Final = 500
"""A process is replaced after this many jobs, because decoders leak memory. It works until its successor is ready."""

JOB_S: Final = 60.0

MAX_PARALLEL: Final = 8
CORES_EACH: Final = 2
"""Most processes of a pool without a fixed size: one per so many cores, at most `MAX_PARALLEL`.

32 images of a megapixel that come at once take 1.6 s of a core, and their first tokens wait for it.
"""

AHEAD: Final = 0.5
"""Share of these processes that a pool for media starts without a request."""

LOOP_BYTES: Final = KEPT_BYTES
"""Messages up to this size are encoded and read on the event loop: their memory is in use already, so that a copy of
a megabyte takes 20 to 50 µs, and waking a thread takes longer.
"""

WARM: Final = "warm"
"""Job that loads what a process loads lazily."""

SMALL_BYTES: Final = 16 << 10
MAX_BATCH: Final = 64
"""Waiting jobs up to `SMALL_BYTES` share a message. With many streams open, a loop iteration takes milliseconds, so
one job per iteration would delay the last of many new requests.
"""

INLINE_BYTES: Final = 1 << 20
"""Default size limit of an inline request; copying this much takes about 0.1 ms."""

INLINE_FILES: Final = 8

log = logging.getLogger("mstar.api.pool")


@dataclass(slots=True, eq=False)
class PoolJob:
    """A job in the queue. answer: cancelled if the caller is gone. is_single: never shares a message."""

    call: JobCall
    answer: asyncio.Future[Any]
    size: int
    is_single: bool = False

    @classmethod
    def of(cls, name: str, *args: Any, is_single: bool = False) -> PoolJob:
        """Create a job for the running event loop."""
        size = bytes_of(args)
        return cls((name, args), asyncio.get_running_loop().create_future(), size, is_single or size > SMALL_BYTES)

    def settle(self, reply: Answer) -> None:
        """Pass the answer to the caller."""
        ok, value = reply
        if self.answer.done():
            return
        if ok:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(value)


class Pool:
    """Processes behind one queue. Jobs whose caller is gone are not started. begun: number of requests' jobs so far."""

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
        media: Sequence[str] = (),
        make: MakeProcess = ProcessorProcess,
    ) -> None:
        """size: number of processes; None: one, and more, up to one per `CORES_EACH` cores, once files wait for it.

        A processor that decodes files in parallel has all of them from the start. media: modalities that the model
        accepts; each process loads their decoders when it starts, and half of them start without a request.
        cores: of the machine; None: those that this process may use. jobs: after how many a process is replaced.
        """
        self.busy = 0
        self.begun = 0
        self._target = (target, folder, model_kwargs)
        self._inline: InlineProcessing | None = None
        self._job_s = job_s
        self._jobs = jobs
        self._media = tuple(media)
        self._make = make
        self._is_growing = False
        self._may_grow = size is None
        self._most = size or min(MAX_PARALLEL, (cores or len(os.sched_getaffinity(0))) // CORES_EACH)
        self._processes = [make(target, folder, model_kwargs) for _ in range(size or 1)]
        self._working: set[ProcessorProcess] = set()
        self._starting: dict[ProcessorProcess, ProcessorProcess | None] = {}  # with the process that each replaces
        self._replaced: set[ProcessorProcess] = set()  # these end with their current jobs
        self._threads = ThreadPoolExecutor(max(1, self._most), thread_name_prefix="mstar-pool")
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="mstar-pool-start")
        self._idle: deque[ProcessorProcess] = deque()
        self._waiting: deque[PoolJob] = deque()
        self._running: set[asyncio.Future[None]] = set()
        self._closing = False

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes that run jobs."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Start all processes and wait for their processors. Raises errors of a processor."""
        await self._start(self._processes)
        if all(process.is_parallel for process in self._processes) and not self._closing:
            more = [self._make(*self._target) for _ in range(self._most - len(self._processes))]
            self._processes += more
            await self._start(more)
        if any(process.is_inline for process in self._processes) and not self._closing:
            self._inline = await self._in_thread(InlineProcessing.load, *self._target)
        self._idle.extend(self._processes)
        if self._media:
            for _ in self._processes:
                self._spawn(self._warm())
        self._is_growing = self._may_grow
        if self._may_grow and self._media and not self._closing:
            for _ in range(int(AHEAD * self._most) - len(self._processes)):
                self._add()
        self._dispatch()

    async def _warm(self) -> None:
        """Let an idle process load tokenizer and decoders, while it may get its first requests."""
        with contextlib.suppress(MstarError):  # a request would meet the error, and name its cause
            await self._run(WARM, self._media, is_single=True)

    def _begin(self, process: ProcessorProcess) -> None:
        """Start a process, and load tokenizer and decoders. Called on a thread. Raises the error of its processor."""
        process.start()
        if self._media:
            with contextlib.suppress(MstarError):  # a request would meet the error, and name its cause
                process.run([(WARM, (self._media,))])

    async def _start(self, processes: Sequence[ProcessorProcess]) -> None:
        self._working |= set(processes)  # `close` kills them instead of waiting for their start
        await asyncio.gather(*(self._in_thread(process.start) for process in processes))
        self._working.clear()

    def run_inline(self, request: PromptRequest) -> Inputs | None:
        """Run `process_prompt` in this process if it is cheap, otherwise return None. Raises its error."""
        return self._inline.prompt(request) if self._inline is not None and self._inline.takes(request) else None

    def text_reader(self) -> TextReader | None:
        """Return a reader of a text that arrives, None if the api could not load the processor. Raises PluginError."""
        return None if self._inline is None else self._inline.text_reader()

    async def prompt(self, request: PromptRequest) -> Inputs:
        """Run `process_prompt`. Raises its error, or BadMedia if the process crashed."""
        inputs, seconds = self.run_inline(request), 0.0
        if inputs is None and self._inline is not None and len(self._idle) > 1:
            places = self._inline.parallel_files(request)
            if len(places) > 1:
                request, seconds = await self._decode_in_parallel(request, places)
                inputs = self.run_inline(request)
        if inputs is None:
            inputs = await self._run("prompt", request)
        return dataclasses.replace(inputs, heard_s=inputs.heard_s + seconds) if seconds else inputs

    async def _decode_in_parallel(self, request: PromptRequest, places: Sequence[int]) -> tuple[PromptRequest, float]:
        """Return the request with tensors in place of files, and the seconds of audio in them.

        The idle processes decode the files in parallel.
        """
        free = min(len(self._idle), len(places))
        media, size, seconds, jobs = list(request.media), 0, 0.0, []
        for first in range(free):
            mine = places[first::free]
            numbers = tuple(number_within(media, place) for place in mine)
            files = (media[place] for place in mine)
            jobs.append((mine, PoolJob.of("decode", request.limits, numbers, *files, is_single=True)))
        try:
            self._waiting.extend(job for _, job in jobs)
            self._dispatch()
            for mine, job in jobs:
                for place, (decoded, heard, part) in zip(mine, await job.answer, strict=True):
                    size += decoded
                    seconds += heard
                    media[place] = part
        finally:
            for _, job in jobs:
                if not job.answer.cancel() and not job.answer.cancelled():
                    job.answer.exception()  # marks it as retrieved
        check_decoded(size, request.limits)
        return dataclasses.replace(request, media=media), seconds

    async def postprocess(self, array: Any, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Run `postprocess`."""
        chunk: tuple[bytes, dict[str, Any]] = await self._run("postprocess", array, modality)
        return chunk

    async def recode(self, data: bytes, form: str, limits: MediaLimits) -> bytes:
        """Convert an image file to `png`, `jpeg` or `webp`."""
        image: bytes = await self._run("recode", data, form, limits)
        return image

    async def tokenize(self, request: PromptRequest, *, adds_special: bool) -> list[int]:
        """Return the ids of a prompt, see `TokenizingProcessor`. Raises RequestError."""
        ids: list[int] = await self._run("tokenize", request, adds_special)
        return ids

    async def spell(self, ids: Sequence[int]) -> list[bytes]:
        """Return the text of each id in UTF-8. Raises RequestError for an unknown one."""
        texts: list[bytes] = await self._run("spell", list(ids))
        return texts

    async def problem(self, constraint: str) -> str:
        """Return why a grammar cannot hold an answer, see `GrammarChecker`. Raises BadMedia if that takes too long."""
        text: str = await self._run("problem", constraint, is_single=True)  # ends alone
        return text

    async def close(self) -> None:
        """End all processes; running jobs fail. Safe to call twice."""
        self._closing = True
        for process in (*self._working, *self._starting):
            process.end()
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)
            await asyncio.sleep(0)  # done callbacks run in the next iteration
        for job in self._waiting:
            job.settle((False, Unavailable("the deployment is stopping", code="draining")))
        self._waiting.clear()
        processes, self._processes = self._processes, []
        if processes:
            await asyncio.gather(*(self._in_thread(process.stop) for process in processes))
        self._starter.shutdown(wait=False)
        self._threads.shutdown(wait=False)

    async def _run(self, name: str, *args: Any, is_single: bool = False) -> Any:
        job = PoolJob.of(name, *args, is_single=is_single)
        self._waiting.append(job)
        self._dispatch()
        return await job.answer

    def _dispatch(self) -> None:
        while self._idle and self._waiting and not self._closing:
            process = self._idle.pop()  # the one that worked last, whose memory is in use
            jobs = self._next_jobs()
            if not jobs:
                self._idle.append(process)
                return
            self.busy += 1
            self.begun += sum(job.call[0] != WARM for job in jobs)
            self._working.add(process)
            if process.is_ready and self._is_sent(process, jobs):
                self._await_answers(process, jobs)
            else:
                self._spawn(self._run_in_thread(process, jobs))
        if self._is_short:
            self._add()

    @property
    def _is_short(self) -> bool:
        """Whether a file waits for a process and the pool may start one more of them."""
        if not self._is_growing or self._closing or None in self._starting.values():
            return False
        return len(self._processes) < self._most and any(job.size > SMALL_BYTES for job in self._waiting)

    def _add(self, replaced: ProcessorProcess | None = None) -> None:
        """Start a process while the others work. replaced: the one that it replaces."""
        new = self._make(*self._target)
        self._starting[new] = replaced  # `close` may come before the task begins
        self._spawn(self._start_added(new, replaced))

    async def _start_added(self, new: ProcessorProcess, replaced: ProcessorProcess | None) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._starter, self._begin, new)
        except Exception:  # isolation boundary: the other processes still work
            if replaced is None:
                self._is_growing = False
            else:
                replaced.jobs = 0
            if not self._closing:
                log.exception("the pool could not start another process; it continues with those it has")
            return
        finally:
            del self._starting[new]
        self._processes.append(new)
        self._idle.append(new)
        if replaced is not None:
            self._replaced.add(replaced)
            if replaced in self._idle:
                self._retire(replaced)
        self._dispatch()

    def _retire(self, process: ProcessorProcess) -> None:
        """End an idle process that was replaced."""
        self._replaced.discard(process)
        self._idle.remove(process)
        self._processes.remove(process)
        self._spawn(self._in_thread(process.stop))

    def _next_jobs(self) -> list[PoolJob]:
        """Return the next job, and small ones behind it if no other process is idle."""
        jobs: list[PoolJob] = []
        while self._waiting and len(jobs) < MAX_BATCH:
            if jobs and (self._idle or self._waiting[0].is_single):
                break
            job = self._waiting.popleft()
            if not job.answer.done():
                jobs.append(job)
                if job.is_single:
                    break
        return jobs

    def _is_sent(self, process: ProcessorProcess, jobs: Sequence[PoolJob]) -> bool:
        """Send jobs from the event loop. Returns False if they are too large or have no form."""
        if jobs[0].size > LOOP_BYTES:
            return False
        try:
            process.send([job.call for job in jobs])
        except Exception:  # noqa: BLE001  raised again, and reported, on the thread
            return False
        return True

    def _await_answers(self, process: ProcessorProcess, jobs: Sequence[PoolJob]) -> None:
        """Read the answers in a callback, because a task takes three more loop iterations."""
        loop, pipe, over = asyncio.get_running_loop(), process.answers, asyncio.get_running_loop().create_future()
        limit = loop.call_later(self._job_s, process.kill)
        self._running.add(over)

        def answered() -> None:
            loop.remove_reader(pipe)
            note, calls = process.note(), [job.call for job in jobs]
            if note is not None and note[0] <= LOOP_BYTES:
                limit.cancel()
                try:
                    self._settle(jobs, process.load(note, calls))
                except Exception as error:  # noqa: BLE001  reported to the callers
                    self._fail(jobs, error)
                self._end(process)
            else:
                self._spawn(self._collect(process, jobs, limit, process.answer, note, calls))
            self._running.discard(over)
            over.set_result(None)

        loop.add_reader(pipe, answered)

    async def _run_in_thread(self, process: ProcessorProcess, jobs: Sequence[PoolJob]) -> None:
        if not process.is_ready:  # starting has a time limit of its own
            try:
                await self._in_thread(process.start)
            except Exception as error:  # noqa: BLE001  reported to the callers
                self._settle(jobs, [(False, error)] * len(jobs))
                self._end(process)
                return
        limit = asyncio.get_running_loop().call_later(self._job_s, process.kill)
        await self._collect(process, jobs, limit, process.run, [job.call for job in jobs])

    async def _collect(
        self,
        process: ProcessorProcess,
        jobs: Sequence[PoolJob],
        limit: asyncio.TimerHandle,
        work: Callable[..., list[Answer]],
        *args: Any,
    ) -> None:
        """Wait for answers on a thread."""
        try:
            self._settle(jobs, await self._in_thread(work, *args))
        except Exception as error:  # noqa: BLE001  the process died, or a job has no form
            self._fail(jobs, error)
        finally:
            limit.cancel()
            self._end(process)

    def _settle(self, jobs: Sequence[PoolJob], answers: Sequence[Answer]) -> None:
        for job, reply in zip(jobs, answers, strict=True):
            job.settle(reply)

    def _fail(self, jobs: Sequence[PoolJob], error: Exception) -> None:
        """Report an error to the caller of a job. Jobs that failed together are repeated one by one."""
        if len(jobs) == 1:
            jobs[0].settle((False, error))
            return
        for job in reversed(jobs):
            job.is_single = True
            self._waiting.appendleft(job)

    def _end(self, process: ProcessorProcess) -> None:
        """Mark a process as idle."""
        self.busy -= 1
        self._working.discard(process)
        self._idle.append(process)
        if process in self._replaced:
            self._retire(process)
        elif process.jobs >= self._jobs and process not in self._starting.values() and not self._closing:
            self._add(process)
        self._dispatch()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _in_thread(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def bytes_of(args: tuple[Any, ...]) -> int:
    """Return the approximate size of a job: media, arrays and texts."""
    size = 0
    for arg in args:
        match arg:
            case PromptRequest():
                size += arg.size_bytes
            case np.ndarray():
                size += arg.nbytes
            case MediaPart():
                size += len(arg.data)
            case bytes():
                size += len(arg)
    return size


def number_within(media: Sequence[MediaPart], place: int) -> int:
    """Return the index of the file at `place` within its modality."""
    return sum(part.modality == media[place].modality for part in media[:place])


Read = Callable[[PromptRequest], Awaitable[Inputs]]


class InputSource(Protocol):
    """Inputs of an item among several of one request, whose prompt is processed once."""

    async def of(self, prompt: PromptRequest, read: Read) -> Inputs:
        """Return the inputs of the item. Raises the error of processing."""


class SharedInputs:
    """Processes the prompt once, for the first item; each item gets the result with its own seed."""

    def __init__(self) -> None:
        self._read: asyncio.Future[Inputs] | None = None

    async def of(self, prompt: PromptRequest, read: Read) -> Inputs:
        """Return the inputs of an item. Raises the error of processing for every item."""
        if self._read is None:
            self._read = asyncio.ensure_future(read(prompt))
            # Marks the error as retrieved, because all items may be gone.
            self._read.add_done_callback(lambda done: done.cancelled() or done.exception())
        inputs = await asyncio.shield(self._read)
        if inputs.params is None or not hasattr(inputs.params, "seed"):
            return inputs
        return dataclasses.replace(inputs, params=dataclasses.replace(inputs.params, seed=prompt.seed))

    def close(self) -> None:
        """Cancel processing that has not begun."""
        if self._read is not None:
            self._read.cancel()


class InlineProcessing:
    """The api's own instance of the processor. Owned by the pool."""

    def __init__(self, processor: InlineProcessor) -> None:
        self._processor = processor
        self._most_bytes = int(getattr(processor, "inline_bytes", INLINE_BYTES))

    @classmethod
    def load(cls, target: str, folder: Path | None, model_kwargs: Mapping[str, Any]) -> Self | None:
        """Create the processor and warm it up, which takes long. Returns None on failure: the pool works without it."""
        try:
            processor = load_processor(target, folder, model_kwargs)
            assert isinstance(processor, InlineProcessor)
            processor.warm_up()
        except Exception:  # isolation boundary: a plugin's code; each request reports the problem through the pool
            log.exception("the api could not load the processor: every prompt goes to a pool process")
            return None
        return cls(processor)

    def takes(self, request: PromptRequest) -> bool:
        """Return whether a request can run here. Its media must be tensors, because decoders may crash or hang."""
        if len(request.media) > INLINE_FILES or any(part.modality != "tensor" for part in request.media):
            return False
        if request.size_bytes > self._most_bytes:
            return False
        try:
            return self._processor.is_inline(request)
        except Exception:  # isolation boundary: a plugin's code; a pool process may still succeed
            log.exception("the processor failed to decide whether a request runs inline: it goes to a pool process")
            return False

    def parallel_files(self, request: PromptRequest) -> Sequence[int]:
        """Return the indices of the media that other processes may decode in parallel."""
        if not isinstance(self._processor, ParallelDecodeProcessor) or len(request.media) > INLINE_FILES:
            return ()
        try:
            return [number for number in self._processor.parallel_files(request) if 0 <= number < len(request.media)]
        except Exception:  # isolation boundary: a plugin's code; one pool process can decode everything
            log.exception(
                "the processor failed to select files for parallel decoding: one pool process decodes them all"
            )
            return ()

    def text_reader(self) -> TextReader:
        """Return a reader of a text that arrives. Raises PluginError."""
        if not isinstance(self._processor, TextStreamProcessor):
            name = type(self._processor).__name__
            hint = "implement TextStreamProcessor, or clear Text.grows"
            raise PluginError(f"{name} reads no text in pieces", hint=hint)
        return self._processor.text_reader()

    def prompt(self, request: PromptRequest) -> Inputs:
        """Run `process_prompt` as a pool process does. Raises the same errors."""
        is_done, value = answer(self._processor, ("prompt", (request,)))
        if not is_done:
            raise value
        inputs: Inputs = value
        return inputs
