"""Host staging of captured steps: small arrays side by side that reach the device in one copy from pinned memory.

A copy costs the host about 20 microseconds whatever its size, so a replay reads everything from one block. Pinned
buffers form a ring: a buffer is written again only after the device has read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

Fields = Mapping[str, tuple[torch.dtype, int]]
"""Arrays side by side: name -> (dtype, length)."""

Values = Mapping[str, np.ndarray]
"""Contents of fields from their start on, in row-major order."""

MOST_BUFFERS: Final = 64
"""Host buffers of one block. A fused loop that launches more replays ahead waits for the oldest."""

T = TypeVar("T")


class DeviceEvent(Protocol):
    """A point in the device's work, such as `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class BufferRing(Generic[T]):
    """Buffers that copies leave from. A buffer is reused when the event after its copy has passed.

    Copies that directly follow each other may share the event after the last one.
    """

    def __init__(self, first: T, make: Callable[[], T], mark: Callable[[], DeviceEvent], most: int) -> None:
        """make: a further buffer; mark: records an event; most: buffers at most, after which `use` waits."""
        self._free = [first]
        self._make = make
        self._mark = mark
        self._most = most
        self._used: deque[tuple[T, DeviceEvent]] = deque()
        self._unmarked: list[T] = []

    def use(self, write: Callable[[T], None], *, more: bool = False) -> None:
        """Call `write` with a free buffer; it fills the buffer and launches the copy from it.

        more: a further use follows at once, whose event covers this copy.
        """
        buffer = self._next()
        write(buffer)
        self._unmarked.append(buffer)
        if not more:
            self._record()

    def _record(self) -> None:
        event = self._mark()
        self._used.extend((buffer, event) for buffer in self._unmarked)
        self._unmarked.clear()

    def _next(self) -> T:
        while self._used and self._used[0][1].query():
            self._free.append(self._used.popleft()[0])
        if self._free:
            return self._free.pop()
        if len(self._used) + len(self._unmarked) < self._most:
            return self._make()
        if not self._used:
            self._record()
        buffer, event = self._used.popleft()
        event.synchronize()
        return buffer


def recorded_event() -> DeviceEvent:
    """Record an event on the current stream."""
    event = torch.cuda.Event()
    event.record()
    return event


class Staging:
    """A block of fields on the device with its ring of pinned host buffers."""

    def __init__(self, fields: Fields, device: torch.device) -> None:
        self._spans: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (dtype, length) in fields.items():
            self._spans[name] = size, size + dtype.itemsize * length
            size += -(-dtype.itemsize * length // 16) * 16
        self._dtypes = {name: dtype for name, (dtype, _) in fields.items()}
        self._last = next(reversed(self._spans), None)
        self._block = torch.zeros(size, dtype=torch.uint8, device=device)
        self._ring: BufferRing[_HostBuffer] | None = None
        self._host = self._buffer()
        if device.type == "cuda":
            self._ring = BufferRing(self._host, self._buffer, recorded_event, MOST_BUFFERS)
        self.device = {name: self._block[slice(*span)].view(self._dtypes[name]) for name, span in self._spans.items()}

    def put(self, values: Values, *, more: bool = False) -> None:
        """Copy values to the device, up to the last field that has one. more: see `BufferRing.use`.

        A value shorter than its field is padded with zeros, and a field before the last one without a value becomes
        zero. The final field of the block is copied only as far as its value, and its rest is left as it is.
        """
        assert values.keys() <= self._spans.keys(), "a value without a field would be lost"
        if self._ring is None:
            self._send(self._host, values)
        else:
            self._ring.use(lambda buffer: self._send(buffer, values), more=more)

    def _send(self, host: _HostBuffer, values: Values) -> None:
        end, left = 0, len(values)
        for name, (start, stop) in self._spans.items():
            if not left:
                break
            into, value, count = host.fields[name], values.get(name), 0
            if value is not None:
                left -= 1
                count = value.size
                into[:count] = value if value.ndim == 1 else value.reshape(-1)
            if name == self._last:
                end = start + count * into.itemsize
            else:
                into[count:] = 0
                end = stop
        self._block[:end].copy_(host.block[:end], non_blocking=True)

    def _buffer(self) -> _HostBuffer:
        block = torch.zeros(len(self._block), dtype=torch.uint8, pin_memory=self._block.is_cuda)
        fields = {name: host_array(block[slice(*span)].view(self._dtypes[name])) for name, span in self._spans.items()}
        return _HostBuffer(block, fields)


class _HostBuffer:
    """A pinned block with a numpy view of each field."""

    def __init__(self, block: Tensor, fields: dict[str, np.ndarray]) -> None:
        self.block = block
        self.fields = fields


def port_field(name: str) -> str:
    """Return the field name of a module's port, which differs from all fields of attention."""
    return f"port {name}"


def host_array(value: Tensor) -> np.ndarray:
    """Return a host tensor as numpy. numpy has no bfloat16, whose bits are viewed as int16."""
    array: np.ndarray = (value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy()
    return array
