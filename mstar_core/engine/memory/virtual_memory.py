"""Virtual memory of a GPU by the driver: address ranges that stay reserved while their memory comes and goes.

Source: CUDA driver API, "Virtual Memory Management". The library is loaded when it is first used.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY: Final = "libcuda.so.1"
OUT_OF_MEMORY: Final = 2
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""


class VirtualMemory(Protocol):
    """Address ranges of one device. granularity: bytes by which memory is mapped. Addresses are numbers."""

    granularity: int

    def reserve(self, size: int) -> int:
        """Reserve addresses. size: a multiple of the granularity."""

    def map(self, address: int, size: int) -> None:
        """Map new memory at reserved addresses. Raises torch.OutOfMemoryError."""

    def unmap(self, address: int, size: int) -> None:
        """Give the memory at these addresses back; they stay reserved. They must be those of one `map`."""

    def tensor(self, address: int, size: int) -> Tensor:
        """Return the bytes of a range, of which the first must be mapped: uint8 [size]."""

    def host(self, size: int) -> Tensor:
        """Return memory of the host that the device copies to and from at full rate: uint8 [size]."""

    def settle(self) -> None:
        """Wait for all work of the device, and give back memory that the allocators of PyTorch hold unused."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Span:
    """Device memory in the form of Numba's CUDA array interface, version 3, which PyTorch reads without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class DriverMemory:
    """Virtual memory of a CUDA device. Raises EngineError where the driver refuses a call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        index = device.index or 0
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise EngineError(f"{LIBRARY} cannot be loaded", str(error), "leave sleepable out") from error
        location = _Location(ON_DEVICE, index)
        self._properties = _Properties(type=PINNED, location=location)
        self._access = _Access(location, READ_WRITE)
        self.settle()  # the context of the device becomes the current one
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self.granularity = granularity.value

    def reserve(self, size: int) -> int:
        """See VirtualMemory."""
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), _size(size), _size(0), ctypes.c_uint64(0), _size(0))
        return address.value

    def map(self, address: int, size: int) -> None:
        """See VirtualMemory."""
        handle = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(handle), _size(size), ctypes.byref(self._properties), _size(0))
        try:
            self._call("cuMemMap", ctypes.c_uint64(address), _size(size), _size(0), handle, _size(0))
        finally:
            self._call("cuMemRelease", handle)  # what is mapped stays until it is unmapped
        self._call("cuMemSetAccess", ctypes.c_uint64(address), _size(size), ctypes.byref(self._access), _size(1))

    def unmap(self, address: int, size: int) -> None:
        """See VirtualMemory."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), _size(size))

    def tensor(self, address: int, size: int) -> Tensor:
        """See VirtualMemory."""
        return torch.as_tensor(_Span(address, size), device=self._device)

    def host(self, size: int) -> Tensor:
        """See VirtualMemory."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def settle(self) -> None:
        """See VirtualMemory."""
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has no memory left")
        if status:
            raise EngineError(f"{name} failed", f"CUDA driver error {status}", "leave sleepable out")


def _size(size: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(size)
