"""Host memory that plans leave from, in turns: none is written again before its copy has read it. Used by `flashinfer`.

A plan's copy waits on the device behind whatever was launched before, a whole flow or prompt; the host is long at the
next plan by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from torch import Tensor

MOST: Final = 4
"""Buffers of one kernel's plans: more are never in flight, unless a step plans several times."""

T = TypeVar("T")


class Mark(Protocol):
    """A place in the device's work; `torch.cuda.Event` is one."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Turns(Generic[T]):
    """Buffers of one wrapper. make: a further one. mark: the device's work so far."""

    def __init__(self, first: T, make: Callable[[], T], mark: Callable[[], Mark]) -> None:
        self._free = [first]
        self._make = make
        self._mark = mark
        self._used: deque[tuple[T, Mark]] = deque()

    def plan(self, write: Callable[[T], None]) -> None:
        """Let `write` fill a buffer and launch the copy from it."""
        buffer = self._next()
        write(buffer)
        self._used.append((buffer, self._mark()))

    def _next(self) -> T:
        while self._used and self._used[0][1].query():
            self._free.append(self._used.popleft()[0])
        if self._free:
            return self._free.pop()
        if len(self._used) < MOST:
            return self._make()
        buffer, mark = self._used.popleft()
        mark.synchronize()
        return buffer


def pinned_turns(first: Tensor) -> Turns[Tensor]:
    """Turns of pinned buffers like `first`, on the current stream."""

    def mark() -> Mark:
        event = torch.cuda.Event()
        event.record()
        return event

    return Turns(first, lambda: torch.empty_like(first, pin_memory=True), mark)
