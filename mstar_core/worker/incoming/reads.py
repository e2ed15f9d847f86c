"""Reads of tensors that take time: from another GPU, or from a process of another host. Used by the worker's loop.

Each is begun when its message comes, and taken once it has ended, so that no step waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mstar_core.errors import TransportError
from mstar_core.messages.tensors import TensorRef

if TYPE_CHECKING:
    from torch import Tensor


class TensorReads(Protocol):
    """Reads from one kind of memory. Every method takes tensors for which `reads` is true, and none waits."""

    @property
    def reading(self) -> int:
        """Number of tensors that were begun and neither taken nor dropped."""

    @property
    def must_poll(self) -> bool:
        """Whether reads are under way whose end wakes no mailbox."""

    def reads(self, ref: TensorRef) -> bool:
        """Return whether a tensor is in this memory."""

    def begin(self, ref: TensorRef) -> None:
        """Begin to read a tensor. Raises TransportError if that is impossible."""

    def is_ready(self, ref: TensorRef) -> bool:
        """Return whether a tensor has come, or cannot. One that was dropped counts as ready."""

    def failure(self, ref: TensorRef) -> TransportError | None:
        """Return why a tensor that is ready cannot be taken, None if it can."""

    def take(self, ref: TensorRef) -> Tensor:
        """Return a tensor that has come. Raises TransportError if it has not, or cannot."""

    def drop(self, ref: TensorRef) -> None:
        """Forget a tensor whose request has ended."""


class Incoming:
    """All reads of a worker. Owned by its loop; the executor takes what has come. Implements TensorReads."""

    def __init__(self, kinds: Sequence[TensorReads] = ()) -> None:
        self.kinds = tuple(kinds)

    @property
    def reading(self) -> int:
        return sum(kind.reading for kind in self.kinds)

    @property
    def must_poll(self) -> bool:
        return any(kind.must_poll for kind in self.kinds)

    def reads(self, ref: TensorRef) -> bool:
        return any(kind.reads(ref) for kind in self.kinds)

    def begin(self, ref: TensorRef) -> None:
        self._of(ref).begin(ref)

    def is_ready(self, ref: TensorRef) -> bool:
        return self._of(ref).is_ready(ref)

    def failure(self, ref: TensorRef) -> TransportError | None:
        return self._of(ref).failure(ref)

    def take(self, ref: TensorRef) -> Tensor:
        return self._of(ref).take(ref)

    def drop(self, ref: TensorRef) -> None:
        self._of(ref).drop(ref)

    def _of(self, ref: TensorRef) -> TensorReads:
        kind = next((kind for kind in self.kinds if kind.reads(ref)), None)
        if kind is None:
            raise TransportError("a tensor came from memory that this process does not read", str(type(ref)))
        return kind
