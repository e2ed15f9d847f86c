"""Records of one request on a worker: its runs, streams and values, and the jobs that it has under way.

Owned by the executor; `Executor.close` frees everything of a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mstar_core.engine.base import Handle, JobKey
from mstar_core.graph.declare.nodes import PARAM_PREFIX, Sampling
from mstar_core.graph.declare.sampling import NAMES, SamplingParams
from mstar_core.graph.runtime.actions import Iteration, Key
from mstar_core.messages.flow import CacheMoved, Value
from mstar_core.messages.tensors import TensorRef
from mstar_core.messages.work import Move, OpenRequest, RunWalk
from mstar_core.plugin.params import param_specs
from mstar_core.worker.state.playback import Sound
from mstar_core.worker.state.stream_inbox import StreamInbox

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledTask, Outlet
    from mstar_core.graph.compile.cut import RankWalk
    from mstar_core.graph.declare.streams import Stream
    from mstar_core.graph.runtime.walk_state import WalkState
    from mstar_core.worker.journal import PlaceLog

Feature = tuple[str, tuple[str, ...], bytes]
"""Node, outputs, and key of what determines the inputs of a task: see `worker.feature_cache.content_of`."""


@dataclass(slots=True)
class SharedSteps:
    """Steps of loops that run together. keys: of their jobs; jobs: how many. count, busy_s: steps and durations."""

    keys: bytes
    jobs: int = 1
    count: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class SpanTotal:
    """Time of one job, or of one node in the loops of a walk.

    since: submission. began: start of the first step, 0.0 before it. count: steps, or ended jobs of a node. busy_s: its
    parts of steps, each in full for every request; device_s: the same divided among the jobs of each step. queued_s:
    ready, and no step of the request ran on this rank; of a job, before its first step.
    spent_before: the request's time in steps of this rank when the job was submitted.
    shared: steps of a loop that may not be in `count` and `busy_s` yet; shared_count, shared_s: how many of them are.
    """

    key: int = 0
    since: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    count: int = 0
    busy_s: float = 0.0
    device_s: float = 0.0
    queued_s: float = 0.0
    spent_before: float = 0.0
    shared: SharedSteps | None = None
    shared_count: int = 0
    shared_s: float = 0.0


@dataclass(slots=True)
class ActiveRun:
    """One run of one walk on this rank.

    values: stored values that a consumer still needs. flags: (first, last) of the chunk of each iteration.
    signals: port -> key of the value that the program keeps. read: numbers of the ports that it reads.
    wanted: output ports that the engine returns, by task.
    fixed: inputs and numbers of every chunk of a stream loop. left_out: its first chunks, whose outputs the api has.
    totals: time of tasks inside loops, by node. contents: key of what determines the outputs of a task, by its address.
    drawn: ids that a journal counts, by the name of the loop or node. scores: log-probabilities of drawn ids that have
    not been emitted.
    """

    message: RunWalk
    partition: str
    share: RankWalk
    state: WalkState
    inputs: Mapping[str, Tensor]
    values: dict[Key, Tensor] = field(default_factory=dict)
    flags: dict[Iteration, tuple[bool, bool]] = field(default_factory=dict)
    cached_tokens: int = 0
    signals: dict[str, int] = field(default_factory=dict)
    read: dict[str, list[int | float]] = field(default_factory=dict)
    wanted: dict[int, tuple[str, ...]] = field(default_factory=dict)
    fixed: tuple[dict[str, Tensor], dict[str, float | int | bool]] = ({}, {})
    left_out: int = 0
    totals: dict[str, SpanTotal] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)
    scores: dict[Key, np.ndarray] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.message.run

    @property
    def is_journaled(self) -> bool:
        """Whether the journal takes its draws; those of several candidates do not count."""
        return bool(self.message.place) and self.message.rows == 1

    def next_draw(self, name: str) -> tuple[str, int, Sequence[int]]:
        """Return place and number of the next id of a loop or node, and the ids that are given from that one on."""
        start = self.drawn.get(name, 0)
        return f"{self.message.place}/{name}", start, self.message.known.get(name, [])[start:]

    def note_drawn(self, name: str, count: int) -> None:
        """Count ids of a loop or node."""
        self.drawn[name] = self.drawn.get(name, 0) + count


@dataclass(slots=True)
class MovingRun:
    """A run before which caches or inputs change ranks.

    share: None for a rank that only gives. missing: caches, and names of inputs, that have not come. exports: caches
    that have not left. has_begun: whether the share runs.
    """

    message: RunWalk
    partition: str
    share: RankWalk | None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    missing: set[Move | str] = field(default_factory=set)
    exports: int = 0
    has_begun: bool = False


@dataclass(slots=True)
class WaitingChunk:
    """A walk that waits for the next chunk of a stream. since: time of the executor's clock."""

    run: ActiveRun
    address: int
    iteration: Iteration
    since: float = 0.0


@dataclass(slots=True)
class LoopProgress:
    """Progress of a loop that reports its steps. first, since: the first step that was reported, and its time."""

    first: int
    since: float
    step: int = 0
    steps: int = 0
    now: float = 0.0

    @property
    def rate(self) -> float:
        """Steps per second since the first report; 0.0 before the second."""
        return round((self.step - self.first) / (self.now - self.since), 1) if self.now > self.since else 0.0


class ReportedCounts(NamedTuple):
    """Counts of a request for its report, which is sent after its end too. No tensors."""

    handle: Handle
    tokens: int
    progress: LoopProgress | None


@dataclass(slots=True)
class WorkerRequest:
    """One request on this worker. Owned by `Executor`; ended by `Executor.close` alone.

    queues: runs that have not begun, by partition. moving: runs whose caches or inputs still move, by partition.
    arrived: caches that came for runs that have not been reached, by run.
    held: last values of output ports, by (node, port).
    signals: values kept for the program, by key. early: values from other ranks for runs that have not begun.
    streamed: number of items sent to other ranks, by stream; of split streams, also those before a cache came here.
    split_streams: names of streams with producers on several ranks. produced: streams filled and read on this rank.
    emitted: outputs sent to the api. sound: what was sent of its sound. is_heard: its client plays it while it comes.
    tokens: sampled ids. spent_s: time in steps.
    progress: of its step loop, None without one.
    counts, cached_tokens: totals of the ended runs. salt: part of its cache keys.
    delivered: units by port that the api has from an earlier attempt and that were not computed again yet; skipped:
    those that were left out since the port's last output. chunks: see `Resume`.
    fetching: inputs of queued runs that are read from another host, each as often as runs use it.
    """

    handle: Handle
    params: Mapping[str, Any]
    numbers: Mapping[str, float | int | bool]
    seed: int
    homes: Mapping[str, int]
    outputs: frozenset[str]
    opened_s: float
    split_streams: frozenset[str] = frozenset()
    salt: bytes = b""
    queues: dict[str, deque[RunWalk]] = field(default_factory=dict)
    active: dict[str, ActiveRun] = field(default_factory=dict)
    moving: dict[str, MovingRun] = field(default_factory=dict)
    arrived: dict[int, list[CacheMoved]] = field(default_factory=dict)
    held: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    inboxes: dict[str, StreamInbox] = field(default_factory=dict)
    waiting: dict[str, WaitingChunk] = field(default_factory=dict)
    streamed: dict[str, int] = field(default_factory=dict)
    produced: set[str] = field(default_factory=set)
    signals: dict[int, Tensor] = field(default_factory=dict)
    early: dict[int, list[Value]] = field(default_factory=dict)
    jobs: set[JobKey] = field(default_factory=set)
    emitted: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    sound: Sound = field(default_factory=Sound)
    is_heard: bool = True
    tokens: int = 0
    spent_s: float = 0.0
    progress: LoopProgress | None = None
    delivered: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    chunks: dict[str, tuple[int, int]] = field(default_factory=dict)
    fetching: list[TensorRef] = field(default_factory=list)

    def leave_out_chunks(self, task: CompiledTask) -> int:
        """Return the number of chunks of a stream walk that need not be computed, and count their outputs as left out.

        task: of the walk. Its values must go to the client through one port and nowhere else.
        """
        ports = {
            outlet.port
            for outlet in task.outlets
            if outlet.modality is not None and (not self.outputs or outlet.modality in self.outputs)
        }
        if len(ports) != 1 or any(outlet.stream is not None for outlet in task.outlets):
            return 0
        [port] = ports
        count, units = self.chunks.pop(port, (0, 0))
        if not count or units > self.delivered.get(port, 0):
            return 0
        self.delivered[port] -= units
        self.skipped[port] = self.skipped.get(port, 0) + units
        return count

    def skips(self, port: str, units: int) -> bool:
        """Return whether the api has all units of a port's next output, which is then left out."""
        left = self.delivered.get(port, 0)
        if left < units:
            self.delivered.pop(port, None)
            return False
        self.delivered[port] = left - units
        self.skipped[port] = self.skipped.get(port, 0) + units
        return True

    @property
    def reported(self) -> ReportedCounts:
        """Its counts now."""
        return ReportedCounts(self.handle, self.tokens, self.progress)

    def note_step(self, step: int, steps: int, now: float) -> None:
        """Note the progress of its step loop."""
        if self.progress is None:
            self.progress = LoopProgress(step, now)
        self.progress.step, self.progress.steps, self.progress.now = step, steps, now

    def run_numbered(self, number: int) -> ActiveRun | None:
        """Return the active run with that number."""
        return next((run for run in self.active.values() if run.number == number), None)

    def count(self, counts: Mapping[str, int], cached_tokens: int) -> None:
        """Add the counts of a run that ended."""
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.cached_tokens += cached_tokens


@dataclass(slots=True)
class TaskRun:
    """One run of a task over its cache branches. It ends with the last job; outputs are those of the first branch."""

    open_jobs: int = 1
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    total: SpanTotal = field(default_factory=SpanTotal)


@dataclass(slots=True, kw_only=True)
class TaskJob:
    """Job of one task on one cache branch. since: time of submission. feature: key to keep its outputs under.

    log: takes the id that it draws.
    """

    request: WorkerRequest
    run: ActiveRun
    task: int
    iteration: Iteration
    since: float = 0.0
    task_run: TaskRun = field(default_factory=TaskRun)
    is_first_branch: bool = True
    feature: Feature | None = None
    log: PlaceLog | None = None

    @property
    def total(self) -> SpanTotal:
        """Time of the run, which its branches share."""
        return self.task_run.total

    def beside(self) -> TaskJob:
        """Return the job of the same run on a further branch."""
        return replace(self, is_first_branch=False, log=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopJob:
    """Job of a whole loop that the engine iterates.

    port: the sampled port. streams, modality: targets of its ids in each iteration. outlets: those of other ports.
    inbox: set if the only target is one stream of ids on this rank. feed: stream that the loop takes ids from.
    since: time of submission. log: takes the ids that it draws.
    """

    request: WorkerRequest
    run: ActiveRun
    loop: int
    task: int
    iteration: Iteration
    port: str
    streams: tuple[Stream, ...]
    modality: str | None
    outlets: tuple[Outlet, ...]
    inbox: StreamInbox | None = None
    feed: str | None = None
    since: float = 0.0
    log: PlaceLog | None = None
    total: SpanTotal = field(default_factory=SpanTotal)


class MoveJob(NamedTuple):
    """Job that exports or imports a cache. moving: the run that it precedes. since: time of submission.

    sent, size_bytes: of a cache that came.
    """

    request: WorkerRequest
    moving: MovingRun
    move: Move
    since: float = 0.0
    sent: float = 0.0
    size_bytes: int = 0


class ChunkJob(NamedTuple):
    """Job of one chunk of a stream loop. since: time of submission."""

    request: WorkerRequest
    run: ActiveRun
    step: int
    total: SpanTotal
    since: float = 0.0


Recorded = TaskJob | LoopJob | ChunkJob
"""Jobs whose time is recorded."""

UnderWay = Recorded | MoveJob


def parameter_numbers(params_type: type[Any], values: Mapping[str, Any], seed: int) -> dict[str, float | int | bool]:
    """Return parameters as numbers for nodes: choices become their index, `seed` is the effective one."""
    numbers: dict[str, float | int | bool] = {}
    for spec in param_specs(params_type):
        value = values.get(spec.name)
        if isinstance(value, (bool, int, float)):
            numbers[spec.name] = value
        elif spec.choices and value in spec.choices:
            numbers[spec.name] = spec.choices.index(value)
    return {**numbers, "seed": seed}


def parameter_name(input_name: str) -> str:
    """Return the parameter of an input name made by `from_param`."""
    return input_name.removeprefix(PARAM_PREFIX)


def sampling_params(sampling: Sampling | None, values: Mapping[str, Any], seed: int) -> SamplingParams:
    """Return the sampling parameters of a node, read from the request under the node's prefix."""
    if sampling is None:
        return SamplingParams(seed=seed)

    sent = {name: value for name in NAMES if (value := values.get(sampling.prefix + name)) is not None}
    if not sampling.is_text:
        sent.pop("logprobs", None)
        sent.pop("constraint", None)
    return msgspec.convert({**sent, "seed": seed}, SamplingParams)


def opened(message: OpenRequest, params_type: type[Any], now: float) -> WorkerRequest:
    """Return the record of a new request."""
    return WorkerRequest(
        handle=Handle(message.handle),
        params=message.params,
        numbers=parameter_numbers(params_type, message.params, message.seed),
        seed=message.seed,
        homes=message.homes,
        outputs=frozenset(message.outputs),
        opened_s=now,
        split_streams=frozenset(message.split_streams),
        salt=message.salt,
        delivered=dict(message.delivered),
        chunks=dict(message.chunks),
        is_heard=message.is_heard,
    )
