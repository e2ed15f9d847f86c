"""Requests of a KV node, their caches (branches and candidates), and the passes these wait for.

A branch keeps a log of what its cache was computed from, so that the cache can be recomputed after a preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.base import Emission, Job
from mstar_core.engine.loop import EngineLoop
from mstar_core.engine.transfers import gather
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import Attend

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.constraints.matcher import Grammar, Matcher
    from mstar_core.engine.base import Done, Handle
    from mstar_core.engine.cache.memory import SavedPages
    from mstar_core.engine.cache.prefix_cache import ContentChain
    from mstar_core.engine.steps.plan import Position
    from mstar_core.graph.declare.sampling import SamplingParams


@dataclass(slots=True, kw_only=True)
class ForwardPass:
    """One pass of a branch through the module, computed whole or in chunks.

    ports: the module's inputs; axes: the axis along which each is cut with the tokens (None: never cut).
    per_item: ports with one value per batch item, which are stacked with those of other passes. iterations: iterations
    of a loop in this pass, consecutive in the cache; each is a batch item of its own, sees itself and those before, and
    has an entry on the first axis of the ports in per_item if there are several.
    given: positions from a port, tokens on the last axis; after: the position that follows them.
    base: tokens in the cache before this pass. Ids stay on the host until their step. done: tokens computed or planned.
    chunk_outputs: outputs of the chunks so far. is_replay: built from the log; it answers no job.
    """

    ports: dict[str, Tensor]
    axes: dict[str, int | None]
    tokens: int
    attend: Attend
    position: Position
    base: int
    given: Tensor | None = None
    after: Position = 0
    is_ids: bool = False
    is_replay: bool = False
    per_item: frozenset[str] = frozenset()
    iterations: int = 1
    done: int = 0
    chunk_outputs: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Tokens still to compute."""
        return self.tokens - self.done

    @property
    def outputs(self) -> dict[str, Tensor]:
        """Outputs of all chunks, joined."""
        return {port: _joined(values) for port, values in self.chunk_outputs.items()}

    @property
    def item_tokens(self) -> int:
        """Tokens of each batch item of this pass."""
        return self.tokens // self.iterations

    def bare(self, *, is_replay: bool = False) -> ForwardPass:
        """Return the same pass, not yet computed. is_replay: as the log replays it."""
        return replace(self, is_replay=is_replay, done=0, chunk_outputs={})

    @property
    def must_be_whole(self) -> bool:
        """Whether computing it in chunks would change the result."""
        return self.attend.mask == "full" or not self.attend.write or None in self.axes.values()

    @property
    def next_position(self) -> Position:
        """Position after this pass."""
        match self.attend.positions:
            case "running":
                return self.position + self.tokens
            case "shared":
                return self.position + self.iterations
            case "given":
                return self.after

    def restart(self) -> None:
        """Discard what was computed: its pages are gone."""
        self.done = 0
        self.chunk_outputs = {}


def _joined(values: list[Tensor]) -> Tensor:
    """Join the outputs of chunks. A chunk of one token may have given its value without the axis of tokens."""
    if len(values) == 1:
        return values[0]
    most = max(value.dim() for value in values)
    return torch.cat([value if value.dim() == most else value[None] for value in values])


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A span of the cache. `forward` is None for causal ids at running positions, which the slot's history holds."""

    tokens: int
    position: Position
    forward: ForwardPass | None = None


@dataclass(slots=True)
class KnownIterations:
    """Iterations of a resident loop that an earlier attempt of its request computed.

    ids: int64 [n], drawn. values: int64 [n, width], of the module's `known_ports`. taken: those that are in the cache.
    states: input port -> carried value before the next one, [1, ...].
    """

    ids: np.ndarray
    values: np.ndarray
    states: dict[str, Tensor] = field(default_factory=dict)
    taken: int = 0


@dataclass(slots=True, kw_only=True)
class LoopState(EngineLoop):
    """A loop of a branch. A resident one keeps its values in the arrays of the slots instead of `carried`.

    ahead: most iterations in one pass. lists: inputs with one entry per iteration, small ones still on the host.
    base: (resident) tokens in the cache before its first iteration.
    known: iterations of a resident loop that are taken from an earlier attempt, until all are.
    """

    lists: dict[str, Tensor] = field(default_factory=dict)
    ahead: int = 1
    base: int = 0
    known: KnownIterations | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPoint:
    """The state of a branch before a loop whose tokens are dropped at its end."""

    log: tuple[Logged, ...]
    logged: int
    position: Position


@dataclass(slots=True)
class Branch:
    """One KV cache of a request: a declared branch, or a candidate that was forked from one.

    slot: its place in the arrays, -1 before admission. parent: the branch that a candidate was forked from;
    shared: tokens that it shares with it, which its log leaves out. candidates: caches forked from this one.
    wants: ports, other than the sampled one, that its job takes. required: those that the module must return.
    is_starved: candidates of its job wait for slots, and none of them has one.
    saves_pages: its log does not tell how its tokens were computed, so a preemption copies its pages to `saved`.
    samples_apart: its last job had sampling parameters of its own.
    matcher: says which ids it may draw next, None without a grammar. It lives through preemptions.
    """

    request: KVRequest
    name: str
    chain: ContentChain
    slot: int = -1
    queue: deque[Job] = field(default_factory=deque)
    job: Job | None = None
    wants: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    forward: ForwardPass | None = None
    loop: LoopState | None = None
    replay: deque[ForwardPass] = field(default_factory=deque)
    log: list[Logged] = field(default_factory=list)
    logged: int = 0
    rollback: RollbackPoint | None = None
    is_evicted: bool = False
    is_reserved: bool = False
    is_decoding: bool = False
    in_flight: int = 0
    cached_tokens: int = 0
    waiting_since: float = float("inf")
    candidates: CandidateGroup | None = None
    parent: Branch | None = None
    shared: int = 0
    is_starved: bool = False
    saves_pages: bool = False
    samples_apart: bool = False
    saved: SavedPages | None = None
    matcher: Matcher | None = None

    @property
    def key(self) -> tuple[int, str]:
        """Its place in the queue: age of the request, then name."""
        return self.request.order, self.name

    @property
    def needs_slots(self) -> bool:
        """Whether it can run only after others have freed slots."""
        return self.slot < 0 or self.is_starved

    @property
    def runs_candidates(self) -> bool:
        """Whether its job is run by its candidates."""
        return self.candidates is not None and self.candidates.job is not None

    @property
    def current(self) -> ForwardPass | None:
        """The pass to compute next."""
        return self.replay[0] if self.replay else self.forward

    @property
    def loop_state(self) -> LoopState:
        """Its loop, which must be in progress."""
        assert self.loop is not None
        return self.loop

    @property
    def emits(self) -> bool:
        """Whether its loop reports each iteration."""
        return self.job is not None and self.job.loop is not None and bool(self.job.loop.emit)

    @property
    def has_work(self) -> bool:
        """Whether a job runs or waits here."""
        return self.job is not None or bool(self.queue)

    def record(self, entry: Logged) -> None:
        """Append to the log; adjacent spans of ids become one entry."""
        self.logged += entry.tokens
        last = self.log[-1] if self.log else None
        if last and last.forward is None and entry.forward is None and last.position + last.tokens == entry.position:
            self.log[-1] = Logged(tokens=last.tokens + entry.tokens, position=last.position)
        else:
            self.log.append(entry)

    def forget(self, tokens: int) -> None:
        """Take the last tokens out of the log again. They are ids of a resident loop that had already ended."""
        last = self.log.pop()
        assert last.forward is None and last.tokens >= tokens, "a loop ends before the pass that follows it"
        self.logged -= tokens
        if last.tokens > tokens:
            self.log.append(Logged(tokens=last.tokens - tokens, position=last.position))

    def clear(self) -> None:
        """Drop all work of this branch."""
        self.queue.clear()
        self.replay.clear()
        self.job = self.forward = self.loop = self.saved = None


@dataclass(slots=True)
class KVRequest:
    """A request at this node. order: its age, small is old. last_values: last value of each carried port.

    slots: all slots it holds; spare: those that no candidate uses; claimed: slots for candidates that it keeps for as
    long as it lives. adapter: row of its LoRA adapter, -1 without one. grammar: of its ids, None without one.
    session: whose lease on its pages lasts `lease_s` seconds after its end; empty without one.
    memory: the branch that the others read, see `KVSpec.memory`.
    """

    handle: Handle
    order: int
    sampling: SamplingParams
    branches: dict[str, Branch] = field(default_factory=dict)
    last_values: dict[str, Tensor] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    claimed: int = 0
    is_failed: bool = False
    adapter: int = -1
    grammar: Grammar | None = None
    session: str = ""
    lease_s: float = 0.0
    memory: str | None = None

    @property
    def is_compiling(self) -> bool:
        """Whether its grammar is not compiled yet, so that nothing of it runs."""
        return self.grammar is not None and not self.grammar.is_ready

    def memory_of(self, branch: Branch) -> Branch | None:
        """Return the branch that another one reads as its memory, None without one."""
        return self.branches[self.memory] if self.memory is not None and branch.name != self.memory else None

    def sequences(self) -> Iterator[Branch]:
        """Yield every cache of the request: each branch, then its candidates."""
        for branch in self.branches.values():
            yield branch
            if branch.candidates is not None:
                yield from branch.candidates.branches


@dataclass(slots=True, kw_only=True)
class CandidateJob(Job):
    """The share of one candidate in a job of several, `whole`."""

    whole: Job
    group: CandidateGroup
    index: int


@dataclass(slots=True, kw_only=True)
class CandidateGroup:
    """The candidates of one branch, and what they have produced for their job. Owned by that branch.

    takes_turns: nothing of a candidate outlives its share of the job, so each is freed when it ends. is_for_loop: they
    live as long as a loop. job: what they run, None between jobs. entered: how many have a slot.
    last_values: last values of each candidate's carried ports. stacked: outputs of finished candidates, by port, on a
    first axis of all candidates; filled: how many have theirs there. An output is moved, never held twice: one frame of
    each of hundreds of candidates is half a gigabyte.
    """

    parent: Branch
    branches: list[Branch] = field(default_factory=list)
    takes_turns: bool = False
    is_for_loop: bool = False
    job: Job | None = None
    entered: int = 0
    done: dict[int, Done] = field(default_factory=dict)
    last_values: list[dict[str, Tensor]] = field(default_factory=list)
    stacked: dict[str, Tensor] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    _iterations: list[deque[dict[str, Tensor]]] = field(default_factory=list)
    _last: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    _emitted: int = 0

    def begin(self, job: Job) -> None:
        """Start the next job."""
        self.job = job
        self.done = {}
        self.stacked, self.filled = {}, {}
        self.last_values = [{} for _ in self.branches]
        self._iterations = [deque() for _ in self.branches]
        self._last = {}
        self._emitted = 0

    def add_iteration(self, index: int, outputs: dict[str, Tensor]) -> None:
        """Note what a candidate emitted in its next iteration."""
        self._iterations[index].append(outputs)

    def emissions(self) -> Iterator[Emission]:
        """Yield the iterations that all candidates have ended. One that stopped earlier repeats its last values."""
        assert self.job is not None
        queues = self._iterations
        while any(queues) and all(queue or index in self.done for index, queue in enumerate(queues)):
            for index, queue in enumerate(queues):
                if queue:
                    self._last[index] = queue.popleft()
            values = [self._last[index] for index in range(len(self.branches)) if index in self._last]
            if len(values) == len(self.branches):
                yield Emission(job=self.job, iteration=self._emitted, outputs=stack_ports(values))
            self._emitted += 1

    def store(self, finished: Sequence[int]) -> None:
        """Move the outputs of finished candidates (ascending) to their places in `stacked`, one copy per run.

        An output of another shape than the first one's stays where it is; `outputs` then raises.
        """
        for port in sorted({port for index in finished for port in self.done[index].outputs}):
            outputs = [
                (index, self.done[index].outputs[port]) for index in finished if port in self.done[index].outputs
            ]
            if port not in self.stacked:
                first = outputs[0][1]
                self.stacked[port] = first.new_empty((len(self.branches), *first.shape))
            whole, start = self.stacked[port], 0
            outputs = [(index, value) for index, value in outputs if value.shape == whole.shape[1:]]
            for end in range(1, len(outputs) + 1):
                if end == len(outputs) or outputs[end][0] != outputs[end - 1][0] + 1:
                    run = outputs[start:end]
                    gather([value for _, value in run], whole[run[0][0] : run[-1][0] + 1])
                    start = end
            for index, _ in outputs:
                del self.done[index].outputs[port]
                self.last_values[index].pop(port, None)
            self.filled[port] = self.filled.get(port, 0) + len(outputs)

    def outputs(self) -> dict[str, Tensor]:
        """Return the stacked outputs, without ports that a candidate lacks. Raises EngineError for unequal shapes."""
        for done in self.done.values():
            for port, value in done.outputs.items():
                raise _unequal_shapes(port, [value.shape, self.stacked[port].shape[1:]])
        return {port: whole for port, whole in self.stacked.items() if self.filled[port] == len(self.branches)}

    @property
    def is_complete(self) -> bool:
        """Whether every candidate has ended."""
        return len(self.done) == len(self.branches)


def stack_ports(values: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the candidates' values by port, without ports that one lacks. Raises EngineError if shapes differ."""
    ports = [port for port in values[0] if all(port in outputs for outputs in values)] if values else []
    stacked = {}
    for port in ports:
        tensors = [outputs[port] for outputs in values]
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            raise _unequal_shapes(port, [tensor.shape for tensor in tensors])
        stacked[port] = torch.stack(tensors)
    return stacked


def _unequal_shapes(port: str, shapes: Sequence[torch.Size]) -> EngineError:
    different = sorted({str(list(shape)) for shape in shapes})
    return EngineError(f"candidates of one job gave {port!r} in different shapes", ", ".join(different))
