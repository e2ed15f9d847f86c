"""Placement of a node's memory at addresses that stay, over memory of the host that plays a device."""

from __future__ import annotations

import copy
import ctypes
import mmap

import pytest
import torch

from mstar_core.engine.memory.node_memory import NodeMemory, loaded_again
from mstar_core.engine.memory.placed import PlacedSleeper
from tests.engine.test_sleeper import draw
from tests.engine.tiny_engine import Driver, TinyLM, make_engine

CPU = torch.device("cpu")


class HostMemory:
    """Virtual memory of the host. mapped: size by address. limit: most bytes at once."""

    granularity = mmap.PAGESIZE

    def __init__(self, limit: int = 1 << 30) -> None:
        self.mapped: dict[int, int] = {}
        self.limit = limit
        self.hosted = 0
        self._ranges: list[mmap.mmap] = []

    def reserve(self, size: int) -> int:
        self._ranges.append(mmap.mmap(-1, size))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._ranges[-1]))

    def map(self, address: int, size: int) -> None:
        assert address not in self.mapped
        if sum(self.mapped.values()) + size > self.limit:
            raise torch.OutOfMemoryError("no memory left")
        self.mapped[address] = size
        ctypes.memset(address, 0xA5, size)  # nothing may rely on what was there

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size
        ctypes.memset(address, 0x5A, size)

    def tensor(self, address: int, size: int) -> torch.Tensor:
        assert address in self.mapped
        return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)

    def host(self, size: int) -> torch.Tensor:
        self.hosted += size
        return torch.empty(size, dtype=torch.uint8)

    def settle(self) -> None: ...


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("chunk_bytes", [mmap.PAGESIZE, 1 << 20])
def test_addresses_stay_and_an_engine_draws_the_same_ids(level: int, chunk_bytes: int) -> None:
    module, memory = TinyLM(), HostMemory()
    engine = make_engine(module=module)
    driver = Driver(engine)
    before = draw(driver, 1)
    view = module.norm.weight.detach()[3:]
    sleeper = PlacedSleeper(CPU, memory, chunk_bytes)
    sleeper.hold("LM", engine.node_memory())
    engine.forget_prefixes()
    assert draw(driver, 2) == before
    assert view.data_ptr() == module.norm.weight.data_ptr() + 12
    tensors = [*module.parameters(), *engine.node_memory().scratch]
    addresses, whole = [tensor.data_ptr() for tensor in tensors], sum(memory.mapped.values())
    assert all(any(at <= each < at + size for at, size in memory.mapped.items()) for each in addresses)
    assert sleeper.placed_bytes == whole
    engine.sleeps()
    assert sleeper.pause("LM", level) == whole
    assert not memory.mapped and not sleeper.placed_bytes
    assert sleeper.resume(["LM"], loaded_again(module, TinyLM(), sleeper.dropped(["LM"]))) == whole
    assert sum(memory.mapped.values()) == whole
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert draw(driver, 3) == before


def test_copies_that_stay_are_not_made_again() -> None:
    module, memory = TinyLM(), HostMemory()
    values = [parameter.detach().clone() for parameter in module.parameters()]
    sleeper = PlacedSleeper(CPU, memory, mmap.PAGESIZE, keeps_copies=True)
    sleeper.hold("LM", NodeMemory(module=module))
    for _ in range(2):
        sleeper.pause("LM", 1)
        assert not memory.mapped
        sleeper.resume(["LM"], [])
        assert sleeper.kept_bytes == memory.hosted == sleeper.placed_bytes
        assert all(torch.equal(*pair) for pair in zip(module.parameters(), values, strict=True))
    sleeper.pause("LM", 2)
    assert sleeper.kept_bytes == 0
    sleeper.resume(["LM"], loaded_again(module, again := copied(module), sleeper.dropped(["LM"])))
    assert sleeper.kept_bytes == 0 and all(
        torch.equal(*pair) for pair in zip(module.parameters(), again.parameters(), strict=True)
    )


def test_values_that_can_change_are_copied_by_each_sleep() -> None:
    memory, adapter = HostMemory(), torch.zeros(mmap.PAGESIZE)
    sleeper = PlacedSleeper(CPU, memory, mmap.PAGESIZE, keeps_copies=True)
    sleeper.hold("LM", NodeMemory(kept=(adapter,)))
    for value in (1.0, 2.0):
        adapter.fill_(value)
        sleeper.pause("LM", 1)
        sleeper.resume(["LM"], [])
        assert bool((adapter == value).all()) and sleeper.kept_bytes == 0


def copied(module: TinyLM) -> TinyLM:
    """Return a module with other values."""
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data = parameter.detach() + 1
    return other


def test_a_device_without_room_says_so() -> None:
    memory = HostMemory()
    sleeper = PlacedSleeper(CPU, memory, mmap.PAGESIZE)
    sleeper.hold("LM", NodeMemory(module=TinyLM()))
    sleeper.pause("LM", 1)
    memory.limit = mmap.PAGESIZE
    with pytest.raises(torch.OutOfMemoryError):
        sleeper.resume(["LM"], [])
