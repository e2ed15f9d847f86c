"""Messages between conductor and worker: walks to run and their results. One per walk each way."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_core.messages.requests import ErrorInfo, SavedLoop
from mstar_core.messages.tensors import TensorRef


class SignalRef(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """Reference to a value that an earlier walk kept on a worker."""

    key: int
    rank: int


RunInputRef = TensorRef | SignalRef


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True, tag="open_request", omit_defaults=True):
    """Conductor to worker: open a request whose walks will follow. homes: leading rank by node name.

    params: checked values by parameter name. max_tokens: limit of its caches. rows: number of candidates with
    caches of their own at once, which share that limit equally. split_streams: those with producers on several workers.
    salt, adapter, session, lease_s, is_heard: as in NewRequest. delivered, chunks: outputs that the api has, see
    `Resume`.
    """

    handle: int
    params: dict[str, Any]
    seed: int
    homes: dict[str, int]
    max_tokens: int
    outputs: list[str] = []
    rows: int = 1
    split_streams: list[str] = []
    salt: bytes = b""
    delivered: dict[str, int] = {}
    chunks: dict[str, tuple[int, int]] = {}
    adapter: int = 0
    session: str = ""
    lease_s: float = 0.0
    is_heard: bool = True


class Move(msgspec.Struct, frozen=True, array_like=True):
    """A cache branch of a node that changes ranks. rank: the other one, where it goes or comes from."""

    node: str
    branch: str
    rank: int


class RunWalk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One walk to run. run: number of the run within the request. homes: nodes placed elsewhere for this walk.

    branches: cache branches of the run; empty means the main one. keep: ports whose values stay as signals. finishes:
    the request ends with this run and used this worker only, which reports the end to the api with its last outputs.
    contents: keys of what determines the inputs, by name, where they are known.
    gives: caches that leave this worker before the run, after those before it. takes: caches that the run waits for.
    A worker without a node of the walk gets the run too if it gives a cache, forks one, or holds one of the inputs.
    place: partition and number of the run within it, the same in each attempt of a request; empty if the request
    keeps no journal. known: ids that earlier attempts drew, by the name of the loop or node (see `Drawn`). saved:
    states in which loops begin, by the name of the loop (see `Saved`). reads: ports whose numbers the report brings.
    sampling: sampling parameters that differ from the request's.
    """

    run: int
    walk: str
    max_iters: int | dict[str, int] | None = None
    branches: list[str] = []
    rows: int = 1
    sample: bool = True
    keep: list[str] = []
    inputs: dict[str, RunInputRef] = {}
    forks: list[tuple[str, str]] = []
    homes: dict[str, int] = {}
    finishes: bool = False
    contents: dict[str, bytes] = {}
    gives: list[Move] = []
    takes: list[Move] = []
    place: str = ""
    known: dict[str, list[int]] = {}
    saved: dict[str, SavedLoop] = {}
    reads: list[str] = []
    sampling: dict[str, float] = {}


class RunWalks(msgspec.Struct, frozen=True, kw_only=True, tag="run_walks", omit_defaults=True):
    """Conductor to worker: walks of one partition, run in order without a round trip in between.

    opens: the request, if these are the first walks on its only worker.
    """

    handle: int
    partition: str
    runs: list[RunWalk]
    opens: OpenRequest | None = None


class EndStream(msgspec.Struct, frozen=True, kw_only=True, tag="end_stream"):
    """Conductor to the consuming worker: the stream ends after `total` items (before the accept filter)."""

    handle: int
    stream: str
    total: int


class ReleaseSignal(msgspec.Struct, frozen=True, kw_only=True, tag="release_signal"):
    """Conductor to worker: free a value whose handle the program dropped."""

    handle: int
    key: int


class CloseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="close_request"):
    """Conductor to worker: free everything of the request, whatever its state."""

    handle: int


class WalkDone(msgspec.Struct, frozen=True, kw_only=True, tag="walk_done", omit_defaults=True):
    """Worker to conductor: its share of a run ended.

    emitted, streamed: number of outputs and of items by stream, for the whole request on this worker; of split streams
    (see OpenRequest), those of earlier workers count too. counts:
    iterations by loop. signals: port -> (key, dtype, shape). values: numbers of the ports that the run reads. is_told:
    whether the worker has reported the end of the request to the api.
    """

    handle: int
    run: int
    rank: int
    reason: str = "done"
    counts: dict[str, int] = {}
    emitted: int = 0
    streamed: dict[str, int] = {}
    signals: dict[str, tuple[int, str, list[int]]] = {}
    cached_tokens: int = 0
    is_told: bool = False
    values: dict[str, list[int | float]] = {}


class WorkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="work_failed"):
    """Worker to conductor: the request failed on this worker."""

    handle: int
    rank: int
    error: ErrorInfo


WorkMessage = OpenRequest | RunWalks | EndStream | ReleaseSignal | CloseRequest | WalkDone | WorkFailed
