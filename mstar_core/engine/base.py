"""Records between the worker's loop and the engines: jobs in, step results out. See `runner` for the calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, NewType

from mstar_core.graph.declare.nodes import MAIN, Attend

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Set

    import numpy as np
    from torch import Tensor

    from mstar_core.errors import MstarError

Handle = NewType("Handle", int)
"""Internal number of a request, unique for one incarnation of the conductor."""

JobKey = NewType("JobKey", int)
"""Number of one job on one worker; never reused."""

NO_ADAPTER: Final = -1
"""Row of a request without a LoRA adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """A loop over one node on one rank, which the engine iterates alone.

    max_iters: 0 skips the loop. carry: output port -> input port. stop_port: the id or boolean port that ends it.
    stop_ids: ids that end it (empty with a boolean stop_port); the starting value is tested too.
    fused: iterate without returning to the worker. All iterations run within one step, up to a limit on its tokens;
    with `emit`, one iteration runs per step. emit: ports to report after each iteration; host_emit: those among them
    that the engine copies to the host, all sequences of a step at once.
    feed: input that takes one id of a stream per iteration; the ids come by `NodeRunner.feed`. An iteration waits for
    its id. After the last one, `after_end` ends the loop (`stop`) or gives -1 from then on (`empty`).
    known: ids that an earlier attempt drew in its first iterations, which are taken instead of drawing; with the values
    of `NodeRunner.known_ports` behind each. is_read: whether a client or a stream takes its ids as they come.
    """

    max_iters: int
    carry: dict[str, str] = field(default_factory=dict)
    stop_port: str | None = None
    stop_ids: tuple[int, ...] = ()
    fused: bool = False
    emit: tuple[str, ...] = ()
    host_emit: tuple[str, ...] = ()
    feed: str | None = None
    after_end: Literal["stop", "empty"] = "stop"
    known: tuple[int, ...] = ()
    is_read: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheState:
    """One branch's cache and sampling state, on its way to another rank. Its pages belong to no pool.

    length: tokens in the cache. position: of the next token. last: last drawn id, -1 without one. drawn: ids drawn so
    far, which number its random numbers. history: int32 [length], ids in cache order, -1 for tokens without an id.
    seen: bool [vocabulary], ids under the repetition penalty; counts: int32 [vocabulary], how often each id was drawn;
    both None without a penalty that reads them. answer: int32 [n], ids that the request's grammar has taken, None if
    there are none. pages: one tensor per group of layers, [layers, pages, 2, page_size, kv_heads, head_dim].
    last_values: last values of carried ports.
    """

    length: int
    position: int | float
    last: int
    drawn: int
    history: Tensor
    seen: Tensor | None = None
    counts: Tensor | None = None
    answer: Tensor | None = None
    pages: tuple[Tensor, ...] = ()
    last_values: dict[str, Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors."""
        values = (*self.pages, self.history, self.seen, self.counts, self.answer, *self.last_values.values())
        return sum(value.nbytes for value in values if value is not None)


@dataclass(frozen=True, slots=True)
class Export:
    """The task of a job that takes a branch's cache away from its runner: `Done.cache` has it, the branch is empty.

    carried: ports whose last values go with it.
    """

    carried: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class Job:
    """One run of a node for one request, or one whole resident loop. Owned by the runner once submitted.

    inputs: port -> tensor on any device. STEP is a 0-d int64 tensor outside loops. numbers: (stateless) port -> plain
    number; a port is in one of the two. outputs: ports whose values the walk needs. edges: those among them, and maybe
    others, that the module must return; None for all. The others are held for later walks, if there are any.
    sample: (KV) run the head on the last token and draw an id. branch: cache branch.
    rows: candidates of this request. Inputs of the rank that their port declares are shared by all candidates; those
    with one more dimension hold a value for each. Outputs are stacked, [rows, ...]. (KV) Each candidate continues the
    branch's cache in one of its own, which lives as `attend.keep` says, until a job of another number of candidates.
    Candidates of which nothing stays (a loop with keep="loop", or a pass that does not write) take turns if memory is
    short; the others exist all at once. In loops, a candidate that stopped earlier repeats its last value, and
    `Done.iterations` are those of the longest.
    (KV) Prefix cache: a pass of ids alone is keyed by its ids and `tokens_hash_seed` (the salt), any other pass by
    `content`, which must determine its inputs. None = do not cache. The engine decides which of the two a pass is.
    known: (KV) the id that an earlier attempt drew in this job, which is taken instead of drawing; not for loops.
    urgency: higher runs first where jobs of a node compete (seconds that playback is overdue).
    yields: it waits if it would make sound that other requests have begun run dry, see `engine.slack`. Not for loops.
    sampling: (KV) sampling parameters that differ from the request's. suppress: (KV) ids that a single run never draws.
    move: (KV) moves the branch's cache instead of running the module: an Export, or the state to import, which replaces
    the branch's cache. Runners with a cache take such jobs.
    """

    key: JobKey
    handle: Handle
    inputs: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float | int | bool] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    edges: frozenset[str] | None = None
    attend: Attend = field(default_factory=Attend)
    branch: str = MAIN
    sample: bool = True
    rows: int = 1
    loop: LoopSpec | None = None
    known: int | None = None
    tokens_hash_seed: bytes | None = None
    content: bytes | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    suppress: tuple[range, ...] = ()
    urgency: float = 0.0
    yields: bool = False
    move: Export | CacheState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A job that ended. outputs: port -> tensor on the device; a sampled id is int64 [1] on the host.

    A `host_outputs` port of a stateless node is a view of a buffer that is reused three steps of its runner later: a
    receiver that keeps it longer must copy it. That of a KV node's loop has memory of its own.

    reason: `done` for a single run and for a loop that ended with its stream, else `stop` or `length`.
    iterations: loop iterations that counted. drawn: int64 [iterations], ids that a resident loop drew.
    cached_tokens: tokens of this job that the prefix cache supplied. cache: what an Export took.
    """

    job: Job
    outputs: dict[str, Tensor] = field(default_factory=dict)
    reason: str = "done"
    iterations: int = 0
    drawn: np.ndarray | None = None
    cached_tokens: int = 0
    cache: CacheState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """Ids that resident loops drew in one step, or in several of one launch.

    keys: int64 [n] job keys. ids: int64 [n], the value of the loop's sampled port in this iteration. steps: iterations
    of each job; with several a key occurs again for each, in their order.
    Jobs whose loop ended in this step also appear in `StepResult.done`.
    """

    keys: np.ndarray
    ids: np.ndarray
    steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Values of one loop iteration on ports that are not sampled, in order. Of several candidates: stacked.

    is_dry: the loop waits for the next item of the stream that feeds it.
    """

    job: Job
    iteration: int
    outputs: dict[str, Tensor]
    is_dry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A job that ended in an error. Its request fails; other requests of the batch do not."""

    job: Job
    error: MstarError


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Results of one collected step. rows: batch items. ran: keys of jobs that took part, besides those of `loop`.

    scores: log-probabilities of the id that a job drew, for requests that report them: float64 [1 + 2k], its own, then
    pairs of one of the k most likely ids and its log-probability.

    decides: the node's next step waited for the ids of this one, so the device has none of its steps.

    draws: ids that loops of other kinds drew, with the keys of their jobs. Known ids that a resident loop takes are in
    `loop` and `emissions` like drawn ones.

    duration_s: device time if it was measured, else host time from the launch, or from the end of the node's step
    before it if that was later, until the results came. The durations of a node's steps never add up to more than the
    time that passed.
    """

    done: list[Done] = field(default_factory=list)
    loop: LoopStep | None = None
    draws: list[tuple[JobKey, int]] = field(default_factory=list)
    scores: dict[JobKey, np.ndarray] = field(default_factory=dict)
    emissions: list[Emission] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0
    duration_s: float = 0.0
    ran: list[JobKey] = field(default_factory=list)
    decides: bool = False

    def drop_closed(self, requests: Container[Handle]) -> None:
        """Remove the results of requests that are not among the open ones."""
        self.done = [done for done in self.done if done.job.handle in requests]
        self.failed = [failed for failed in self.failed if failed.job.handle in requests]
        self.emissions = [item for item in self.emissions if item.job.handle in requests]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Backlog of a runner. ready: batch items that could run now. waiting: jobs without a slot or pages.

    oldest_s: monotonic time at which the oldest ready item became ready (inf without one).
    is_patient: the ready items may wait for a fuller batch while other nodes have steps on the device.
    feeds: only nodes of this device use the step's outputs, so it may wait while one of those has all the steps in
    flight that it may have.
    """

    ready: int = 0
    waiting: int = 0
    oldest_s: float = float("inf")
    is_patient: bool = False
    feeds: bool = False


class Contention(NamedTuple):
    """Requests at a node. holding: those with slots. waiting: those whose work here waits for slots or pages alone."""

    holding: Set[Handle] = frozenset()
    waiting: Set[Handle] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Page pool and slots of a runner; zeros for stateless nodes. cached: pages that only the prefix cache keeps.

    leased: cached or used pages under the lease of a session.
    preempted: requests preempted so far; preempted_pages: the pages they lost; last_preempted: the latest of them.
    """

    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    pages_leased: int = 0
    slots_total: int = 0
    slots_used: int = 0
    preempted: int = 0
    preempted_pages: int = 0
    last_preempted: Handle | None = None
