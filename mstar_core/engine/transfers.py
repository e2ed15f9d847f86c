"""Copies between host and device that do not block the host, and copies of many small tensors as one.

Used by both engines, the CUDA graphs and the attention backends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

SMALL_BYTES: Final = 1 << 16
"""Largest value that stays on the host until its step. All such values of a step share one copy to the GPU."""

RING_BUFFERS: Final = 3
"""Buffers of a HostRing: two steps in flight and one whose results are being read."""

RING_BYTES: Final = 1 << 19
"""Initial size of a HostRing buffer, so that common steps never allocate."""


def is_small_on_host(value: Tensor) -> bool:
    """Return whether a value stays on the host until its step."""
    return value.is_cpu and value.nbytes <= SMALL_BYTES


def upload(value: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return a value on the device, in stream order. A value that is already there is not copied.

    The copy goes through pinned memory; a copy from pageable memory would block until all earlier work is done.
    torch keeps the pinned block until the copy has read it.
    """
    source = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if source.device.type == "cpu" and device.type == "cuda":
        # Numbers that are expanded to one per token share an element, which pinned memory cannot.
        return source.contiguous().pin_memory().to(device, non_blocking=True)
    return source.to(device)


class HostCopy:
    """An asynchronous copy of a small tensor to the host. Waiting for it does not wait for later launches."""

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = value
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def pending(self) -> Tensor:
        """The host tensor; its content is valid once the copy is done."""
        return self._value

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Wait for the copy and return the host tensor."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


class HostRing:
    """Pinned buffers that take the outputs of one port in turn.

    Allocating pinned memory is slow and may wait for the device. The buffers grow to the largest step and stay.
    """

    def __init__(self) -> None:
        self._buffers = [torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(RING_BUFFERS)]
        self._turn = 0

    def copy(self, value: Tensor) -> Tensor:
        """Start copying a CUDA tensor on the current stream. The next RING_BUFFERS - 1 copies leave it intact."""
        self._turn = (self._turn + 1) % RING_BUFFERS
        count = value.numel() * value.element_size()
        if self._buffers[self._turn].numel() < count:
            size = 1 << (count - 1).bit_length()
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        target = self._buffers[self._turn][:count].view(value.dtype).view(value.shape)
        target.copy_(value, non_blocking=True)
        return target


def join(values: Sequence[Tensor], into: Tensor) -> None:
    """Concatenate values, on host or device, into `into` [n, ...]."""
    if len(values) == 1:
        into.copy_(upload(values[0], into.device))
    elif all(value.device == into.device for value in values):
        torch.cat(list(values), out=into)
    elif all(value.is_cpu for value in values):
        into.copy_(upload(torch.cat(list(values)), into.device))
    else:
        torch.cat([upload(value, into.device) for value in values], out=into)


def gather(values: Sequence[Tensor], into: Tensor) -> None:
    """Stack values of one shape into `into` [n, ...].

    One copy suffices where the values lie evenly spaced in one storage, or are all the same tensor. The shares of a
    batched output, and a value that all candidates start from, do so.
    """
    first, apart = values[0], 0
    if len(values) > 1:
        storage, strides, at = first.untyped_storage().data_ptr(), first.stride(), first.data_ptr()
        apart = values[1].data_ptr() - at
        is_even = (
            apart >= 0
            and apart % first.element_size() == 0
            and all(
                value.data_ptr() == at + number * apart
                and value.stride() == strides
                and value.untyped_storage().data_ptr() == storage
                for number, value in enumerate(values)
            )
        )
        if not is_even:
            torch.stack(list(values), out=into)
            return
    into.copy_(first.as_strided((len(values), *first.shape), (apart // first.element_size(), *first.stride())))


def contiguous_runs(values: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Divide values, in order, into runs that are contiguous in memory.

    Yields the slice of each run and the run as one tensor [count, ...]. A large value is a run of its own: a joint
    copy would only keep the others alive.
    """
    start = 0
    for end in range(1, len(values) + 1):
        if end == len(values) or not _follows(values[end - 1], values[end]):
            first, count = values[start], end - start
            yield slice(start, end), first.as_strided((count, *first.shape), (first.numel(), *first.stride()))
            start = end


def _follows(value: Tensor, after: Tensor) -> bool:
    """Return whether `after` begins in memory where `value`, of the same form, ends."""
    return (
        value.nbytes <= SMALL_BYTES
        and value.data_ptr() + value.nbytes == after.data_ptr()
        and value.shape == after.shape
        and value.dtype is after.dtype
        and value.is_contiguous()
        and after.is_contiguous()
        and value.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    )
