"""Spill file: order, bounded file and memory, a slow disk delays no loop, and a full one loses nothing by itself."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mstar_core.api.errors import Stalled
from mstar_core.api.output.spool import Array, Spool
from mstar_core.errors import Unavailable
from tests.api.test_service_storage import open_files

LIMIT_S = 60.0


class SlowSpool(Spool[int]):
    """A disk on which each operation waits for `gate`. begun: set by each operation before it waits."""

    gate: threading.Event | None = None
    begun: threading.Event | None = None
    is_full = False

    def _write(self, array: Array, offset: int) -> None:
        self._wait()
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write(array, offset)

    def _read(self, spilled: object) -> bytes:
        self._wait()
        return super()._read(spilled)  # type: ignore[arg-type]

    def _wait(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        if self.begun is not None:
            self.begun.set()
        if self.gate is not None:
            assert self.gate.wait(LIMIT_S)


def values(number: int, size: int = 1000) -> Array:
    return np.full(size, number, dtype=np.int32)


async def taken(spool: Spool[int], count: int) -> list[int]:
    found = []
    for _ in range(count):
        number, array = await spool.pop()
        assert (array == number).all() and array.shape == (1000,)
        found.append(number)
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 threads have no event for tests
            await asyncio.sleep(0.001)


async def written(spool: Spool[int]) -> None:
    await until(lambda: not spool.in_memory)


async def test_outputs_come_back_in_order_from_file_and_memory(tmp_path: Path) -> None:
    spool = SlowSpool(tmp_path)
    for number in range(5):
        spool.add(number, values(number))
    await written(spool)
    for number in range(5, 10):
        spool.add(number, values(number))
    assert await taken(spool, 10) == list(range(10)) and not spool
    spool.close()
    assert open_files(tmp_path) == [] and not os.listdir(tmp_path)


async def test_a_slow_disk_delays_no_loop(tmp_path: Path) -> None:
    """The loop turns while an operation waits for the disk, which goes on only when the loop lets it."""
    spool = SlowSpool(tmp_path)
    for action in ("write", "read"):
        spool.gate, spool.begun = threading.Event(), threading.Event()
        if action == "write":
            spool.add(0, values(0))
        else:
            reading = asyncio.create_task(taken(spool, 1))
        await until(spool.begun.is_set)
        for _ in range(100):
            await asyncio.sleep(0)
        assert spool.is_busy
        spool.gate.set()
        if action == "write":
            await written(spool)
    assert await reading == [0]
    spool.close()


async def test_the_room_of_taken_outputs_is_used_again(tmp_path: Path) -> None:
    spool = Spool[int](tmp_path, limit=20_000)
    for number in range(200):  # always a few behind
        spool.add(number, values(number))
        await written(spool)
        if number >= 3:
            assert await taken(spool, 1) == [number - 3]
    assert spool._file is not None and os.fstat(spool._file).st_size <= 20_000
    spool.close()


async def test_a_full_disk_keeps_outputs_in_memory_up_to_a_limit_and_is_tried_again(tmp_path: Path) -> None:
    spool = SlowSpool(tmp_path, memory_limit=20_000)
    spool.is_full = True
    for number in range(5):
        spool.add(number, values(number))
        await until(lambda: not spool.is_busy and spool._writing is None)  # the disk has refused it
    with pytest.raises(Unavailable, match="cannot store"):
        spool.add(5, values(5))
    assert await taken(spool, 2) == [0, 1]
    spool.is_full = False
    spool.add(5, values(5))
    await written(spool)
    assert await taken(spool, 4) == [2, 3, 4, 5]
    spool.close()


async def test_a_client_that_stays_behind_has_stalled(tmp_path: Path) -> None:
    spool = SlowSpool(tmp_path, limit=40_000)
    spool.gate = threading.Event()
    with pytest.raises(Stalled):
        for number in range(20):
            spool.add(number, values(number))
    assert len(spool) == 10, "what waits for the disk counts too"
    spool.gate.set()
    await written(spool)
    assert await taken(spool, 10) == list(range(10))
    spool.close()


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_file_stays_open_until_its_thread_is_done(is_read: bool, tmp_path: Path) -> None:
    spool = SlowSpool(tmp_path)
    spool.add(1, values(1))
    await written(spool)
    spool.gate = threading.Event()
    if is_read:
        reader = asyncio.create_task(spool.pop())
        await until(lambda: spool.is_busy)
        reader.cancel()
    else:
        spool.add(2, values(2))
        await until(lambda: spool.is_busy)
    spool.close()
    assert open_files(tmp_path) != [], "another file could get its number, and the thread would write there"
    spool.gate.set()
    await until(lambda: not open_files(tmp_path))


async def test_a_spool_that_nobody_closed_frees_its_file(tmp_path: Path) -> None:
    spool = Spool[int](tmp_path)
    spool.add(0, values(0))
    await written(spool)
    assert files_in(tmp_path) == 1
    del spool

    def is_freed() -> bool:
        gc.collect()  # the thread that wrote last may hold it for a moment longer
        return files_in(tmp_path) == 0

    await until(is_freed)


def files_in(folder: Path) -> int:
    """Return how many files of the folder this process has open."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(link.startswith(str(folder)) for link in links)
