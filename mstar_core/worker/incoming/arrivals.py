"""Messages whose tensors are still being read from another GPU or host. Used by the worker's loop.

Values and stream items of one sender keep their order, so a message waits for those before it. A cache waits alone, and
is not read while too many caches that were read wait for pages, because they take memory beside the pools.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from mstar_core.errors import TransportError
from mstar_core.messages.flow import CacheMoved, StreamItems, StreamTensor, Values
from mstar_core.messages.tensors import InlineTensor, TensorRef
from mstar_core.messages.wire import Message
from mstar_core.worker.incoming.reads import TensorReads

ORDERED: Final = (Values, StreamItems, StreamTensor)

CACHE_BYTES: Final = 1 << 30
"""Most bytes of caches that are read ahead of their pages. Others stay with their senders; one is always read."""


class Arrival(NamedTuple):
    """A message that is complete, or whose tensors cannot be read."""

    sender: str
    message: Message
    error: TransportError | None = None


@dataclass(slots=True)
class _WaitingCache:
    """A cache that waits. has_begun: whether its tensors are being read."""

    sender: str
    message: Message
    refs: list[TensorRef]
    has_begun: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(ref.size_bytes for ref in self.refs if not isinstance(ref, InlineTensor))


class Arrivals:
    """Messages that wait for their tensors. Owned by the worker's loop."""

    def __init__(
        self, reads: TensorReads, importing: Callable[[], int] = lambda: 0, cache_bytes: int = CACHE_BYTES
    ) -> None:
        """importing: returns the bytes of caches that were read and have no pages yet."""
        self._reads = reads
        self._importing = importing
        self._cache_bytes = cache_bytes
        self._ordered: dict[str, deque[tuple[Message, list[TensorRef]]]] = {}
        self._caches: list[_WaitingCache] = []

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
        refs = [ref for ref in refs_of(message) if self._reads.reads(ref)]
        if not refs and (not is_ordered or sender not in self._ordered):
            return False
        if is_ordered:
            for ref in refs:
                self._reads.begin(ref)
            self._ordered.setdefault(sender, deque()).append((message, refs))
        else:
            self._caches.append(_WaitingCache(sender, message, refs))
        return True

    @property
    def has_ready(self) -> bool:
        """Whether a message has all its tensors."""
        return any(self._are_ready(queue[0][1]) for queue in self._ordered.values()) or any(
            cache.has_begun and self._are_ready(cache.refs) for cache in self._caches
        )

    def take(self) -> Iterator[Arrival]:
        """Yield the messages that are complete, and those that cannot be. Begins to read caches that fit now."""
        for sender, queue in list(self._ordered.items()):
            while queue and self._are_ready(queue[0][1]):
                message, refs = queue.popleft()
                yield Arrival(sender, message, self._failure(refs))
            if not queue:
                del self._ordered[sender]
        yield from self._begin_caches()
        for cache in [waiting for waiting in self._caches if waiting.has_begun and self._are_ready(waiting.refs)]:
            self._caches.remove(cache)
            yield Arrival(cache.sender, cache.message, self._failure(cache.refs))

    def _begin_caches(self) -> Iterator[Arrival]:
        """Begin to read caches in order while they fit, and yield those that cannot be read."""
        waiting = [cache for cache in self._caches if not cache.has_begun]
        if not waiting:
            return
        taken = self._importing() + sum(cache.size_bytes for cache in self._caches if cache.has_begun)
        for cache in waiting:
            if taken and taken + cache.size_bytes > self._cache_bytes:
                return
            taken += cache.size_bytes
            cache.has_begun = True
            try:
                for ref in cache.refs:
                    self._reads.begin(ref)
            except TransportError as error:
                self._caches.remove(cache)
                yield Arrival(cache.sender, cache.message, error)

    def _are_ready(self, refs: list[TensorRef]) -> bool:
        return all(self._reads.is_ready(ref) for ref in refs)

    def _failure(self, refs: list[TensorRef]) -> TransportError | None:
        return next((error for ref in refs if (error := self._reads.failure(ref)) is not None), None)


def refs_of(message: Message) -> Iterator[TensorRef]:
    """Yield the tensors of a message between workers."""
    match message:
        case Values(items=items):
            yield from (item.ref for item in items if item.ref is not None)
        case StreamTensor(ref=ref):
            yield ref
        case CacheMoved():
            yield from (message.history, *message.pages, *message.values.values(), *message.held.values())
            yield from (marks for marks in (message.seen, message.counts, message.answer) if marks is not None)
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
