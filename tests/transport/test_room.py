"""Room in an arena: threads commit memory, and those that find none wait for the ends of loans."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mstar_core.errors import ArenaFull
from mstar_core.messages.tensors import ShmTensor
from mstar_core.transport.arena import Arena, Growth
from mstar_core.transport.room import Room

KIB = 1024


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena("api", incarnation=1, segment_bytes=64 * KIB, max_bytes=256 * KIB, slots=8) as opened:
        yield opened


def lend(arena: Arena, kib: int) -> ShmTensor:
    return arena.put(np.ones(kib * KIB, dtype=np.uint8), "worker-0")


def end(arena: Arena, room: Room, ref: ShmTensor) -> None:
    assert arena.release(ref.slot, ref.generation)
    room.freed()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0.001)


async def test_a_thread_commits_memory_and_the_tensors_fit_without_more(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, gate = Growth.commit, threading.Event()

    def slow(growth: Growth) -> OSError | None:
        assert threading.current_thread() is not threading.main_thread()
        assert gate.wait(60), "the loop goes on meanwhile"
        return committed(growth)

    monkeypatch.setattr(Growth, "commit", slow)
    room = Room(arena)
    waiting = asyncio.create_task(room.wait([100 * KIB, 80 * KIB]))
    await turns()
    assert not waiting.done()
    gate.set()
    await waiting
    assert room.has([100 * KIB, 80 * KIB])
    lend(arena, 100)
    lend(arena, 80)  # a growth would fail here: this is the main thread


async def test_a_full_arena_is_waited_for(arena: Arena) -> None:
    room, refs = Room(arena), [lend(arena, 120), lend(arena, 120)]
    waiting = [asyncio.create_task(room.wait([size * KIB])) for size in (100, 240)]
    await turns()
    assert not any(task.done() for task in waiting)
    end(arena, room, refs[0])
    await turns()
    assert [task.done() for task in waiting] == [True, False]
    end(arena, room, refs[1])
    await asyncio.gather(*waiting)


async def test_all_slots_are_waited_for(arena: Arena) -> None:
    room, refs = Room(arena), [lend(arena, 1) for _ in range(8)]
    waiting = asyncio.create_task(room.wait([KIB]))
    await turns()
    assert not waiting.done()
    end(arena, room, refs[3])
    await waiting


async def test_what_never_fits_is_refused_at_once(arena: Arena) -> None:
    lend(arena, 10)
    with pytest.raises(ArenaFull, match="the limit is 262144 bytes"):
        await Room(arena).wait([200 * KIB, 57 * KIB])


async def test_a_host_without_memory_is_waited_for_while_others_hold_some(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    room, ref = Room(arena), lend(arena, 60)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    waiting = asyncio.create_task(room.wait([62 * KIB]))
    await turns()
    assert not waiting.done() and arena.committed_bytes == 64 * KIB
    end(arena, room, ref)
    await waiting
    with pytest.raises(ArenaFull, match="the system has no memory"):
        await room.wait([100 * KIB])


async def test_memory_for_a_request_that_is_gone_serves_the_next(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, committed = threading.Event(), Growth.commit

    def gated(growth: Growth) -> OSError | None:
        assert gate.wait(30)
        return committed(growth)

    monkeypatch.setattr(Growth, "commit", gated)
    room = Room(arena)
    waiting = asyncio.create_task(room.wait([200 * KIB]))
    await turns()
    waiting.cancel()
    await turns()
    gate.set()
    await room.wait([200 * KIB])
    assert arena.committed_bytes == 256 * KIB
