"""The contract between the worker's loop and what computes: jobs in, step results out.

The worker submits jobs, picks which node steps next, launches it, and collects the step before. A runner owns
everything of its node on one device: the module, slots, pages, and the batch it is about to form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType, Protocol, runtime_checkable

from mstar_core.graph.spec.nodes import MAIN, Attend

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.errors import MstarError

Handle = NewType("Handle", int)
"""Internal number of a request, unique for the life of the conductor's incarnation."""

JobKey = NewType("JobKey", int)
"""Number of one job on one worker; never reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How ids are drawn for one request and node.

    temperature 0 takes the arg-max after the penalty; top_k 0 and min_p 0 are off; repetition_penalty 1 is off.
    The same seed gives the same ids whatever shares the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """A loop whose body is this one node on this one rank: the engine iterates it alone.

    max_iters: 0 skips the loop. carry: output port -> input port. stop_port: the id or boolean port that ends it.
    stop_ids: ids that end the loop (empty with a boolean stop_port); the starting value is tested too.
    fused: iterate without asking the worker in between. All iterations run within one step, up to a bound on the
    tokens of a step; where `emit` names ports to report, one iteration runs per step, so that each is told as it ends.
    """

    max_iters: int
    carry: dict[str, str] = field(default_factory=dict)
    stop_port: str | None = None
    stop_ids: tuple[int, ...] = ()
    fused: bool = False
    emit: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Job:
    """One firing of a node for one request, or one whole resident loop of it. Owned by the runner once submitted.

    inputs: port -> tensor (any device; the runner moves it). STEP is given as a 0-d int64 tensor outside loops.
    numbers: (stateless) port -> plain number, for ports that take one. A port is in one of the two.
    outputs: ports whose values the walk needs. sample: (KV) run the head on the last row and sample.
    branch: cache branch. rows: batch rows of this request (candidates). Inputs of the rank that their port declares
    are the same for all rows, those with one more dimension hold a value for each; outputs are stacked, [rows, ...].
    (KV) Each row goes on from the branch's cache in one of its own, which lasts as `attend.keep` says and until a job
    of one row, or of another number of rows, comes. Rows of which nothing stays (a loop with keep="loop", or a pass
    that does not write) take turns where memory is short; others exist all at once. In loops, a row that stopped
    earlier gives its last value again, and `Done.iterations` are those of the longest.
    tokens_hash_seed: extra bytes for the prefix cache key (segment kind, media hash); None = do not cache.
    urgency: a higher one runs first where rows of a node compete (seconds of playback overdue).
    """

    key: JobKey
    handle: Handle
    inputs: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, float | int | bool] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    attend: Attend = field(default_factory=Attend)
    branch: str = MAIN
    sample: bool = True
    rows: int = 1
    loop: LoopSpec | None = None
    tokens_hash_seed: bytes | None = None
    urgency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A job that ended. outputs: port -> tensor on the device; a sampled id is int64 [1] on the host.

    An output that a stateless node copies to the host (`host_outputs`) is a view of memory that serves again three
    steps of its runner later: whoever keeps it longer copies it. That of a KV node's loop is memory of its own.

    reason: `done` for a single firing, `stop` or `length` for a loop. iterations: loop iterations that counted.
    cached_tokens: tokens of this job that the prefix cache supplied.
    """

    job: Job
    outputs: dict[str, Tensor] = field(default_factory=dict)
    reason: str = "done"
    iterations: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """Ids that resident loops produced in one step, as flat arrays of one row each.

    keys: int64 [n] job keys. ids: int64 [n], the value of the loop's sampled port in this iteration.
    The jobs whose loop ended in this step also appear in `StepResult.done`.
    """

    keys: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """Values of one iteration of a job's loop on a general (not sampled) port, in order. Of several rows: stacked."""

    job: Job
    iteration: int
    outputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A job that ended in an error; its request fails, its batch neighbours do not."""

    job: Job
    error: MstarError


@dataclass(slots=True, kw_only=True)
class StepResult:
    """What one collected step brought. duration_s: device time of the step where known, else host time."""

    done: list[Done] = field(default_factory=list)
    loop: LoopStep | None = None
    emissions: list[Emission] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What waits at a runner. ready: rows that could run now. waiting: jobs without a slot or pages.

    oldest_s: monotonic time at which the oldest ready row became ready (inf when none). is_patient: the ready rows may
    wait for others that are about to come, while other nodes have steps on the device; a fuller step costs it less.
    feeds: what a step gives is of use to other nodes of this device alone, so while one of those has all the steps
    that it may have, the ready rows may wait for more.
    """

    ready: int = 0
    waiting: int = 0
    oldest_s: float = float("inf")
    is_patient: bool = False
    feeds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Page pool of a runner; zeros for stateless nodes. cached: pages kept only by the prefix cache.

    preempted: requests whose pages were taken so far, preempted_pages: those pages; last_preempted: the newest of them.
    """

    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    slots_total: int = 0
    slots_used: int = 0
    preempted: int = 0
    preempted_pages: int = 0
    last_preempted: Handle | None = None


class Running(Protocol):
    """A step in flight on the device; opaque to the worker."""


class NodeRunner(Protocol):
    """Runs one node on one device. Every method is called from the worker's one thread."""

    name: str

    def open(self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1) -> None:
        """Announce a request before its first job. max_tokens: most tokens its caches may ever hold.

        rows: rows that will exist at once, which hold those tokens in equal parts. Raises TooLarge when that can never
        fit the whole pool or its slots.
        """

    def submit(self, job: Job) -> None:
        """Queue a job. Raises nothing for a closed handle: the job is dropped."""

    def fork(self, handle: Handle, source: str, into: str) -> None:
        """Make branch `into` a copy-on-write copy of branch `source` (as of the jobs already done)."""

    def close(self, handle: Handle) -> None:
        """Free everything of a request, at any time, any number of times. Never raises."""

    def pressure(self) -> Pressure:
        """What waits here."""

    def launch(self) -> Running | None:
        """Form a batch from the queue and start one step; None when nothing can run."""

    def is_done(self, running: Running) -> bool:
        """Whether `collect` would not wait for the device. Asks without waiting; always true on a CPU."""

    def collect(self, running: Running) -> StepResult:
        """Wait for a step and give its results, in launch order."""

    def memory(self) -> MemoryUse:
        """Page and slot counts."""


@runtime_checkable
class WorksWhenIdle(Protocol):
    """A runner that has work of its own for moments in which nothing runs and nothing waits."""

    def idle(self) -> bool:
        """Do one piece of it, of at most a second or two. True when more is left. Not called with a step in flight."""


@runtime_checkable
class HoldsPages(Protocol):
    """A runner that knows what each request holds and what it waits for."""

    def held(self) -> dict[Handle, tuple[int, str]]:
        """By open request: pages of its caches, and in a few words what it waits for (empty: nothing). Cheap."""


@runtime_checkable
class EndsLoops(Protocol):
    """A runner that keeps something for the length of a loop whose iterations come as single jobs."""

    def end_loops(self, handle: Handle) -> None:
        """No loop of this request goes on: free what was kept for one. Never raises."""


@runtime_checkable
class Counted(Protocol):
    """A runner that counts more than its memory."""

    def counters(self) -> dict[str, float]:
        """Sums since the start, by name."""
