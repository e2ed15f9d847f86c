"""Moments in the order of a device's work, between which its time is measured. Used by the engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch


class Mark(Protocol):
    """A moment in the order of the device's work."""

    @property
    def is_passed(self) -> bool: ...

    def seconds_until(self, later: Mark) -> float:
        """Return the device seconds between two marks that have passed."""


class HostMark:
    """A mark on a device that computes while the host waits."""

    is_passed: Final = True

    def __init__(self, clock: Callable[[], float]) -> None:
        self.at = clock()

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, HostMark)
        return later.at - self.at


class CudaMark:
    """A CUDA event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    @property
    def is_passed(self) -> bool:
        return bool(self._event.query())

    def seconds_until(self, later: Mark) -> float:
        assert isinstance(later, CudaMark)
        return float(self._event.elapsed_time(later._event)) / 1e3


def marks_of(device: torch.device, clock: Callable[[], float]) -> Callable[[], Mark]:
    """Return the function that makes marks on a device."""
    return CudaMark if device.type == "cuda" else lambda: HostMark(clock)
