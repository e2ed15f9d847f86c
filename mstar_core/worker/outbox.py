"""What a step sends: one message per step and destination. Flushed by the worker at the end of each turn."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from mstar_core.errors import MstarError
from mstar_core.messages.flow import Output, Outputs, StreamItems, StreamTensor, TensorFreed, Value, Values
from mstar_core.messages.names import API, CONDUCTOR, worker_name
from mstar_core.messages.requests import ErrorInfo, RequestFinished
from mstar_core.messages.tensors import TensorRef
from mstar_core.messages.wire import Message, Sender
from mstar_core.messages.work import WalkDone, WorkFailed
from mstar_core.transport import TensorTransport, loan_of
from mstar_core.worker.arrays import to_array

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class Outbox:
    """Collects what a turn produced and sends it. Owned by the worker's loop."""

    def __init__(self, name: str, rank: int, courier: Sender, transport: TensorTransport) -> None:
        self.sent_outputs = 0
        self._name = name
        self._rank = rank
        self._courier = courier
        self._transport = transport
        self._outputs: list[Output] = []
        self._finished: list[RequestFinished] = []
        self._values: defaultdict[int, list[Value]] = defaultdict(list)
        self._ids: defaultdict[tuple[int, str], tuple[list[int], list[int], list[int]]] = defaultdict(
            lambda: ([], [], [])
        )
        self._freed: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._control: list[tuple[str, Message]] = []

    def output(self, handle: int, seq: int, port: str, modality: str, tensor: Tensor, meta: dict[str, Any]) -> None:
        """A value for the client."""
        ref = self._put(tensor, API)
        self._outputs.append(Output(handle=handle, seq=seq, port=port, modality=modality, ref=ref, meta=meta))

    def value(
        self, rank: int, handle: int, run: int, task: int, port: str, iteration: list[int], tensor: Tensor | None
    ) -> None:
        """A task's value for another rank; None says that the port was not produced."""
        ref = None if tensor is None else self._put(tensor, worker_name(rank))
        self._values[rank].append(Value(handle=handle, run=run, task=task, port=port, iteration=iteration, ref=ref))

    def stream_id(self, rank: int, stream: str, handle: int, index: int, value: int) -> None:
        """One id on a stream whose consumer is on another rank."""
        handles, indices, ids = self._ids[rank, stream]
        handles.append(handle)
        indices.append(index)
        ids.append(value)

    def stream_tensor(self, rank: int, stream: str, handle: int, index: int, tensor: Tensor) -> None:
        """One tensor item on a stream whose consumer is on another rank."""
        name = worker_name(rank)
        message = StreamTensor(stream=stream, handle=handle, index=index, ref=self._put(tensor, name), sent=monotonic())
        self._control.append((name, message))

    def walk_done(self, message: WalkDone) -> None:
        """This rank's share of a run ended."""
        self._control.append((CONDUCTOR, message))

    def finished(self, handle: int, emitted: int, counts: Mapping[str, int], cached_tokens: int) -> None:
        """The request ended, all of it here: the api hears of it with the last outputs, not from the conductor."""
        sent = {self._name: emitted} if emitted else {}
        news = RequestFinished(
            handle=handle, reason="stop", emitted=sent, counts=dict(counts), cached_tokens=cached_tokens
        )
        self._finished.append(news)

    def failed(self, handle: int, error: ErrorInfo) -> None:
        """The request failed here."""
        self._control.append((CONDUCTOR, WorkFailed(handle=handle, rank=self._rank, error=error)))

    def read(self, ref: TensorRef) -> None:
        """A tensor was copied out; its owner may reuse the place."""
        loan = loan_of(ref)
        if loan is not None:
            self._freed[loan.owner].append((loan.slot, loan.generation))

    def flush(self) -> None:
        """Send everything: values first, so that no control message overtakes the data that it speaks of."""
        if self._outputs or self._finished:
            self.sent_outputs += len(self._outputs)
            self._send(API, Outputs(worker=self._name, items=self._outputs, finished=self._finished))
            self._outputs, self._finished = [], []
        sent = monotonic() if self._ids or self._values else 0.0
        for (rank, stream), (handles, indices, ids) in self._ids.items():
            news = StreamItems(stream=stream, handles=handles, index=indices, ids=ids, sent=sent)
            self._send(worker_name(rank), news)
        for rank, items in self._values.items():
            self._send(worker_name(rank), Values(items=items, sent=sent))
        for name, message in self._control:
            self._send(name, message)
        for owner, slots in self._freed.items():
            self._send(owner, TensorFreed(slots=slots))
        self._ids.clear()
        self._values.clear()
        self._control.clear()
        self._freed.clear()

    def _put(self, tensor: Tensor, to: str) -> TensorRef:
        array, dtype = to_array(tensor)
        return self._transport.put(array, to, dtype=dtype)

    def _send(self, name: str, message: Message) -> None:
        try:
            self._courier.send(name, message)
        except MstarError as error:
            # The peer's death notice or the deadline decides its requests; the loop goes on.
            log.error("a message to %s was not sent: %s", name, error)
