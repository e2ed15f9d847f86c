"""Spill file of one request: outputs that wait for a slow client. Filled by its output queue, on the event loop.

Threads write and read it, so that a slow disk does not delay the loop. An output stays in memory until it is written,
and one that cannot be written stays there: a full disk alone ends no request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from mstar_core.api.errors import Stalled, storage_full
from mstar_core.transport.arena import FreeList

log = logging.getLogger("mstar.api.spool")

Array = npt.NDArray[np.generic]
F = TypeVar("F")
R = TypeVar("R")

SPOOL_BYTES: Final = 64 << 20
MEMORY_BYTES: Final = 16 << 20
"""Most bytes of a request that stay in memory because the disk is full."""

LEAST_SPOOLED: Final = 8
"""Number of outputs that may always be spilled, whatever their size (steps of a rollout)."""

MOST_OFFSET: Final = 1 << 50

_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="mstar-spool")
"""Threads of all spill files: of their own, because a disk that hangs would take those of other work."""


@dataclass(slots=True, eq=False)
class _Spilled(Generic[F]):
    """An output. array: None once it is in the file, at `offset`."""

    facts: F
    array: Array | None
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    size: int
    offset: int = -1

    def restored(self, data: bytes) -> Array:
        array: Array = np.frombuffer(data, dtype=self.dtype).reshape(self.shape)
        return array


class Spool(Generic[F]):
    """Outputs in order: arrays, each with facts of any kind. Owned by an output queue, which alone takes from it.

    The file is created at first use and has no name, so that it is never left behind.
    """

    def __init__(self, folder: Path, limit: int = SPOOL_BYTES, memory_limit: int = MEMORY_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._memory_limit = memory_limit
        self._entries: deque[_Spilled[F]] = deque()
        self._unwritten: deque[_Spilled[F]] = deque()
        self._size = 0
        self._in_memory = 0
        self._file: int | None = None
        self._freed: weakref.finalize[..., Spool[F]] | None = None
        self._room = FreeList()
        self._room.give(0, MOST_OFFSET)
        self._full: OSError | None = None
        self._writing: asyncio.Task[None] | None = None
        self._under_way = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def in_memory(self) -> int:
        """Return the bytes that are not in the file."""
        return self._in_memory

    @property
    def is_busy(self) -> bool:
        """Return whether a thread writes or reads the file."""
        return self._under_way > 0

    def add(self, facts: F, array: Array) -> None:
        """Append an output. Raises Stalled above the limit, except for a few large outputs.

        Raises Unavailable (`storage_full`) if the disk takes nothing and too much is in memory.
        """
        data = np.ascontiguousarray(array)
        if self._size + data.nbytes > max(self._limit, LEAST_SPOOLED * data.nbytes):
            raise Stalled(
                "the client does not read the response", hint=f"more than {self._limit >> 20} MiB are waiting"
            )
        if self._full is not None and self._in_memory + data.nbytes > self._memory_limit:
            raise storage_full(self._full) from self._full
        spilled = _Spilled(facts, data, data.dtype, array.shape, data.nbytes)
        self._entries.append(spilled)
        self._unwritten.append(spilled)
        self._size += spilled.size
        self._in_memory += spilled.size
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def pop(self) -> tuple[F, Array]:
        """Return the oldest output. Raises Unavailable (`storage_full`) if the file cannot be read."""
        spilled = self._entries[0]
        array = spilled.array
        if array is None:
            try:
                array = spilled.restored(await self._in_thread(lambda: self._read(spilled)))
            except OSError as error:
                raise storage_full(error) from error
        self._entries.popleft()
        self._size -= spilled.size
        if spilled.array is None:
            self._room.give(spilled.offset, spilled.size)
        else:
            spilled.array = None
            self._in_memory -= spilled.size
        return spilled.facts, array

    def close(self) -> None:
        """Free the file, if need be after a running write or read. Safe to call twice.

        A loop that ends before its threads never reports their end: then the file goes with this object, which a
        running write or read keeps.
        """
        self._is_closed = True
        self._entries.clear()
        self._unwritten.clear()
        if not self._under_way:
            self._close_file()

    def _close_file(self) -> None:
        if self._freed is not None:
            self._freed()
        self._file = self._freed = None

    async def _write_all(self) -> None:
        """Write the outputs that are in memory, until none is left or the disk is full."""
        try:
            while self._unwritten:
                await self._write_next(self._unwritten.popleft())
        except OSError as error:
            if self._full is None:
                log.warning("outputs of a slow client stay in memory: %s", error)
            self._full = error
        finally:
            self._writing = None

    async def _write_next(self, spilled: _Spilled[F]) -> None:
        array = spilled.array
        if array is None or not spilled.size:
            return  # taken before it was written, or empty
        offset = self._room.take(spilled.size)
        assert offset is not None, "files are smaller than the address range"
        try:
            await self._in_thread(lambda: self._write(array, offset))
        except OSError:
            self._room.give(offset, spilled.size)
            self._unwritten.appendleft(spilled)
            raise
        self._full = None
        if spilled.array is None:  # taken meanwhile
            self._room.give(offset, spilled.size)
            return
        spilled.array, spilled.offset = None, offset
        self._in_memory -= spilled.size

    async def _in_thread(self, work: Callable[[], R]) -> R:
        """Run file work in a thread. The file stays open until it is done, whatever becomes of the caller."""
        future = asyncio.get_running_loop().run_in_executor(_THREADS, work)
        self._under_way += 1
        future.add_done_callback(self._worked)
        return await asyncio.shield(future)

    def _worked(self, future: asyncio.Future[R]) -> None:
        self._under_way -= 1
        if not future.cancelled():
            future.exception()  # marks it as seen: its caller may have gone
        if self._is_closed and not self._under_way:
            self._close_file()

    # -- in a thread -------------------------------------------------------------------------------------------------

    def _write(self, array: Array, offset: int) -> None:
        if self._file is None:
            self._file = self._open_file()
        data = array.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], offset + done)

    def _open_file(self) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            descriptor = os.dup(file.fileno())
        self._freed = weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _read(self, spilled: _Spilled[F]) -> bytes:
        assert self._file is not None
        data = bytearray()
        while len(data) < spilled.size:
            piece = os.pread(self._file, spilled.size - len(data), spilled.offset + len(data))
            if not piece:
                raise OSError("the file is shorter than what was written")
            data += piece
        return bytes(data)
