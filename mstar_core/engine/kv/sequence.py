"""Requests, their branches and the passes they wait for. Owned by the KV engine.

A branch keeps a log of what its cache was made of, so that it can be computed again after a preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.base import Emission, Job
from mstar_core.engine.transfers import gather
from mstar_core.errors import EngineError
from mstar_core.graph.spec.nodes import Attend

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Done, Handle, SamplingParams
    from mstar_core.engine.cache.prefix_cache import ContentChain


@dataclass(slots=True, kw_only=True)
class ForwardPass:
    """One pass of a branch through the module, computed whole or in chunks.

    ports: what the module gets; axes: axis along which each port is cut with the tokens (None: not cut).
    per_row: ports of which the row has one value, which go to the module stacked with those of other rows.
    Ids stay where they came from until a step takes them, so that they travel once and with all others.
    given: positions as a port brought them, tokens on the last axis. base: tokens in the cache before this pass.
    after: where given positions go on, known when they came. iterations: of a loop that it holds, one behind the other
    in the cache: each is a row of the module's own and sees itself and those before, and ports in per_row have them on
    a first axis where there is more than one.
    chunk_outputs: outputs of the chunks so far. is_replay: made from the log; it answers no job.
    """

    ports: dict[str, Tensor]
    axes: dict[str, int | None]
    tokens: int
    attend: Attend
    position: int
    base: int
    given: Tensor | None = None
    after: int = 0
    is_ids: bool = False
    is_replay: bool = False
    per_row: frozenset[str] = frozenset()
    iterations: int = 1
    done: int = 0
    chunk_outputs: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Tokens still to compute."""
        return self.tokens - self.done

    def of_rows(self, name: str) -> Sequence[Tensor]:
        """A port's value for each row of the module that this pass is."""
        return self.ports[name].unbind(0) if self.iterations > 1 else (self.ports[name],)

    @property
    def row_tokens(self) -> int:
        """Tokens of each row of the module that this pass is."""
        return self.tokens // self.iterations

    def bare(self, *, is_replay: bool = False) -> ForwardPass:
        """The same pass, not yet computed. is_replay: as the log has it computed again."""
        return ForwardPass(
            ports=self.ports, axes=self.axes, tokens=self.tokens, attend=self.attend, position=self.position,
            base=self.base, given=self.given, after=self.after, is_ids=self.is_ids, is_replay=is_replay,
            per_row=self.per_row, iterations=self.iterations,
        )  # fmt: skip

    @property
    def must_be_whole(self) -> bool:
        """Whether chunks would change the result."""
        return self.attend.mask == "full" or not self.attend.write or None in self.axes.values()

    @property
    def next_position(self) -> int:
        """Position after this pass."""
        match self.attend.positions:
            case "running":
                return self.position + self.tokens
            case "shared":
                return self.position + self.iterations
            case "given":
                return self.after

    def restart(self) -> None:
        """Forget what was computed: the pages are gone."""
        self.done = 0
        self.chunk_outputs = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A stretch of the cache. `forward` is None for ids that the slot's history holds (causal, running)."""

    tokens: int
    position: int
    forward: ForwardPass | None = None


@dataclass(slots=True, kw_only=True)
class LoopState:
    """A loop in progress. carried: input port -> value of the next iteration.

    ahead: most iterations that one pass may hold. lists: inputs that have an entry for each iteration, small ones where
    they came from.
    ready: what the next iterations gave, where a replay has run ahead; each is settled as if it had run by itself.
    """

    carried: dict[str, Tensor]
    lists: dict[str, Tensor] = field(default_factory=dict)
    ready: deque[dict[str, Tensor]] = field(default_factory=deque)
    iteration: int = 0
    limit: int = 0
    ahead: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPoint:
    """What a branch was before passes whose cache lives only as long as their loop."""

    log: tuple[Logged, ...]
    logged: int
    position: int


@dataclass(slots=True)
class Branch:
    """One cache of a request. slot: its place in the arrays, -1 before admission.

    rows: caches that go on from this one, with the job of several rows that they run. trunk: the branch that this one
    is a row of; base: tokens that it shares with it, which its log leaves out. is_kept_out: rows of its job wait for
    slots, and none of them has one.
    """

    request: KVRequest
    name: str
    chain: ContentChain
    slot: int = -1
    queue: deque[Job] = field(default_factory=deque)
    job: Job | None = None
    forward: ForwardPass | None = None
    loop: LoopState | None = None
    replay: deque[ForwardPass] = field(default_factory=deque)
    log: list[Logged] = field(default_factory=list)
    logged: int = 0
    mark: RollbackPoint | None = None
    is_evicted: bool = False
    is_reserved: bool = False
    is_decoding: bool = False
    in_flight: int = 0
    cached_tokens: int = 0
    waiting_since: float = float("inf")
    rows: CandidateGroup | None = None
    trunk: Branch | None = None
    base: int = 0
    is_kept_out: bool = False

    @property
    def lacks_slots(self) -> bool:
        """Whether it can do nothing before others give slots back."""
        return self.slot < 0 or self.is_kept_out

    @property
    def waits_for_rows(self) -> bool:
        """Whether its job is one of several rows, which run it."""
        return self.rows is not None and self.rows.job is not None

    @property
    def current(self) -> ForwardPass | None:
        """The pass to compute next."""
        return self.replay[0] if self.replay else self.forward

    @property
    def loop_state(self) -> LoopState:
        """Its loop, which is known to be in progress."""
        assert self.loop is not None
        return self.loop

    @property
    def is_told(self) -> bool:
        """Whether each iteration of its loop is told as it ends."""
        return self.job is not None and self.job.loop is not None and bool(self.job.loop.emit)

    @property
    def has_work(self) -> bool:
        """Whether a job runs or waits here."""
        return self.job is not None or bool(self.queue)

    def record(self, entry: Logged) -> None:
        """Append to the log; ids that follow ids without a gap become one entry."""
        self.logged += entry.tokens
        last = self.log[-1] if self.log else None
        if last and last.forward is None and entry.forward is None and last.position + last.tokens == entry.position:
            self.log[-1] = Logged(tokens=last.tokens + entry.tokens, position=last.position)
        else:
            self.log.append(entry)


@dataclass(slots=True)
class KVRequest:
    """A request at this node. order: age, small is old. held: what carried ports last held.

    slots: all it has. spare: those that no row uses; claimed: slots for rows that it keeps for as long as it lives.
    """

    handle: Handle
    order: int
    sampling: SamplingParams
    branches: dict[str, Branch] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    claimed: int = 0
    is_failed: bool = False

    def sequences(self) -> Iterator[Branch]:
        """Every cache of the request, rows after the branch that they go on from."""
        for branch in self.branches.values():
            yield branch
            if branch.rows is not None:
                yield from branch.rows.branches


@dataclass(slots=True, kw_only=True)
class CandidateJob(Job):
    """One row's share of a job of several rows, `whole`."""

    whole: Job
    group: CandidateGroup
    row: int


@dataclass(slots=True, kw_only=True)
class CandidateGroup:
    """The rows of one branch. Owned by that branch.

    takes_turns: nothing of a row outlives its share of the job, so that it is freed as it ends. is_for_loop: they last
    as long as a loop. job: what they run, None between two. entered: how many have a slot. held: what carried ports of
    each last held. made: what ended rows gave by port, laid together, and laid: of how many. It is never there twice:
    a frame of each of hundreds of candidates is half a gigabyte.
    """

    trunk: Branch
    branches: list[Branch] = field(default_factory=list)
    takes_turns: bool = False
    is_for_loop: bool = False
    job: Job | None = None
    entered: int = 0
    done: dict[int, Done] = field(default_factory=dict)
    held: list[dict[str, Tensor]] = field(default_factory=list)
    made: dict[str, Tensor] = field(default_factory=dict)
    laid: dict[str, int] = field(default_factory=dict)
    _untold: list[deque[dict[str, Tensor]]] = field(default_factory=list)
    _last: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    _told: int = 0

    def begin(self, job: Job) -> None:
        """Take the next job."""
        self.job = job
        self.done = {}
        self.made, self.laid = {}, {}
        self.held = [{} for _ in self.branches]
        self._untold = [deque() for _ in self.branches]
        self._last = {}
        self._told = 0

    def emissions(self) -> Iterator[Emission]:
        """Iterations that every row has told or will not have; a row that stopped earlier gives its last value."""
        assert self.job is not None
        while any(self._untold) and all(told or row in self.done for row, told in enumerate(self._untold)):
            for row, told in enumerate(self._untold):
                if told:
                    self._last[row] = told.popleft()
            values = [self._last[row] for row in range(len(self.branches)) if row in self._last]
            if len(values) == len(self.branches):
                yield Emission(job=self.job, iteration=self._told, outputs=stacked(values))
            self._told += 1

    def tell(self, row: int, outputs: dict[str, Tensor]) -> None:
        """A row ended an iteration."""
        self._untold[row].append(outputs)

    def lay(self, rows: Sequence[int]) -> None:
        """Move what rows that ended, ascending, gave to its place among all: a copy for each stretch of neighbours.

        What is of another shape than the first row's stays where it is, and shows when the job ends.
        """
        for port in sorted({port for row in rows for port in self.done[row].outputs}):
            given = [(row, self.done[row].outputs[port]) for row in rows if port in self.done[row].outputs]
            if port not in self.made:
                first = given[0][1]
                self.made[port] = first.new_empty((len(self.branches), *first.shape))
            whole, start = self.made[port], 0
            given = [(row, value) for row, value in given if value.shape == whole.shape[1:]]
            for end in range(1, len(given) + 1):
                if end == len(given) or given[end][0] != given[end - 1][0] + 1:
                    stretch = given[start:end]
                    gather([value for _, value in stretch], whole[stretch[0][0] : stretch[-1][0] + 1])
                    start = end
            for row, _ in given:
                del self.done[row].outputs[port]
                self.held[row].pop(port, None)
            self.laid[port] = self.laid.get(port, 0) + len(given)

    def outputs(self) -> dict[str, Tensor]:
        """What all rows gave, by port; one that some row lacks is left out. Raises EngineError for unlike shapes."""
        for done in self.done.values():
            for port, value in done.outputs.items():
                shapes = sorted({str(list(value.shape)), str(list(self.made[port].shape[1:]))})
                raise EngineError(f"rows of one job gave {port!r} in different shapes", ", ".join(shapes))
        return {port: whole for port, whole in self.made.items() if self.laid[port] == len(self.branches)}

    @property
    def is_complete(self) -> bool:
        """Whether every row has ended."""
        return len(self.done) == len(self.branches)


def stacked(shares: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Values of all rows on a first axis, by port. Ports that some row lacks are left out; raises EngineError."""
    ports = [port for port in shares[0] if all(port in share for share in shares)] if shares else []
    made = {}
    for port in ports:
        values = [share[port] for share in shares]
        if any(value.shape != values[0].shape for value in values):
            shapes = sorted({str(list(value.shape)) for value in values})
            raise EngineError(f"rows of one job gave {port!r} in different shapes", ", ".join(shapes))
        made[port] = torch.stack(values)
    return made
