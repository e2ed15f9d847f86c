"""Mooncake's transfer engine for tests: the mark of tests that need it, free ports, ends in this process, and a fake.

The fake obeys the same contract of transports, so that all but the library itself is tested without it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from functools import cache
from typing import Any, ClassVar

import pytest
import torch

from mstar_core.errors import TransportError
from mstar_core.host.network import LOOPBACK, WINDOW_PORTS, WINDOWS, transfer_engine
from mstar_core.host.ports import bind_error
from mstar_core.worker.peer_memory.mooncake import MooncakeMemory


def _missing() -> str:
    try:
        transfer_engine()
    except TransportError as error:
        return f"{error.title}: {error.detail}"
    return ""


MISSING = _missing()
needs_mooncake = pytest.mark.skipif(bool(MISSING), reason=MISSING)

_PER_RANK = WINDOW_PORTS * WINDOWS
_firsts = itertools.count(20000 + os.getpid() % 100 * 100, 4 * _PER_RANK)


def transfer_ports() -> int:
    """Return the first of the ports of four ranks, all of them free."""
    return next(
        first for first in _firsts if all(bind_error(LOOPBACK, first + i) is None for i in range(4 * _PER_RANK))
    )


@cache
def _engine(number: int) -> Any:
    """Return an engine of this process. Ends are opened and closed on it, because its own end takes half a second."""
    engine = transfer_engine().TransferEngine()
    assert engine.initialize(f"{LOOPBACK}:1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


class FakeEngine:
    """An engine whose peers are in this process. A batch ends when it is polled for the second time."""

    peers: ClassVar[dict[str, FakeEngine]] = {}

    def __init__(self, number: int) -> None:
        self.memory: dict[int, int] = {}
        self.batches: dict[int, tuple[bool, int, int, int]] = {}
        self.count = 0
        self.port = number + 1
        self.peers[f"{LOOPBACK}:{self.port}"] = self

    def get_rpc_port(self) -> int:
        return self.port

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        self.memory[buffer_addr] = capacity
        return 0

    def unregister_memory(self, buffer_addr: int, /) -> int:
        return 0 if self.memory.pop(buffer_addr, None) else -1

    def send_probe(self, peer_server_name: str) -> int:
        return 0 if peer_server_name in self.peers else -102

    def batch_transfer_async_read(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        (local,), (remote,), (size,) = buffers, peer_buffer_addresses, lengths
        memory = self.peers[target_hostname].memory
        is_lent = any(start <= remote and remote + size <= start + memory[start] for start in memory)
        self.count += 1
        self.batches[self.count] = (is_lent, local, remote, size)
        return self.count

    def transfer_check_status(self, batch: int, /) -> int:
        if batch in self.batches:
            is_lent, local, remote, size = self.batches.pop(batch)
            if is_lent:
                ctypes.memmove(local, remote, size)
            self.batches[-batch] = (is_lent, local, remote, size)
            return 0
        return 1 if self.batches.pop(-batch)[0] else -1


def network_memory(number: int, device: str = "cpu", *, is_fake: bool = False, **limits: int) -> MooncakeMemory:
    """Return end `number` by TCP, on ports that the engine chooses."""
    engine = FakeEngine(number) if is_fake else _engine(number)
    return MooncakeMemory(engine, f"{LOOPBACK}:{engine.get_rpc_port()}", torch.device(device), **limits)
