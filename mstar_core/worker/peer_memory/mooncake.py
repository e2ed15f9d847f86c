"""Host memory that other workers read over a network, by Mooncake's transfer engine. A DeviceMemory of `PeerMemory`.

A tensor is copied into registered memory, read by the peer into registered memory of its own, and copied out there. TCP
and RDMA differ only in how the engine is opened. The engine neither encrypts nor authenticates.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import torch

from mstar_core.config.resolved import TransportConfig
from mstar_core.errors import TransportError
from mstar_core.host.network import own_address, transfer_engine, window
from mstar_core.messages.tensors import PeerTensor, RemoteTensor
from mstar_core.transport.arena import ALIGN_BYTES, FreeList
from mstar_core.worker.peer_memory.memory import CopyEnd, DeviceMemory

if TYPE_CHECKING:
    from torch import Tensor


STAGING_BYTES: Final = 64 << 20
"""Least size of a registered segment that tensors are read into."""

MOST_STAGING_BYTES: Final = 1 << 30
"""Limit of all such segments. Reads beyond it wait for others to end; a larger tensor is read alone."""

ADDRESS_BITS: Final = 64
"""A remote address in a reader: the number of the peer's session << 64 | the address in the peer's process."""

_ENGINE_SETTINGS: Final = {"MC_LOG_LEVEL": "ERROR", "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS": "60"}


class Engine(Protocol):
    """The calls of mooncake.engine.TransferEngine that are used (mooncake-transfer-engine 0.3.13)."""

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """Return 0 on success."""

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Return 0 on success."""

    def send_probe(self, peer_server_name: str) -> int:
        """Return 0 if a peer answers. Blocks, without the interpreter lock, for 5 s if its host does not answer."""

    def batch_transfer_async_read(
        self, target_hostname: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        """Begin to read and return a batch, 0 if the peer cannot be reached.

        The first one of a peer waits for a handshake, with the interpreter lock; so a link is probed before.
        """

    def transfer_check_status(self, batch: int, /) -> int:
        """Return 0 while a batch runs, 1 when it is done, less than 0 when it has failed. Not called again then."""


def open_engine(transport: TransportConfig, rank: int, incarnation: int, address: str = "") -> tuple[Engine, str]:
    """Open the engine of a rank. Returns it and its session, at which peers read.

    address: at which other hosts reach this one, if there are any; over TCP, a configured device comes before it.
    Raises TransportError if the library, the device or two free ports are missing.
    """
    is_rdma = transport.protocol == "RDMA"
    host = own_address((None if is_rdma else transport.device) or address or None)
    mine = window(transport.port, rank, incarnation)
    ports = {"MC_MIN_RPC_PORT": str(mine.start), "MC_MAX_RPC_PORT": str(mine.stop - 1)}
    os.environ.update({**_ENGINE_SETTINGS, **ports})  # the engine reads them once, when its library is loaded
    engine = transfer_engine().TransferEngine()
    devices = (transport.device or "") if is_rdma else ""
    code = engine.initialize(f"{host}:{mine.start}", "P2PHANDSHAKE", transport.protocol.lower(), devices)
    if code:
        raise TransportError(
            f"{transport.protocol} cannot be used for tensors of rank {rank}",
            f"the transfer engine returned {code} on {host}, ports {mine.start} to {mine.stop - 1}",
            "choose other ports with --mooncake-port, or another device with --tcp-transfer-device",
        )
    return engine, f"{host}:{engine.get_rpc_port()}"


class _Link:
    """Way to a peer's memory. A thread opens it, because an unreachable host answers after seconds."""

    def __init__(self, engine: Engine, session: str) -> None:
        self.session = session
        self.is_open: bool | None = None
        self.is_lost = False
        threading.Thread(target=self._open, args=(engine,), name="mstar-link", daemon=True).start()

    @property
    def is_usable(self) -> bool:
        """Whether it is open, or may still be."""
        return not self.is_lost and self.is_open is not False

    def _open(self, engine: Engine) -> None:
        self.is_open = engine.send_probe(self.session) == 0


@dataclass(slots=True, eq=False)
class _Staging:
    """Registered memory that tensors are read into."""

    data: Tensor
    free: FreeList = field(default_factory=FreeList)


class _Done:
    def query(self) -> bool:
        return True


class _Read:
    """A tensor on its way from a peer. Advances when it is polled."""

    def __init__(self, memory: MooncakeMemory, link: _Link, remote: int, tensor: Tensor) -> None:
        self._memory = memory
        self._link = link
        self._remote = remote
        self._tensor = tensor
        self._place: tuple[_Staging, int] | None = None
        self._batch = 0
        self._error: TransportError | None = None
        self.has_ended = False
        self.advance()

    def query(self) -> bool:
        """Return whether the tensor is there. Raises TransportError if it cannot come."""
        self._memory.advance()
        if self._link.is_lost and not self.has_ended and self._error is None:
            self._error = self._failure("has ended")
        if self._error is not None:
            raise self._error
        return self.has_ended

    def advance(self) -> None:
        """Begin once the link is open and there is room; copy out once all bytes are there."""
        if self.has_ended:
            return
        if (
            self._batch
        ):  # the engine writes into the staging memory until the batch has ended, even if the request is gone
            self._finish()
        elif self._error is not None or self._link.is_open is False:
            self._fail("cannot be reached")
        elif self._link.is_open:
            self._begin()

    def _begin(self) -> None:
        size = self._tensor.nbytes
        try:
            self._place = self._place or self._memory.take_staging(size)
        except TransportError as error:
            self._error, self.has_ended = error, True
            return
        if self._place is None:
            return
        staging, offset = self._place
        local = staging.data.data_ptr() + offset
        batch = self._memory.engine.batch_transfer_async_read(self._link.session, [local], [self._remote], [size])
        if batch <= 0:
            self._fail("cannot be reached")
        self._batch = max(batch, 0)

    def _finish(self) -> None:
        status = self._memory.engine.transfer_check_status(self._batch)
        if not status:
            return
        if status < 0:
            self._fail("failed to send it, or has ended")
            return
        assert self._place is not None
        staging, offset = self._place
        _bytes_of(self._tensor).copy_(staging.data[offset : offset + self._tensor.nbytes])
        self._end()

    def _failure(self, what: str) -> TransportError:
        return TransportError(
            "a tensor of another rank did not arrive",
            f"the rank at {self._link.session} {what}",
            "check that the ranks reach each other at this address and port, or use the protocol SHM on one host",
        )

    def _fail(self, what: str) -> None:
        self._error = self._error or self._failure(what)
        self._end()

    def _end(self) -> None:
        self.has_ended = True
        if self._place is not None:
            self._memory.give_staging(*self._place, self._tensor.nbytes)
        self._place = None


class MooncakeMemory(DeviceMemory):
    """Registered host memory of one worker. Owned by its PeerMemory.

    registered: segments by address. reading: tensors on their way, those of ended requests included.
    """

    form: type[PeerTensor] = RemoteTensor

    def __init__(
        self,
        engine: Engine,
        session: str,
        device: torch.device,
        *,
        staging_bytes: int = STAGING_BYTES,
        most_staging_bytes: int = MOST_STAGING_BYTES,
    ) -> None:
        """session: address of the engine. device: of the worker; memory beside a GPU is pinned."""
        self.engine = engine
        self.registered: dict[int, Tensor] = {}
        self.reading: list[_Read] = []
        self._session = session
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging_bytes, self._most_staging_bytes = staging_bytes, most_staging_bytes
        self._staging: list[_Staging] = []
        self._links: list[_Link] = []
        self._has_ended = False

    # -- memory that peers read --------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        return True  # tensors of the host and of a GPU

    def allocate(self, size_bytes: int) -> int:
        return self._register(size_bytes).data_ptr()

    def free(self, address: int) -> None:
        self.engine.unregister_memory(address)
        del self.registered[address]

    def handle(self, address: int) -> bytes:
        return f"{self._session} {address}".encode("ascii")

    def write(self, address: int, tensor: Tensor) -> CopyEnd:
        base = max(start for start in self.registered if start <= address)
        target = self.registered[base][address - base :][: tensor.nbytes]
        source = tensor.contiguous()
        if self._stream is None or not tensor.is_cuda:
            target.copy_(_bytes_of(source))
            return _Done()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(_bytes_of(source), non_blocking=True)
            source.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    # -- memory of peers ---------------------------------------------------------------------------------------------

    def open(self, handle: bytes) -> int:
        """Map the memory of a peer without blocking. A peer that cannot be reached fails its tensors."""
        session, _, address = handle.decode("ascii", "replace").partition(" ")
        host, _, port = session.rpartition(":")
        if not (host and port.isdigit() and address.isdigit() and int(address) >> ADDRESS_BITS == 0):
            raise TransportError("a handle of remote memory contradicts itself", repr(handle[:64]))
        known = [index for index, link in enumerate(self._links) if link.session == session and link.is_usable]
        if not known:
            self._links.append(_Link(self.engine, session))
        index = known[0] if known else len(self._links) - 1
        return index << ADDRESS_BITS | int(address)

    def unmap(self, address: int) -> None:
        # The successor of a peer gets a link of its own.
        self._links[address >> ADDRESS_BITS].is_lost = True

    def read(self, address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, CopyEnd]:
        """Copy into a new tensor on the host."""
        tensor = torch.empty(shape, dtype=dtype)
        if not tensor.nbytes:
            return tensor, _Done()
        link, remote = self._links[address >> ADDRESS_BITS], address & ((1 << ADDRESS_BITS) - 1)
        if link.is_open is False and not link.is_lost:
            self._links[address >> ADDRESS_BITS] = link = _Link(self.engine, link.session)  # try again
        read = _Read(self, link, remote, tensor)
        self.reading.append(read)
        self.advance()
        return tensor, read

    def take(self, tensor: Tensor) -> None:
        """Do nothing: the tensor is on the host."""

    def advance(self) -> None:
        """Advance all reads, so that those that have ended free their staging memory for others."""
        for read in self.reading:
            read.advance()
        if any(read.has_ended for read in self.reading):
            self.reading = [read for read in self.reading if not read.has_ended]

    def take_staging(self, size_bytes: int) -> tuple[_Staging, int] | None:
        """Return registered memory for a read, None while others use too much. Raises TransportError."""
        for staging in self._staging:
            offset = staging.free.take(_aligned(size_bytes))
            if offset is not None:
                return staging, offset
        room = self._most_staging_bytes - sum(len(staging.data) for staging in self._staging)
        step = max(_aligned(size_bytes), min(self._staging_bytes, room))
        if step > room:
            self._free_unused()
            if self._staging:
                return None
        staging = _Staging(self._register(step))
        staging.free.give(0, step)
        self._staging.append(staging)
        return staging, staging.free.take(_aligned(size_bytes)) or 0

    def give_staging(self, staging: _Staging, offset: int, size_bytes: int) -> None:
        """Return memory of `take_staging`."""
        staging.free.give(offset, _aligned(size_bytes))

    def close(self) -> None:
        """End everything that is still on its way: the engine first, which may still write."""
        if self._has_ended:
            return
        self._has_ended = True
        for address in list(self.registered):
            self.engine.unregister_memory(address)
        del self.engine
        for read in self.reading:
            read.has_ended = True
        self.reading.clear()
        self._staging.clear()
        self.registered.clear()

    def _register(self, size_bytes: int) -> Tensor:
        data = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        code = self.engine.register_memory(data.data_ptr(), size_bytes)
        if code:
            raise TransportError(
                "memory cannot be registered with the transfer engine",
                f"{size_bytes} bytes, code {code}",
                "raise the limit of locked memory (ulimit -l)",
            )
        self.registered[data.data_ptr()] = data
        return data

    def _free_unused(self) -> None:
        for staging in [memory for memory in self._staging if memory.free.largest_bytes == len(memory.data)]:
            self._staging.remove(staging)
            self.free(staging.data.data_ptr())


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.view(-1)[:0].to(torch.uint8)
