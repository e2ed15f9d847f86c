"""Messages from worker to worker and from worker to api: values, outputs and loans. One per step and destination."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from mstar_core.messages.requests import RequestFinished, SavedLoop
from mstar_core.messages.tensors import TensorRef


class Value(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value of a walk for another rank, or a mark of a loop (port begins with `$`).

    task: a task's index, or number of tasks + loop. iteration: loop indices, outermost first.
    ref: None when the port was not produced, and for marks.
    """

    handle: int
    run: int
    task: int
    port: str
    iteration: list[int]
    ref: TensorRef | None = None


class Values(msgspec.Struct, frozen=True, kw_only=True, tag="values"):
    """Worker to worker: values and marks of one step.

    sent: CLOCK_MONOTONIC, as in all messages below; 0.0 for a receiver on another host, which has another clock.
    """

    items: list[Value]
    sent: float = 0.0


class StreamItems(msgspec.Struct, frozen=True, kw_only=True, tag="stream_items"):
    """Worker to worker: ids of one stream from one step, one per sequence. index: number of the item in its stream."""

    stream: str
    handles: list[int]
    index: list[int]
    ids: list[int]
    sent: float = 0.0


class StreamTensor(msgspec.Struct, frozen=True, kw_only=True, tag="stream_tensor"):
    """Worker to worker: one tensor item of a stream. is_dry: its producer waits for an item of its own stream."""

    stream: str
    handle: int
    index: int
    ref: TensorRef
    sent: float = 0.0
    is_dry: bool = False


NO_SOUND: Final = -1.0
"""`Playing.ahead_s` of a request whose sound has ended."""


class Playing(msgspec.Struct, frozen=True, kw_only=True, tag="playing"):
    """Worker to worker: sound that a rank has sent to clients. The receivers run other nodes of these requests.

    ahead_s: seconds that the client has not played yet; negative if no more sound follows. needed_s: seconds until the
    next piece is expected. Both count from the arrival of the message, so hosts need no common clock.
    """

    handles: list[int]
    ahead_s: list[float]
    needed_s: list[float]


class CacheMoved(msgspec.Struct, frozen=True, kw_only=True, tag="cache_moved", omit_defaults=True):
    """Worker to worker: a cache branch that the receiver's run waits for. source: rank of the sender.

    length: tokens in the cache. position: of the next token. last: last drawn id, -1 without one. drawn: number of ids
    drawn. pages: staging tensors, [layers, pages, 2, page_size, kv_heads, head_dim], one per group of layers.
    history: int32 [length], ids in cache order. seen: bool [vocabulary], ids under the repetition penalty.
    counts: int32 [vocabulary], how often each id was drawn. answer: int32 [n], ids that its grammar has taken.
    values: last values of carried ports at the engine; held: those of output ports at the worker. streamed: items that
    the walks so far have put on split streams, see OpenRequest.
    """

    handle: int
    run: int
    source: int
    node: str
    branch: str
    length: int
    position: int | float
    last: int
    drawn: int
    pages: list[TensorRef] = []
    history: TensorRef
    seen: TensorRef | None = None
    counts: TensorRef | None = None
    answer: TensorRef | None = None
    values: dict[str, TensorRef] = {}
    held: dict[str, TensorRef] = {}
    streamed: dict[str, int] = {}
    sent: float = 0.0


class TensorFreed(msgspec.Struct, frozen=True, kw_only=True, tag="tensor_freed"):
    """Reader to owner: these (slot, generation) pairs may be reused."""

    slots: list[tuple[int, int]]


class Output(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A value for the client. seq: number of the output within its request on this worker, from 0.

    skipped: units of the port that were left out before this output, because the api has them (see `Resume`).
    """

    handle: int
    seq: int
    port: str
    modality: str
    ref: TensorRef
    meta: dict[str, Any] = {}
    skipped: int = 0


class Drawn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ids that a loop has drawn, for the api's journal. They come with or before the outputs that they determine.

    place: `RunWalk.place`, a slash, and the name of the loop, or of the node whose task drew outside loops of the
    engine; the same in each attempt. Ids of one place are numbered in the order in which they are drawn. start: number
    of the first id. width: ids of one iteration. An attempt does not report ids that it was given.
    """

    handle: int
    place: str
    start: int
    ids: list[int]
    width: int = 1


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """State of a loop that saves, for a new attempt. It comes at any time after its iteration has begun.

    place: `RunWalk.place`, a slash, and the name of the loop.
    """

    handle: int
    place: str
    loop: SavedLoop


class Outputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs", omit_defaults=True):
    """Worker to api: all outputs of one step. worker: the sender's name.

    finished: requests that ended with this step and whose end the worker reports in place of the conductor.
    drawn: ids for the journal of requests that can be resumed. saved: states of their loops.
    """

    worker: str
    items: list[Output]
    finished: list[RequestFinished] = []
    drawn: list[Drawn] = []
    saved: list[Saved] = []


FlowMessage = Values | StreamItems | StreamTensor | Playing | CacheMoved | TensorFreed | Outputs
