"""Mooncake's transfer engine for tests: the mark of tests that need it, free ports, and ends in this process."""

from __future__ import annotations

import itertools
import os
from functools import cache
from typing import Any

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


def network_memory(number: int, **limits: int) -> MooncakeMemory:
    """Return end `number` by TCP, on ports that the engine chooses."""
    engine = _engine(number)
    return MooncakeMemory(engine, f"{LOOPBACK}:{engine.get_rpc_port()}", torch.device("cpu"), **limits)
