"""Device memory that several ends in one process share, with copies that end when the test says so."""

from __future__ import annotations

import torch
from torch import Tensor

from mstar_core.errors import TransportError
from mstar_core.messages.tensors import CudaTensor, PeerTensor
from mstar_core.worker.peer_memory.memory import DeviceMemory


class FakeCopy:
    """A copy that ends with `SharedMemory.finish`, or when it has been polled so many times."""

    def __init__(self, polls: int) -> None:
        self.has_ended = False
        self.polls = polls

    def query(self) -> bool:
        self.polls -= 1
        self.has_ended = self.has_ended or self.polls == 0
        return self.has_ended


class SharedMemory:
    """Memory of all devices of a host. `end` gives one process's view of it.

    is_slow: copies end with `finish` only. polls: otherwise, how often they are polled. bad_reads: readings that fail.
    """

    def __init__(self, limit: int = 1 << 24, *, is_slow: bool = False, polls: int = 1, bad_reads: int = 0) -> None:
        self.polls = polls
        self.bad_reads = bad_reads
        self.blocks: dict[int, Tensor] = {}
        self.left = limit
        self.is_slow = is_slow
        self.copies: list[FakeCopy] = []
        self.opened = 0

    def finish(self) -> None:
        """End all copies."""
        for copy in self.copies:
            copy.has_ended = True
        self.copies.clear()

    def end(self) -> FakeMemory:
        return FakeMemory(self)


class FakeMemory(DeviceMemory):
    """An address is the number of a block times 2 ** 32, plus an offset."""

    form: type[PeerTensor] = CudaTensor

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared

    def holds(self, tensor: Tensor) -> bool:
        return True

    def allocate(self, size_bytes: int) -> int:
        if size_bytes > self.shared.left:
            raise TransportError("GPU memory cannot be shared between the workers of this host", "out of memory")
        self.shared.left -= size_bytes
        address = (len(self.shared.blocks) + 1) << 32
        self.shared.blocks[address] = torch.zeros(size_bytes, dtype=torch.uint8)
        return address

    def free(self, address: int) -> None:
        self.shared.left += len(self.shared.blocks[address])
        self.shared.blocks[address] = torch.zeros(0, dtype=torch.uint8)

    def handle(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        if not len(self.shared.blocks.get(address, ())):
            raise TransportError("GPU memory cannot be shared between the workers of this host", "invalid handle")
        self.shared.opened += 1
        return address

    def unmap(self, address: int) -> None:
        self.shared.opened -= 1

    def write(self, address: int, tensor: Tensor) -> FakeCopy:
        data = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else torch.zeros(0, dtype=torch.uint8)
        self._at(address, tensor.nbytes).copy_(data)
        return self._copy()

    def read(self, address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, FakeCopy]:
        if self.shared.bad_reads:
            self.shared.bad_reads -= 1
            raise TransportError("GPU memory cannot be shared between the workers of this host", "a bad link")
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            tensor = self._at(address, tensor.nbytes).clone().view(dtype).view(shape)
        return tensor, self._copy()

    def take(self, tensor: Tensor) -> None:
        pass

    def close(self) -> None:
        pass

    def _at(self, address: int, size: int) -> Tensor:
        block, offset = address >> 32 << 32, address & 0xFFFFFFFF
        return self.shared.blocks[block][offset : offset + size]

    def _copy(self) -> FakeCopy:
        copy = FakeCopy(0 if self.shared.is_slow else self.shared.polls)
        if self.shared.is_slow:
            self.shared.copies.append(copy)
        return copy
