"""Jobs of the pool: what waits for a process, and for its answer. Used by the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar_core.api.preprocess.pipe import SMALL_BYTES, pickled
from mstar_core.api.preprocess.process import LOOP_BYTES
from mstar_core.plugin.processor import MediaPart, PromptRequest


@dataclass(slots=True, eq=False)
class PoolJob:
    """One job. answer: cancelled when whoever asked has gone. data: pickled, if it is small. is_large: too large to be
    pickled on the loop.
    """

    name: str
    args: tuple[Any, ...]
    answer: asyncio.Future[Any]
    data: bytes | None = None
    is_large: bool = False

    @classmethod
    def of(cls, name: str, *args: Any) -> PoolJob:
        """A job that nobody has begun. Raises what pickling does where it is small and cannot be pickled."""
        job = cls(name, args, asyncio.get_running_loop().create_future())
        size = bytes_of(args)
        job.is_large = size > LOOP_BYTES
        if size <= SMALL_BYTES:
            data = pickled((name, args))
            job.data = data if len(data) <= SMALL_BYTES else None
        return job


def bytes_of(args: tuple[Any, ...]) -> int:
    """About how many bytes a job has: its media, arrays and long texts."""
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


def settle(job: PoolJob, result: Callable[[], Any]) -> None:
    """Give whoever waits for the job its result, or what it raises."""
    try:
        value = result()
    except Exception as error:  # noqa: BLE001  handed on
        if not job.answer.done():
            job.answer.set_exception(error)
        return
    if not job.answer.done():
        job.answer.set_result(value)


async def readable(fd: int) -> None:
    """Wait until `fd` can be read, or its other end is closed."""
    loop = asyncio.get_running_loop()
    news: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: None if news.done() else news.set_result(None))
    try:
        await news
    finally:
        loop.remove_reader(fd)


def drop(jobs: Sequence[PoolJob]) -> None:
    """Nobody waits for these any more: those that wait are not begun, and what others found is nobody's."""
    for job in jobs:
        if not job.answer.cancel() and not job.answer.cancelled():
            job.answer.exception()  # or asyncio would say that nobody asked for it
