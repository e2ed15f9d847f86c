"""conductor <-> worker: what to run, and what became of it. One message per walk each way."""

from __future__ import annotations

from typing import Any

import msgspec

from mstar_core.messages.requests import ErrorInfo
from mstar_core.messages.tensors import TensorRef


class SignalRef(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """A value that an earlier walk left on a worker."""

    key: int
    rank: int


RunInputRef = TensorRef | SignalRef


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True, tag="open_request", omit_defaults=True):
    """Conductor to worker: a request whose walks will come. homes: node name -> leading rank that runs it.

    params: checked values by parameter name. max_tokens: most tokens its caches may hold. rows: batch rows that keep
    caches of their own at once, which hold those tokens in equal parts.
    """

    handle: int
    params: dict[str, Any]
    seed: int
    homes: dict[str, int]
    max_tokens: int
    outputs: list[str] = []
    rows: int = 1


class RunWalk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One walk to take. run: number of the run within the request. homes: nodes placed elsewhere for this walk.

    branches: cache branches that take part; none named means the main one. keep: ports whose values stay as signals.
    finishes: the request ends with it, and all of it was here: the worker tells the api with its last outputs.
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


class RunWalks(msgspec.Struct, frozen=True, kw_only=True, tag="run_walks", omit_defaults=True):
    """Conductor to worker: walks of one partition, taken in order with no visit in between.

    opens: the request itself, where these are the first that its only worker hears of it.
    """

    handle: int
    partition: str
    runs: list[RunWalk]
    opens: OpenRequest | None = None


class EndStream(msgspec.Struct, frozen=True, kw_only=True, tag="end_stream"):
    """Conductor to the consuming worker: the stream holds `total` items (before the accept filter) and no more."""

    handle: int
    stream: str
    total: int


class ReleaseSignal(msgspec.Struct, frozen=True, kw_only=True, tag="release_signal"):
    """Conductor to worker: the program dropped the handle; free the value."""

    handle: int
    key: int


class CloseRequest(msgspec.Struct, frozen=True, kw_only=True, tag="close_request"):
    """Conductor to worker: free everything of the request, whatever state it is in."""

    handle: int


class WalkDone(msgspec.Struct, frozen=True, kw_only=True, tag="walk_done", omit_defaults=True):
    """Worker to conductor: its share of a run ended.

    emitted: outputs sent to the api so far (whole request, this worker). streamed: stream -> items put so far (whole
    request, this worker). counts: loop name -> iterations. signals: port -> (key, dtype, shape). is_told: the run
    finished the request, and the api knows.
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


class WorkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="work_failed"):
    """Worker to conductor: the request failed on this worker."""

    handle: int
    rank: int
    error: ErrorInfo


WorkMessage = OpenRequest | RunWalks | EndStream | ReleaseSignal | CloseRequest | WalkDone | WorkFailed
