"""Messages that arrive before their request: data of another rank may overtake the conductor's message.

Bounded by count. Messages for ended or never opened requests are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Container
from typing import Final

from mstar_core.engine.base import Handle
from mstar_core.messages.flow import CacheMoved, StreamItems, StreamTensor, Values
from mstar_core.messages.tensors import TensorRef
from mstar_core.messages.wire import Message
from mstar_core.worker.incoming.arrivals import refs_of

MOST_MESSAGES: Final = 4096
MOST_CLOSED: Final = 4096
"""Number of ended requests to remember; late messages arrive within milliseconds of the end."""


class EarlyMessages:
    """Early messages by request. Owned by the worker's loop.

    abandoned: tensors of dropped messages; the loop returns them to their owners.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.abandoned: list[TensorRef] = []
        self._waiting: OrderedDict[int, list[Message]] = OrderedDict()
        self._count = 0
        self._closed: OrderedDict[int, None] = OrderedDict()

    @property
    def handles(self) -> Collection[int]:
        """Requests of waiting messages."""
        return self._waiting.keys()

    def keep(self, handle: int, message: Message, known: Container[Handle]) -> bool:
        """Keep or drop a message of an unknown request. Returns False if the request is known."""
        if Handle(handle) in known:
            return False
        if handle in self._closed:
            self._drop([message])
            return True
        self._waiting.setdefault(handle, []).append(message)
        self._count += 1
        while self._count > MOST_MESSAGES:
            _, lost = self._waiting.popitem(last=False)
            self._count -= len(lost)
            self._drop(lost)
        return True

    def sift(self, message: StreamItems, known: Container[Handle]) -> StreamItems:
        """Return the items of known requests and keep the others."""
        if all(Handle(handle) in known for handle in message.handles):
            return message
        handles: list[int] = []
        index: list[int] = []
        ids: list[int] = []
        for h, i, value in zip(message.handles, message.index, message.ids, strict=True):
            if not self.keep(h, StreamItems(stream=message.stream, handles=[h], index=[i], ids=[value]), known):
                handles.append(h)
                index.append(i)
                ids.append(value)
        return StreamItems(stream=message.stream, handles=handles, index=index, ids=ids, sent=message.sent)

    def take(self, handle: int) -> list[Message]:
        """Return the early messages of a request in order and drop them."""
        taken = self._waiting.pop(handle, [])
        self._count -= len(taken)
        return taken

    def closed(self, handle: int) -> None:
        """Drop all messages of a request that ended, present and future."""
        self._drop(self.take(handle))
        self._closed[handle] = None
        while len(self._closed) > MOST_CLOSED:
            self._closed.popitem(last=False)

    def clear(self) -> None:
        """Drop all messages, and later ones of their requests."""
        for handle in list(self._waiting):
            self.closed(handle)

    def _drop(self, messages: list[Message]) -> None:
        self.dropped += len(messages)
        for message in messages:
            match message:
                case StreamTensor(ref=ref):
                    self.abandoned.append(ref)
                case CacheMoved():
                    self.abandoned += refs_of(message)
                case Values(items=items):
                    self.abandoned += [item.ref for item in items if item.ref is not None]
