"""Fake api of the in-process runtime: checks and preprocesses requests, collects outputs and encodes them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mstar_core.api.output.encode import EncodedChunk
from mstar_core.api.output.units import OutputItem
from mstar_core.api.parse.params import check_outputs
from mstar_core.conformance.mailbox import FakeMailbox
from mstar_core.errors import EngineError
from mstar_core.messages.flow import Drawn, Output, Outputs, Saved, TensorFreed
from mstar_core.messages.names import CONDUCTOR
from mstar_core.messages.requests import (
    CancelRequest,
    ErrorInfo,
    GrowingInput,
    MoreInput,
    NewRequest,
    RequestFailed,
    RequestFinished,
    Resume,
    SavedLoop,
    SegmentRef,
)
from mstar_core.messages.tensors import ShmTensor, TensorRef
from mstar_core.plugin.chat.turns import Turn
from mstar_core.plugin.params import parse_params
from mstar_core.plugin.processor import Inputs, MediaPart, Processor, PromptRequest
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import EVENTS, PROGRESS
from mstar_core.transport.tensors import inline

if TYPE_CHECKING:
    from mstar_core.transport.dtypes import Array
    from mstar_core.transport.shm import TensorTransport

DEADLINE_S = 600.0
NUMBERS = ("action", "scalar", "tensor", "embedding", PROGRESS)
"""Modalities that are sent as the raw bytes of their arrays."""


Status = Literal["finished", "failed", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """Result of a request. outputs: all bytes by modality. reason: `stop` or `length` if it finished.

    counts: of loops and ports, over all walks. error: cause of a failure. drawn: the journal, by place, and widths: ids
    of one iteration there. skipped: units by port that workers left out. saved: states of loops by place, in order.
    """

    status: Status
    outputs: Mapping[str, bytes]
    chunks: tuple[EncodedChunk, ...]
    items: tuple[OutputItem, ...]
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    error: ErrorInfo | None = None
    drawn: Mapping[str, list[int]] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[str, Sequence[SavedLoop]] = field(default_factory=dict)

    @property
    def cause(self) -> str:
        """Cause of the failure in one line."""
        if self.error is None:
            return ""
        return f"{self.error.message}: {self.error.detail}" if self.error.detail else self.error.message

    def of(self, port: str) -> list[Array]:
        """Return the values of one port, in order."""
        return [item.array for item in self.items if item.port == port]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One request as a client sends it. outputs: modalities; by default text, else the model's first.

    is_journaled, resume, growing: as the api sends them, see NewRequest. texts, turns, reads_windows, is_open, ids: see
    PromptRequest.
    """

    text: str | None = None
    texts: Sequence[str] = ()
    turns: Sequence[Turn] = ()
    reads_windows: bool = False
    media: Sequence[MediaPart] = ()
    order: Sequence[tuple[str, int]] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    seed: int = 7
    deadline_s: float = DEADLINE_S
    name: str = ""
    is_journaled: bool = False
    resume: Resume | None = None
    is_open: bool = False
    ids: Sequence[int] = ()
    growing: Mapping[str, GrowingInput] = field(default_factory=dict)


@dataclass(slots=True)
class SentRequest:
    """A request in flight. Owned by the fake api, which sets `outcome` at its end."""

    handle: int
    ask: SampleRequest
    lent: list[TensorRef] = field(default_factory=list)
    items: list[OutputItem] = field(default_factory=list)
    early: dict[tuple[str, int], OutputItem] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    drawn: dict[str, list[int]] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    saved: dict[str, list[SavedLoop]] = field(default_factory=dict)
    finished: RequestFinished | None = None
    outcome: RequestOutcome | None = None

    @property
    def is_over(self) -> bool:
        return self.outcome is not None


class FakeApi:
    """Client side of the in-process runtime. Owns all its requests.

    salt, session, reads_only: of the requests that are sent from now on, see `NewRequest`.
    """

    def __init__(
        self, spec: ModelSpec, processor: Processor, box: FakeMailbox, transport: TensorTransport, max_seq_len: int
    ) -> None:
        self.calls: dict[int, SentRequest] = {}
        self._spec = spec
        self._processor = processor
        self._box = box
        self._transport = transport
        self._max_seq_len = max_seq_len
        self.sent = 0
        self.salt = b""
        self.session = ""
        self.reads_only = False

    def send(self, ask: SampleRequest) -> SentRequest:
        """Check a request and send it to the conductor. Raises RequestError where the api would refuse it."""
        params, outputs, inputs = self.prepared(ask)
        self.sent += 1
        call = self.calls[self.sent] = SentRequest(self.sent, ask)
        if ask.resume is not None:
            call.drawn = {place: list(ids) for place, ids in ask.resume.ids.items()}
        segments = [
            SegmentRef(kind=s.kind, length=s.length, inputs=self._lend(call, s.arrays), content=s.content)
            for s in inputs.segments
        ]
        request = NewRequest(
            facts=dict(inputs.facts),
            handle=call.handle,
            request_id=f"runtime-{call.handle}",
            params=inputs.plain_params(params),
            outputs=list(outputs),
            inputs=self._lend(call, inputs.arrays),
            segments=segments,
            seed=ask.seed,
            deadline_s=ask.deadline_s,
            prompt_tokens=inputs.prompt_tokens,
            salt=self.salt,
            session=self.session,
            lease_s=60.0 if self.session else 0.0,
            reads_only=self.reads_only,
            resume=ask.resume,
            is_journaled=ask.is_journaled,
            growing=dict(ask.growing),
        )
        self._box.send(CONDUCTOR, request)
        return call

    def grow(self, call: SentRequest, name: str, values: Sequence[int], *, is_over: bool = False) -> None:
        """Add values to a growing input of a request."""
        self._box.send(CONDUCTOR, MoreInput(handle=call.handle, name=name, values=list(values), is_over=is_over))

    def prepared(self, ask: SampleRequest) -> tuple[Any, tuple[str, ...], Inputs]:
        """Return a request's parameters, its outputs and what the processor makes of it. Raises RequestError."""
        params = parse_params(self._spec.params, ask.params).params
        if getattr(params, "seed", 0) is None:
            params = dataclasses.replace(params, seed=ask.seed)
        events = [name for name in ask.outputs if name in EVENTS]
        outputs = (*check_outputs(self._spec, [name for name in ask.outputs if name not in EVENTS]), *events)
        inputs = self._processor.process_prompt(
            PromptRequest(
                text=ask.text,
                texts=ask.texts,
                turns=ask.turns,
                reads_windows=ask.reads_windows,
                is_open=ask.is_open,
                ids=ask.ids,
                media=ask.media,
                order=ask.order,
                params=params,
                outputs=frozenset(outputs),
                seed=ask.seed,
                max_seq_len=self._max_seq_len,
            )
        )
        return params, outputs, inputs

    def cancel(self, call: SentRequest) -> None:
        """Cancel a request as a client disconnect does."""
        if not call.is_over:
            self._box.send(CONDUCTOR, CancelRequest(handle=call.handle, why="disconnect"))
            self._end(call, "cancelled")

    def turn(self) -> bool:
        """Process all received messages. Returns whether there was any."""
        letters = self._box.drain()
        for letter in letters:
            match letter.body:
                case Outputs(worker=worker, items=items, finished=ends, drawn=drawn, saved=saved):
                    for state in saved:
                        self._note_saved(state)
                    for ids in drawn:
                        self._note_drawn(ids)
                    for item in items:
                        self._note_skipped(item)
                        output = OutputItem(
                            modality=item.modality, port=item.port, array=self._read(item.ref), meta=dict(item.meta)
                        )
                        self._take(worker, item.handle, item.seq, output)
                    for end in ends:
                        self._finished(end)
                case RequestFinished() as finished:
                    self._finished(finished)
                case RequestFailed(handle=handle, error=error):
                    if handle in self.calls:
                        self._end(self.calls[handle], "failed", error)
                case TensorFreed(slots=slots):
                    for slot, generation in slots:
                        self._transport.release(slot, generation)
        return bool(letters)

    # -- what comes back --------------------------------------------------------------------------------------

    def _take(self, worker: str, handle: int, seq: int, item: OutputItem) -> None:
        call = self.calls.get(handle)
        if call is None or call.is_over:
            return
        call.early[worker, seq] = item
        while (output := call.early.pop((worker, call.taken.get(worker, 0)), None)) is not None:
            call.taken[worker] = call.taken.get(worker, 0) + 1
            call.items.append(output)
        self._close_if_complete(call)

    def _note_drawn(self, drawn: Drawn) -> None:
        """Add ids to the journal. Raises EngineError for ids out of order, or that the attempt was given."""
        call = self.calls.get(drawn.handle)
        if call is None:
            return
        ids = call.drawn.setdefault(drawn.place, [])
        if drawn.start != len(ids):
            raise EngineError(f"ids of {drawn.place} start at {drawn.start} instead of {len(ids)}")
        ids += drawn.ids
        call.widths[drawn.place] = drawn.width

    def _note_saved(self, message: Saved) -> None:
        """Keep a saved state, whose request may have ended."""
        values = {port: inline(self._read(ref), ref.dtype) for port, ref in message.loop.values.items()}
        call = self.calls.get(message.handle)
        if call is not None:
            state = SavedLoop(iteration=message.loop.iteration, values=dict(values))
            call.saved.setdefault(message.place, []).append(state)

    def _note_skipped(self, item: Output) -> None:
        call = self.calls.get(item.handle)
        if call is not None and item.skipped:
            call.skipped[item.port] = call.skipped.get(item.port, 0) + item.skipped

    def _finished(self, message: RequestFinished) -> None:
        call = self.calls.get(message.handle)
        if call is not None and not call.is_over:
            call.finished = message
            self._close_if_complete(call)

    def _close_if_complete(self, call: SentRequest) -> None:
        if call.finished is None:
            return
        if all(call.taken.get(worker, 0) >= count for worker, count in call.finished.emitted.items()):
            self._end(call, "finished")

    def _end(self, call: SentRequest, status: Status, error: ErrorInfo | None = None) -> None:
        for ref in call.lent:
            if isinstance(ref, ShmTensor):
                self._transport.release(ref.slot, ref.generation)
        chunks = self.rendered(call.items) if status == "finished" else ()
        call.outcome = RequestOutcome(
            status=status,
            outputs=joined(chunks),
            chunks=chunks,
            items=tuple(call.items),
            error=error,
            reason=call.finished.reason if call.finished else "",
            counts=call.finished.counts if call.finished else {},
            drawn=call.drawn,
            widths=call.widths,
            skipped=call.skipped,
            saved=call.saved,
        )
        del self.calls[call.handle]

    # -- bytes ------------------------------------------------------------------------------------------------

    def rendered(self, items: Sequence[OutputItem]) -> tuple[EncodedChunk, ...]:
        """Encode outputs as a client receives them, one chunk each. Text ids pass the detokenizer."""
        make = getattr(self._processor, "detokenizer", None)
        text = make() if make is not None and any(item.modality == "text" for item in items) else None
        chunks = []
        for item in items:
            if item.modality == "text" and text is not None:
                piece = text.push([int(value) for value in item.array.reshape(-1).tolist()])
                chunks.append(EncodedChunk(modality="text", data=piece.encode()))
            elif item.modality in NUMBERS:
                chunks.append(EncodedChunk(modality=item.modality, data=item.array.tobytes(), metadata=dict(item.meta)))
            else:
                data, metadata = self._processor.postprocess(item.array, item.modality)
                chunks.append(EncodedChunk(modality=item.modality, data=data, metadata={**item.meta, **metadata}))
        rest = text.flush() if text is not None else ""
        return (*chunks, EncodedChunk(modality="text", data=rest.encode())) if rest else tuple(chunks)

    def _lend(self, call: SentRequest, arrays: Mapping[str, Array]) -> dict[str, TensorRef]:
        refs = {name: self._transport.put(np.asarray(array), CONDUCTOR) for name, array in arrays.items()}
        call.lent.extend(refs.values())
        return dict(refs)

    def _read(self, ref: TensorRef) -> Array:
        array = self._fetched(ref) if self._transport.is_remote(ref) else self._transport.copy(ref)
        if isinstance(ref, ShmTensor):
            self._box.send(ref.owner, TensorFreed(slots=[(ref.slot, ref.generation)]))
        return array

    def _fetched(self, ref: TensorRef) -> Array:
        """Wait for a tensor of another host."""
        assert isinstance(ref, ShmTensor), "see `is_remote`"
        fetch = self._transport.fetch(ref)
        while not fetch.is_done:
            time.sleep(1e-4)
            self._transport.deliver()
        return fetch.result()


def joined(chunks: Sequence[EncodedChunk]) -> dict[str, bytes]:
    """Join all bytes of each modality."""
    data: dict[str, bytes] = {}
    for chunk in chunks:
        data[chunk.modality] = data.get(chunk.modality, b"") + chunk.data
    return data
