"""Messages whose tensors are still being read from another GPU. Used by the worker's loop.

Values and stream items of one sender keep their order, so a message waits for those before it. A cache waits alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from mstar_core.messages.flow import CacheMoved, StreamItems, StreamTensor, Values
from mstar_core.messages.tensors import CudaTensor, TensorRef
from mstar_core.messages.wire import Message
from mstar_core.worker.moves import tensors_of
from mstar_core.worker.peer_memory.transport import PeerMemory

ORDERED: Final = (Values, StreamItems, StreamTensor)


class Arrivals:
    """Messages that wait for their tensors. Owned by the worker's loop."""

    def __init__(self, memory: PeerMemory) -> None:
        self._memory = memory
        self._ordered: dict[str, deque[tuple[Message, list[CudaTensor]]]] = {}
        self._caches: list[tuple[str, Message, list[CudaTensor]]] = []

    @property
    def is_waiting(self) -> bool:
        """Whether a message waits."""
        return bool(self._ordered or self._caches)

    def hold(self, sender: str, message: Message) -> bool:
        """Begin to read a message's tensors. Returns whether the message waits, for them or behind others.

        Raises TransportError if a tensor cannot be read.
        """
        is_ordered = isinstance(message, ORDERED)
        if not is_ordered and not isinstance(message, CacheMoved):
            return False
        refs = [ref for ref in refs_of(message) if isinstance(ref, CudaTensor)]
        if not refs and (not is_ordered or sender not in self._ordered):
            return False
        for ref in refs:
            self._memory.begin(ref)
        if is_ordered:
            self._ordered.setdefault(sender, deque()).append((message, refs))
        else:
            self._caches.append((sender, message, refs))
        return True

    @property
    def has_ready(self) -> bool:
        """Whether a message has all its tensors."""
        return any(self._are_ready(queue[0][1]) for queue in self._ordered.values()) or any(
            self._are_ready(refs) for _, _, refs in self._caches
        )

    def take(self) -> Iterator[tuple[str, Message]]:
        """Yield the senders and messages that are complete."""
        for sender, queue in list(self._ordered.items()):
            while queue and self._are_ready(queue[0][1]):
                yield sender, queue.popleft()[0]
            if not queue:
                del self._ordered[sender]
        ready = [entry for entry in self._caches if self._are_ready(entry[2])]
        for entry in ready:
            self._caches.remove(entry)
            yield entry[0], entry[1]

    def _are_ready(self, refs: list[CudaTensor]) -> bool:
        return all(self._memory.is_ready(ref) for ref in refs)


def refs_of(message: Message) -> Iterator[TensorRef]:
    """Yield the tensors of a message between workers."""
    match message:
        case Values(items=items):
            yield from (item.ref for item in items if item.ref is not None)
        case StreamTensor(ref=ref):
            yield ref
        case CacheMoved():
            yield from tensors_of(message)
        case _:
            pass


def handles_of(message: Message) -> Iterator[int]:
    """Yield the requests of a message between workers."""
    match message:
        case Values(items=items):
            yield from (item.handle for item in items)
        case StreamTensor(handle=handle) | CacheMoved(handle=handle):
            yield handle
        case _:
            pass
