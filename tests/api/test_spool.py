"""Spill file: order, bounded file and memory, a slow disk delays no loop, and a full one loses nothing by itself."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mstar_core.api.errors import Stalled
from mstar_core.api.output.spool import Array, Spool
from mstar_core.errors import Unavailable
from tests.api.test_service_storage import open_files


class SlowSpool(Spool[int]):
    """A disk on which each operation takes as long as the test says, or waits for `gate`."""

    delay_s = 0.0
    gate: threading.Event | None = None
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
        time.sleep(self.delay_s)
        if self.gate is not None:
            assert self.gate.wait(30)


def values(number: int, size: int = 1000) -> Array:
    return np.full(size, number, dtype=np.int32)


async def taken(spool: Spool[int], count: int) -> list[int]:
    found = []
    for _ in range(count):
        number, array = await spool.pop()
        assert (array == number).all() and array.shape == (1000,)
        found.append(number)
    return found


async def written(spool: Spool[int]) -> None:
    async with asyncio.timeout(30):
        while spool.in_memory:  # noqa: ASYNC110 a thread writes
            await asyncio.sleep(0.001)


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
    spool = SlowSpool(tmp_path)
    spool.delay_s = 0.3
    longest, last, is_over = 0.0, time.monotonic(), False

    async def look() -> None:
        nonlocal longest, last
        while not is_over:
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    looking = asyncio.create_task(look())
    for number in range(2):
        spool.add(number, values(number))
    await written(spool)
    assert await taken(spool, 2) == [0, 1]
    is_over = True
    await looking
    assert longest < 0.25
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
        await asyncio.sleep(0.01)
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
        await asyncio.sleep(0.01)
        reader.cancel()
    else:
        spool.add(2, values(2))
        await asyncio.sleep(0.01)
    spool.close()
    assert open_files(tmp_path) != [], "another file could get its number, and the thread would write there"
    spool.gate.set()
    async with asyncio.timeout(30):
        while open_files(tmp_path):  # noqa: ASYNC110 a thread closes it
            await asyncio.sleep(0.001)


async def test_a_spool_that_nobody_closed_frees_its_file(tmp_path: Path) -> None:
    spool = Spool[int](tmp_path)
    spool.add(0, values(0))
    await written(spool)
    assert files_in(tmp_path) == 1
    del spool
    gc.collect()
    assert files_in(tmp_path) == 0


def files_in(folder: Path) -> int:
    """Return how many files of the folder this process has open."""
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(link.startswith(str(folder)) for link in links)
