"""Memory that other workers can read: allocation, handles, and asynchronous copies.

`CudaMemory` is the memory of a GPU by CUDA IPC, `MooncakeMemory` host memory by TCP or RDMA.
"""

from __future__ import annotations

import ctypes
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch

from mstar_core.errors import TransportError
from mstar_core.messages.tensors import CudaTensor, PeerTensor

if TYPE_CHECKING:
    from torch import Tensor

HANDLE_BYTES: Final = 64
ENABLE_PEER_ACCESS: Final = 1
"""cudaIpcMemLazyEnablePeerAccess: the only flag of cudaIpcOpenMemHandle."""

BY_ADDRESS: Final = 4
"""cudaMemcpyDefault: the addresses tell the devices."""


class CopyEnd(Protocol):
    """The end of an asynchronous copy, such as a CUDA event."""

    def query(self) -> bool:
        """Return, without waiting, whether the copy has ended. Raises TransportError if it failed."""


class DeviceMemory(ABC):
    """Memory that other processes can read. Every failure is a TransportError. form: of its handles in messages."""

    form: type[PeerTensor]

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""

    @abstractmethod
    def allocate(self, size_bytes: int) -> int:
        """Return the address of fresh memory."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free memory of `allocate`."""

    @abstractmethod
    def handle(self, address: int) -> bytes:
        """Return the handle by which another process opens memory of `allocate`."""

    @abstractmethod
    def open(self, handle: bytes) -> int:
        """Map the memory of another process and return its address here."""

    @abstractmethod
    def unmap(self, address: int) -> None:
        """Undo `open`."""

    @abstractmethod
    def write(self, address: int, tensor: Tensor) -> CopyEnd:
        """Copy a tensor of this device to an address, after the work that the current stream has so far."""

    @abstractmethod
    def read(self, address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, CopyEnd]:
        """Copy from an address into a new tensor on this device. Its content is valid once the copy has ended."""

    @abstractmethod
    def take(self, tensor: Tensor) -> None:
        """Hand a tensor of `read` over to the current stream."""

    @abstractmethod
    def close(self) -> None:
        """End everything that is still on its way."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaMemory(DeviceMemory):
    """Memory of one GPU. All copies run on a stream of their own, so that they overlap with steps."""

    form: type[PeerTensor] = CudaTensor

    def __init__(self, device: torch.device) -> None:
        """Load the CUDA runtime that torch uses. Raises TransportError without one."""
        self._device = device
        self._runtime = _runtime()
        self._stream = torch.cuda.Stream(device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def allocate(self, size_bytes: int) -> int:
        address = ctypes.c_void_p()
        with torch.cuda.device(self._device):
            self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return int(address.value or 0)

    def free(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._call("cudaFree", ctypes.c_void_p(address))

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        with torch.cuda.device(self._device):
            self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise TransportError("a handle of device memory has the wrong size", f"{len(handle)} bytes")
        address, opened = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        with torch.cuda.device(self._device):
            self._call("cudaIpcOpenMemHandle", ctypes.byref(address), opened, ctypes.c_uint(ENABLE_PEER_ACCESS))
        return int(address.value or 0)

    def unmap(self, address: int) -> None:
        with torch.cuda.device(self._device):
            self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def write(self, address: int, tensor: Tensor) -> CopyEnd:
        source = tensor.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = self._copy(address, source.data_ptr(), source.nbytes)
        source.record_stream(self._stream)
        return done

    def read(self, address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, CopyEnd]:
        with torch.cuda.stream(self._stream):
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return tensor, self._copy(tensor.data_ptr(), address, tensor.nbytes)

    def take(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """Do nothing: copies end by themselves."""

    def _copy(self, target: int, source: int, size_bytes: int) -> CopyEnd:
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        with torch.cuda.device(self._device):
            if size_bytes:
                self._call(
                    "cudaMemcpyAsync",
                    ctypes.c_void_p(target),
                    ctypes.c_void_p(source),
                    ctypes.c_size_t(size_bytes),
                    ctypes.c_int(BY_ADDRESS),
                    stream,
                )
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetLastError()  # otherwise the next call of torch would report it
            text = self._runtime.cudaGetErrorString(ctypes.c_int(code)).decode()
            raise TransportError(
                "GPU memory cannot be shared between the workers of this host",
                f"{name} on {self._device}: {text}",
                "free GPU memory by lowering kv_cache.memory_fraction, or place the nodes on one rank",
            )


def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime library that torch has loaded."""
    torch.cuda.init()
    paths = set(re.findall(r"\S*/libcudart\S*\.so\S*", Path("/proc/self/maps").read_text(encoding="utf-8")))
    if not paths:
        raise TransportError("GPU memory cannot be shared between workers", "torch has not loaded libcudart")
    runtime = ctypes.CDLL(min(paths))
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
