"""Placement of a node's memory at addresses that stay, over memory of the host that plays a device."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from mstar_core.engine.memory.node_memory import NodeMemory, loaded_again
from mstar_core.engine.memory.placed import PlacedSleeper
from mstar_core.engine.memory.virtual_memory import DriverMemory
from tests.engine.test_sleeper import draw
from tests.engine.tiny_engine import Driver, TinyLM, make_engine

CPU = torch.device("cpu")


class HostMemory:
    """Virtual memory of the host. mapped: size by address. limit: most bytes at once."""

    granularity = mmap.PAGESIZE

    def __init__(self, limit: int = 1 << 30) -> None:
        self.mapped: dict[int, int] = {}
        self.limit = limit
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
    assert sleeper.mapped_bytes == whole
    engine.sleeps()
    assert sleeper.pause("LM", level) == whole
    assert not memory.mapped and not sleeper.mapped_bytes
    assert sleeper.resume(["LM"], loaded_again(module, TinyLM(), sleeper.dropped(["LM"]))) == whole
    assert sum(memory.mapped.values()) == whole
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert draw(driver, 3) == before


def test_a_device_without_room_says_so() -> None:
    memory = HostMemory()
    sleeper = PlacedSleeper(CPU, memory, mmap.PAGESIZE)
    sleeper.hold("LM", NodeMemory(module=TinyLM()))
    sleeper.pause("LM", 1)
    memory.limit = mmap.PAGESIZE
    with pytest.raises(torch.OutOfMemoryError):
        sleeper.resume(["LM"], [])


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_graphs_captured_before_a_sleep_replay_after_it(level: int) -> None:
    device = torch.device("cuda", 0)
    layer = torch.nn.Linear(4096, 4096, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    again = torch.nn.Linear(4096, 4096, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    again.weight.copy_(layer.weight)
    pool = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    sleeper = PlacedSleeper(device, DriverMemory(device))
    sleeper.hold("n", NodeMemory(module=layer, scratch=(pool,)))
    x = torch.randn(8, 4096, device=device, dtype=torch.bfloat16)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x) + pool[:8, None]
    graph.replay()
    torch.cuda.synchronize()
    before, address = y.clone(), layer.weight.data_ptr()
    free = torch.cuda.mem_get_info(device)[0]
    freed = sleeper.pause("n", level)
    assert freed >= layer.weight.nbytes + pool.nbytes
    assert torch.cuda.mem_get_info(device)[0] - free >= freed
    sleeper.resume(["n"], loaded_again(layer, again, sleeper.dropped(["n"])))
    assert layer.weight.data_ptr() == address
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, before) and not pool.any()
