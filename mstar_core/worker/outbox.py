"""Outgoing messages of a worker: one message per turn and destination, sent in order."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import torch

from mstar_core.errors import ArenaFull, MstarError
from mstar_core.messages.flow import (
    CacheMoved,
    Drawn,
    Output,
    Outputs,
    Playing,
    Saved,
    StreamItems,
    StreamTensor,
    TensorFreed,
    Value,
    Values,
)
from mstar_core.messages.names import API, CONDUCTOR, worker_name
from mstar_core.messages.requests import ErrorInfo, RequestFinished, SavedLoop, error_info
from mstar_core.messages.tensors import TensorRef
from mstar_core.messages.wire import Message, Sender
from mstar_core.messages.work import Move, WalkDone, WorkFailed
from mstar_core.transport.message_parts import PART_BYTES, in_parts, inline_bytes
from mstar_core.transport.shm import TensorTransport
from mstar_core.transport.tensors import inline, loan_of
from mstar_core.worker.arrays import PendingCopy, start_copy, to_array
from mstar_core.worker.incoming.arrivals import handles_of, refs_of
from mstar_core.worker.incoming.reads import Incoming, TensorReads
from mstar_core.worker.journal import PendingDraws
from mstar_core.worker.peer_memory.transport import OutgoingTensor, PeerMemory

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import CacheState

log = logging.getLogger(__name__)

INLINE_IF_FULL: Final = 4 << 20
"""Largest tensor that goes inside its message while shared memory is full, so that streams go on."""

M = TypeVar("M")

Sending = PendingCopy | OutgoingTensor
"""A copy that a message waits for: to the host, or into memory that another worker reads."""


class _CacheToSend(NamedTuple):
    """A cache that leaves. parts: its tensors by field and name, or the copies to wait for."""

    message: partial[CacheMoved]
    parts: list[tuple[str, str, Tensor | Sending]]


class _Saving(NamedTuple):
    """State of a loop on its way to the api: its carried values by input port, or the copies to wait for."""

    handle: int
    place: str
    iteration: int
    values: dict[str, Tensor | PendingCopy]

    @property
    def is_ready(self) -> bool:
        return all(isinstance(value, torch.Tensor) or value.is_done for value in self.values.values())


@dataclass(slots=True)
class _Turn:
    """Messages of one turn, those with an unfinished copy without their tensor. copies: all unfinished copies."""

    outputs: list[Output | tuple[partial[Output], Sending]] = field(default_factory=list)
    finished: list[RequestFinished] = field(default_factory=list)
    ids: defaultdict[tuple[int, str], tuple[list[int], list[int], list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], [], []))
    )
    playing: defaultdict[int, tuple[list[int], list[float], list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], [], []))
    )
    values: defaultdict[int, list[Value | tuple[partial[Value], Sending]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    control: list[tuple[str, Message | tuple[partial[Any], Sending]]] = field(default_factory=list)
    caches: list[tuple[int, _CacheToSend]] = field(default_factory=list)
    copies: list[Sending] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    saved: list[_Saving] = field(default_factory=list)

    def __bool__(self) -> bool:
        has_data = self.outputs or self.finished or self.ids or self.values or self.caches or self.playing
        return bool(has_data or self.control or self.drawn or self.saved)

    @property
    def handles(self) -> set[int]:
        """Requests of its messages."""
        entries: list[Any] = [*self.outputs, *self.finished, *(item for _, item in self.control)]
        entries += [value for values in self.values.values() for value in values]
        entries += [(cache.message, None) for _, cache in self.caches]
        of_ids = (handles for handles, _, _ in self.ids.values())
        return {_handle(entry) for entry in entries}.union(*of_ids)

    @property
    def is_ready(self) -> bool:
        return all(copy.is_done for copy in self.copies)


class Outbox:
    """Collects the messages of a turn and sends them. Owned by the worker's loop.

    Tensors on a GPU are copied while the worker goes on. A turn leaves when its copies are done, and later turns leave
    after it, so that messages keep their order. Only saved states delay no turn: each joins one when its copy is done.
    Loans are returned at once: a peer may wait for their room.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        courier: Sender,
        transport: TensorTransport,
        copy: Callable[[Tensor], PendingCopy | None] = start_copy,
        peer_memory: PeerMemory | None = None,
        incoming: TensorReads | None = None,
        is_elsewhere: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """copy: starts the copy of a tensor to the host; returns None for a tensor that is there.

        peer_memory: takes tensors to other workers past shared memory; None without. incoming: reads of tensors that
        others lend. is_elsewhere: whether a receiver is on another host, where times of this host's clock mean nothing.
        """
        self.sent_outputs = 0
        self.journal = PendingDraws()
        self._name = name
        self._rank = rank
        self._courier = courier
        self._transport = transport
        self._copy = copy
        self._peer_memory = peer_memory
        self._incoming = Incoming() if incoming is None else incoming
        self._is_elsewhere = is_elsewhere
        self._turn = _Turn()
        self._waiting: deque[_Turn] = deque()
        self._saving: list[_Saving] = []
        self._freed: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)

    def output(
        self, handle: int, seq: int, port: str, modality: str, tensor: Tensor, meta: dict[str, Any], skipped: int = 0
    ) -> None:
        """Send a value to the client. skipped: units of the port that were left out before it."""
        copy = self._copy(tensor)
        message = partial(Output, handle=handle, seq=seq, port=port, modality=modality, meta=meta, skipped=skipped)
        if copy is None:
            self._turn.outputs.append(message(ref=self._put(tensor, API)))
            return
        self._turn.copies.append(copy)
        self._turn.outputs.append((message, copy))

    def value(
        self, rank: int, handle: int, run: int, task: int, port: str, iteration: list[int], tensor: Tensor | None
    ) -> None:
        """Send a task's value to another rank. None means that the port was not produced."""
        message = partial(Value, handle=handle, run=run, task=task, port=port, iteration=iteration)
        value = message(ref=None) if tensor is None else self._with_tensor(message, tensor, worker_name(rank))
        self._turn.values[rank].append(value)

    def stream_id(self, rank: int, stream: str, handle: int, index: int, value: int) -> None:
        """Put one id on a stream whose consumer is on another rank."""
        handles, indices, ids = self._turn.ids[rank, stream]
        handles.append(handle)
        indices.append(index)
        ids.append(value)

    def playing(self, rank: int, handle: int, ahead_s: float, needed_s: float) -> None:
        """Tell another rank of a request about its playback, see `Playing`."""
        handles, ahead, needed = self._turn.playing[rank]
        handles.append(handle)
        ahead.append(ahead_s)
        needed.append(needed_s)

    def stream_tensor(
        self, rank: int, stream: str, handle: int, index: int, tensor: Tensor, *, is_dry: bool = False
    ) -> None:
        """Put one tensor item on a stream whose consumer is on another rank. is_dry: see StreamTensor."""
        name = worker_name(rank)
        sent = self._sent(name)
        message: partial[Any] = partial(
            StreamTensor, stream=stream, handle=handle, index=index, sent=sent, is_dry=is_dry
        )
        self._turn.control.append((name, self._with_tensor(message, tensor, name)))

    def cache(
        self, move: Move, handle: int, run: int, state: CacheState, held: Mapping[str, Tensor], streamed: dict[str, int]
    ) -> None:
        """Send a cache to the rank of `move`, whose run waits for it.

        held: last values of output ports. streamed: items on split streams.
        """
        message = partial(
            CacheMoved,
            handle=handle,
            run=run,
            source=self._rank,
            streamed=streamed,
            node=move.node,
            branch=move.branch,
            length=state.length,
            position=state.position,
            last=state.last,
            drawn=state.drawn,
        )
        values = [("pages", "", pages) for pages in state.pages] + [("history", "", state.history)]
        values += [("values", port, value) for port, value in state.last_values.items()]
        values += [("held", port, value) for port, value in held.items()]
        marks = {"seen": state.seen, "counts": state.counts, "answer": state.answer}
        values += [(name, "", value) for name, value in marks.items() if value is not None]
        parts: list[tuple[str, str, Tensor | Sending]] = []
        for field_name, port, value in values:
            copy = self._start(value, worker_name(move.rank))
            parts.append((field_name, port, value if copy is None else copy))
            self._turn.copies += [] if copy is None else [copy]
        self._turn.caches.append((move.rank, _CacheToSend(message, parts)))

    def saved(self, handle: int, place: str, iteration: int, values: Mapping[str, Tensor]) -> None:
        """Send the state of a loop before an iteration to the api."""
        copies = {port: self._copy(value) or value for port, value in values.items()}
        self._saving.append(_Saving(handle, place, iteration, copies))

    def walk_done(self, message: WalkDone) -> None:
        """Report the end of this rank's share of a run."""
        self._turn.control.append((CONDUCTOR, message))

    def finished(self, handle: int, emitted: int, counts: Mapping[str, int], cached_tokens: int) -> None:
        """Report the end of a request that ran on this rank alone to the api, together with its last outputs."""
        sent = {self._name: emitted} if emitted else {}
        self._turn.finished.append(
            RequestFinished(
                handle=handle, reason="stop", emitted=sent, counts=dict(counts), cached_tokens=cached_tokens
            )
        )

    def failed(self, handle: int, error: ErrorInfo) -> None:
        """Report that a request failed on this rank."""
        self._turn.control.append((CONDUCTOR, WorkFailed(handle=handle, rank=self._rank, error=error)))

    def read(self, ref: TensorRef) -> None:
        """Return a tensor that was copied out to its owner."""
        loan = loan_of(ref)
        if loan is not None and self._incoming.reads(ref):
            self._incoming.drop(ref)
        if loan is not None:
            self._freed[loan.owner].append((loan.slot, loan.generation))

    @property
    def is_waiting(self) -> bool:
        """Whether messages wait for copies from a GPU."""
        return bool(self._waiting or self._saving)

    @property
    def can_send(self) -> bool:
        """Whether waiting messages could leave now."""
        is_next_ready = bool(self._waiting) and self._waiting[0].is_ready
        return is_next_ready or any(saving.is_ready for saving in self._saving)

    def flush(self) -> None:
        """End the turn and send its messages, or queue them behind those that wait for copies."""
        if self._freed:
            freed, self._freed = self._freed, defaultdict(list)
            for owner, slots in freed.items():
                self._send(owner, TensorFreed(slots=slots))
        self._end_turn()
        while self._waiting and self._waiting[0].is_ready:
            self._send_turn(self._waiting.popleft())
            self._end_turn()  # reports of the requests whose messages could not be sent

    def _end_turn(self) -> None:
        if self._saving:
            self._turn.saved = [saving for saving in self._saving if saving.is_ready]
            self._saving = [saving for saving in self._saving if not saving.is_ready]
        if self.journal.is_waiting and (self._turn or not self.journal.wait_s):
            self._turn.drawn = self.journal.take(self._turn.handles if self.journal.wait_s else None)
        if self._turn:
            self._waiting.append(self._turn)
            self._turn = _Turn()

    def _send_turn(self, turn: _Turn) -> None:
        """Send values first, so that no control message overtakes the data that it refers to."""
        outputs = self._complete(turn.outputs, API)
        without_outputs: set[int] = set()  # the conductor would take those for finished
        saved = list(self._with_values(turn.saved))
        if outputs or turn.finished or turn.drawn or saved:
            self.sent_outputs += len(outputs)
            first, *others = in_parts(outputs, lambda output: inline_bytes(output.ref))
            states, *more = in_parts(saved, _inline_bytes)
            messages = [Outputs(worker=self._name, items=first, drawn=turn.drawn, saved=states)]
            messages += [Outputs(worker=self._name, items=part) for part in others]
            messages += [Outputs(worker=self._name, items=[], saved=part) for part in more]
            messages[-1] = msgspec.structs.replace(messages[-1], finished=turn.finished)
            for message in messages:
                if not self._send(API, message):
                    without_outputs.update(_handles(message))
        for (rank, stream), (handles, indices, ids) in turn.ids.items():
            name = worker_name(rank)
            sent = self._sent(name)
            self._send(name, StreamItems(stream=stream, handles=handles, index=indices, ids=ids, sent=sent))
        for rank, (handles, ahead_s, needed_s) in turn.playing.items():
            self._send(worker_name(rank), Playing(handles=handles, ahead_s=ahead_s, needed_s=needed_s))
        for rank, values in turn.values.items():
            name = worker_name(rank)
            for part in in_parts(self._complete(values, name), lambda value: inline_bytes(value.ref)):
                self._send(name, Values(items=part, sent=self._sent(name)))
        for rank, cache in turn.caches:
            self._send_cache(worker_name(rank), cache)
        for name, item in turn.control:
            entries: list[Message | tuple[partial[Any], Sending]] = [item]
            for message in self._complete(entries, name):
                if _handles(message).isdisjoint(without_outputs) or not isinstance(message, WalkDone):
                    self._send(name, message)

    def _send_cache(self, to: str, cache: _CacheToSend) -> None:
        """Send a cache. Without room for its tensors, its request fails."""
        refs: list[tuple[str, str, TensorRef]] = []
        room = PART_BYTES
        try:
            for field_name, port, part in cache.parts:
                refs.append((field_name, port, self._ref(part, to, room)))
                room -= inline_bytes(refs[-1][2])
        except MstarError as error:
            for loan in filter(None, (loan_of(ref) for _, _, ref in refs)):
                self.release(loan.slot, loan.generation)
            handle = int(cache.message.keywords["handle"])
            self.failed(handle, error_info(error, "the worker could not send a cache"))
            return
        by_field: dict[str, list[tuple[str, TensorRef]]] = defaultdict(list)
        for field_name, port, ref in refs:
            by_field[field_name].append((port, ref))
        message = cache.message(
            pages=[ref for _, ref in by_field["pages"]],
            history=by_field["history"][0][1],
            **{name: by_field[name][0][1] for name in ("seen", "counts", "answer") if name in by_field},
            values=dict(by_field["values"]),
            held=dict(by_field["held"]),
            sent=self._sent(to),
        )
        self._send(to, message)

    def _sent(self, to: str) -> float:
        """Return the time for a message's `sent`."""
        return 0.0 if self._is_elsewhere(to) else monotonic()

    def _with_values(self, states: list[_Saving]) -> Iterator[Saved]:
        """Yield the states of loops with their tensors in the transport. One without room is left out."""
        for state in states:
            refs: dict[str, TensorRef] = {}
            room = PART_BYTES
            try:
                for port, value in state.values.items():
                    array, dtype = to_array(value if isinstance(value, torch.Tensor) else value.pending)
                    put = self._transport.put if array.nbytes <= room else self._transport.lend
                    refs[port] = put(array, API, dtype=dtype)
                    room -= inline_bytes(refs[port])
            except MstarError as error:
                log.info("the state of a loop was not saved: %s", error)
                for loan in filter(None, map(loan_of, refs.values())):
                    self.release(loan.slot, loan.generation)
                continue
            loop = SavedLoop(iteration=state.iteration, values=refs)
            yield Saved(handle=state.handle, place=state.place, loop=loop)

    def _with_tensor(self, message: partial[M], tensor: Tensor, to: str) -> M | tuple[partial[M], Sending]:
        """Return the message with its tensor in the transport, or with the copy to wait for."""
        copy = self._start(tensor, to)
        if copy is None:
            return message(ref=self._put(tensor, to))
        self._turn.copies.append(copy)
        return message, copy

    def _complete(self, entries: list[M | tuple[partial[M], Sending]], to: str) -> list[M]:
        """Return the messages with all tensors in the transport. Without room for a tensor, its request fails."""
        messages: list[M] = []
        for entry in entries:
            if not isinstance(entry, tuple):
                messages.append(entry)
                continue
            message, copy = entry
            try:
                messages.append(message(ref=self._ref(copy, to)))
            except MstarError as error:
                self.failed(int(message.keywords["handle"]), error_info(error, "the worker could not send a value"))
        return messages

    def release(self, slot: int, generation: int) -> None:
        """End a loan that a reader has returned."""
        if self._peer_memory is None or not self._peer_memory.release(slot, generation):
            self._transport.release(slot, generation)

    def _start(self, tensor: Tensor, to: str) -> Sending | None:
        """Start the copy of a tensor to where its receiver reads it; None for one that is on the host."""
        if self._peer_memory is not None and self._peer_memory.suits(tensor, to):
            return self._peer_memory.send(tensor, to)
        return self._copy(tensor)

    def _ref(self, part: Tensor | Sending, to: str, room: int = PART_BYTES) -> TensorRef:
        """Return the handle of a tensor whose copy is done. room: bytes of it that may be inside the message.

        Raises MstarError if it cannot be sent.
        """
        if isinstance(part, OutgoingTensor):
            return part.ref
        return self._put(part if isinstance(part, torch.Tensor) else part.pending, to, room)

    def _put(self, tensor: Tensor, to: str, room: int = PART_BYTES) -> TensorRef:
        array, dtype = to_array(tensor)
        if array.nbytes > room:
            return self._transport.lend(array, to, dtype=dtype)
        try:
            return self._transport.put(array, to, dtype=dtype)
        except ArenaFull:
            if array.nbytes > INLINE_IF_FULL:
                raise
            return inline(array, dtype)

    def _send(self, name: str, message: Message) -> bool:
        """Send a message. The requests of one that cannot be sent fail, and its loans end.

        Returns False if it was not sent. The death of an unknown peer decides about its requests.
        """
        try:
            if self._courier.send(name, message):
                return True
        except MstarError as error:
            log.error("a message to %s was not sent: %s", name, error)
            for handle in sorted(_handles(message)):
                self.failed(handle, error_info(error, "a result of the worker could not be sent"))
        for loan in filter(None, map(loan_of, _refs(message))):
            self.release(loan.slot, loan.generation)
        return False


def _inline_bytes(state: Saved) -> int:
    """Return the bytes of a saved state inside its message."""
    return sum(map(inline_bytes, state.loop.values.values()))


def _handle(entry: Any) -> int:
    """Return the request of a message, or of one that still lacks its tensor."""
    handle: int = entry[0].keywords["handle"] if isinstance(entry, tuple) else entry.handle
    return handle


def _handles(message: Message) -> set[int]:
    """Return the requests that cannot go on without a message."""
    match message:
        case Outputs():
            return {item.handle for item in message.items} | {end.handle for end in message.finished}
        case StreamItems():
            return set(message.handles)
        case WalkDone():
            return {message.handle}
        case _:
            return set(handles_of(message))


def _refs(message: Message) -> Iterator[TensorRef]:
    """Yield the tensors that a message lends."""
    if not isinstance(message, Outputs):
        return refs_of(message)
    saved = (ref for state in message.saved for ref in state.loop.values.values())
    return chain((item.ref for item in message.items), saved)
