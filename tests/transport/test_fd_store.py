"""Store of descriptors: connections stay open while no process uses them, and end when they are dropped."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mstar_core.transport.fd_store import FdStore, FdStoreClient

MANY = 400
"""More connections than the socket between the processes holds messages."""


@asynccontextmanager
async def client_of(store: FdStore, incarnation: int) -> AsyncIterator[FdStoreClient]:
    """A process that inherits the store's socket, until it dies."""
    client = FdStoreClient(socket.socket(fileno=store.offer()), incarnation)
    try:
        yield client
    finally:
        client.close()


async def settled(store: FdStore, count: int) -> None:
    """Wait until so many connections are kept."""
    async with asyncio.timeout(30):
        while len(store) != count:  # noqa: ASYNC110  the store has no event for it
            await asyncio.sleep(0.001)


async def test_the_next_process_gets_what_the_dead_one_left() -> None:
    store = FdStore()
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("test")
    os.write(memory, b"recorded")
    async with client_of(store, 1) as first:
        assert await first.take() == []
        key = first.keep(ours.fileno(), memory)
    ours.close()
    os.close(memory)
    async with client_of(store, 2) as second:
        (kept,) = await second.take()
        assert kept.key == key and os.pread(kept.memory, 8, 0) == b"recorded"
        with socket.socket(fileno=kept.connection) as again:
            again.sendall(b"go on")
        os.close(kept.memory)
        assert theirs.recv(5) == b"go on"
        second.drop(key)
        await settled(store, 0)
    assert theirs.recv(1) == b"", "the connection must end with its last copy"
    theirs.close()
    store.close()


async def test_many_connections_are_kept_and_handed_over() -> None:
    gc.collect()  # descriptors of earlier tests in cycles of references
    store, before = FdStore(), len(os.listdir("/proc/self/fd"))
    memory = os.memfd_create("test")
    async with client_of(store, 1) as first:
        await first.take()
        keys = [first.keep(memory, memory) for _ in range(MANY)]
        await settled(store, MANY)
    async with client_of(store, 2) as second:
        taken = await second.take()
        assert [kept.key for kept in taken] == keys
        for kept in taken:
            kept.close()
        for key in keys:
            second.drop(key)
        await settled(store, 0)
    store.close()
    os.close(memory)
    assert len(os.listdir("/proc/self/fd")) == before
