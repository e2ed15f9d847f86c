"""Streams of a worker's requests: sends items to the rank of their consumer, hands chunks to waiting walks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mstar_core.graph.declare.streams import Chunk, LeftContext, SlidingWindow, Stream
from mstar_core.plugin.spec import ModelSpec
from mstar_core.worker.outbox import Outbox
from mstar_core.worker.state.request import WaitingChunk, WorkerRequest
from mstar_core.worker.state.stream_inbox import StreamInbox

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Handle

Deliver = Callable[[WorkerRequest, WaitingChunk, StreamInbox, "tuple[Chunk, Tensor] | None"], None]
"""Called with the next chunk of a stream for a waiting walk, or None after its end."""


class Streams:
    """Streams of all requests. Owned by the executor; each request owns its buffers.

    held: requests and streams with items that may be handed over early, see `LeftContext.early`.
    """

    def __init__(self, spec: ModelSpec, rank: int, outbox: Outbox, deliver: Deliver) -> None:
        self._rank = rank
        self._outbox = outbox
        self._deliver = deliver
        self._streams = {stream.name: stream for stream in spec.streams}
        self.held: dict[tuple[Handle, str], WorkerRequest] = {}
        self._of_ids = {stream.name for stream in spec.streams if _takes_ids(stream)}

    def put(self, request: WorkerRequest, stream: Stream, tensor: Tensor, *, is_dry: bool = False) -> None:
        """Put a value on a stream: as single ids if the consumer takes ids of shape [n], else as one item.

        is_dry: the value's producer waits for an item of its own stream.
        """
        if stream.name in self._of_ids:
            for value in tensor.reshape(-1).tolist():
                self.put_id(request, stream, int(value))
            return
        rank = request.homes.get(stream.into[0].name)
        if rank is None:
            return
        if rank == self._rank and stream.name in request.split_streams:
            inbox = self.inbox(request, stream.name)
            inbox.put_tensor(_count(request, stream), tensor)
            inbox.is_dry = is_dry
            self.serve(request, stream.name)
        elif rank == self._rank:
            inbox = self.inbox(request, stream.name)
            request.produced.add(stream.name)
            inbox.put_tensor(inbox.received, tensor)
            inbox.is_dry = is_dry
            self.serve(request, stream.name)
        else:
            index = _count(request, stream)
            self._outbox.stream_tensor(rank, stream.name, request.handle, index, tensor, is_dry=is_dry)

    def put_id(self, request: WorkerRequest, stream: Stream, value: int) -> None:
        """Put one id on a stream."""
        rank = request.homes.get(stream.into[0].name)
        if rank is None:
            return  # the request does not use the consumer's partition
        if rank == self._rank and stream.name in request.split_streams:
            if self.inbox(request, stream.name).put_id(_count(request, stream), value):
                self.serve(request, stream.name)
        elif rank == self._rank:
            request.produced.add(stream.name)
            if self.inbox(request, stream.name).take_id(value):
                self.serve(request, stream.name)
        else:
            self._outbox.stream_id(rank, stream.name, request.handle, _count(request, stream), value)

    def local_inbox(self, request: WorkerRequest, stream: Stream) -> StreamInbox | None:
        """Return the buffer of a stream of ids whose consumer and only producer are on this rank, else None."""
        if stream.name not in self._of_ids or request.homes.get(stream.into[0].name) != self._rank:
            return None
        if stream.name in request.split_streams:
            return None
        request.produced.add(stream.name)
        return self.inbox(request, stream.name)

    def feed(self, request: WorkerRequest, name: str, takes: Callable[[Sequence[int], bool], None]) -> None:
        """Give a loop in the engine all ids of a stream as they come. takes: called with new ids, and the end."""
        self.inbox(request, name).feed(takes)

    def end_feed(self, request: WorkerRequest, name: str, count: int) -> None:
        """Take note that a loop in the engine has ended after `count` iterations. A later walk gets the other ids."""
        self.inbox(request, name).end_feed(count)

    def inbox(self, request: WorkerRequest, name: str) -> StreamInbox:
        """Return the consumer's buffer of a stream."""
        inbox = request.inboxes.get(name)
        if inbox is None:
            stream = self._streams[name]
            flush = stream.flush_if is not None and bool(request.params.get(stream.flush_if, False))
            chunk = stream.chunk
            policy = chunk.for_request(request.params) if isinstance(chunk, LeftContext | SlidingWindow) else chunk
            inbox = request.inboxes[name] = StreamInbox(
                stream, policy, flush=flush, is_split=name in request.split_streams
            )
        return inbox

    def serve(self, request: WorkerRequest, name: str, *, is_early: bool = False) -> None:
        """Hand the waiting walk its next chunk, or the end of the stream; a loop in the engine gets all new ids.

        is_early: a chunk may have fewer items than are due.
        """
        if self.held:
            self.held.pop((request.handle, name), None)
        if name not in request.waiting:
            if name in request.inboxes:
                request.inboxes[name].hand_over()
            return
        inbox = self.inbox(request, name)
        while (waiting := request.waiting.get(name)) is not None:  # a walk that leaves chunks out waits again at once
            popped = inbox.pop(is_early=is_early)
            if popped is None and not inbox.is_finished:
                if inbox.has_early:
                    self.held[request.handle, name] = request
                return
            del request.waiting[name]
            self._deliver(request, waiting, inbox, popped)


def sent_items(request: WorkerRequest) -> dict[str, int]:
    """Return the number of items that this rank has put on each stream.

    Of a stream with producers on several ranks, those that earlier ranks have put count too.
    """
    return {**request.streamed, **{name: request.inboxes[name].received for name in request.produced}}


def _takes_ids(stream: Stream) -> bool:
    """Whether items are single ids: the consumer's port is int64 of shape [n]."""
    node, port = stream.into
    kind = node.port(port)
    return kind.dtype == "i64" and len(kind.shape) == 1


def _count(request: WorkerRequest, stream: Stream) -> int:
    index = request.streamed.get(stream.name, 0)
    request.streamed[stream.name] = index + 1
    return index
