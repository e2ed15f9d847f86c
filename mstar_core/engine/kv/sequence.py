"""Requests, their branches and the passes they wait for. Owned by the KV engine.

A branch keeps a log of what its cache was made of, so that it can be computed again after a preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mstar_core.graph.spec.nodes import Attend

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import Handle, Job, SamplingParams
    from mstar_core.engine.cache.prefix_cache import ContentChain
    from mstar_core.engine.kv.candidates import RowSet


@dataclass(slots=True, kw_only=True)
class Firing:
    """One pass of a branch through the module, computed whole or in chunks.

    ports: what the module gets; axes: axis along which each port is cut with the tokens (None: not cut).
    per_row: ports of which the row has one value, which go to the module stacked with those of other rows.
    Ids stay where they came from until a step takes them, so that they travel once and with all others.
    given: positions as a port brought them, tokens on the last axis. base: tokens in the cache before this pass.
    after: where given positions go on, known when they came. iterations: of a loop that it holds, one behind the other
    in the cache: each is a row of the module's own and sees itself and those before, and ports in per_row have them on
    a first axis where there is more than one.
    parts: outputs of the chunks so far. is_replay: made from the log; it answers no job.
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
    parts: dict[str, list[Tensor]] = field(default_factory=dict)

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

    def bare(self, *, is_replay: bool = False) -> Firing:
        """The same pass, not yet computed. is_replay: as the log has it computed again."""
        return Firing(
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
        self.parts = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A stretch of the cache. `firing` is None for ids that the slot's history holds (causal, running)."""

    tokens: int
    position: int
    firing: Firing | None = None


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
class Mark:
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

    request: Request
    name: str
    chain: ContentChain
    slot: int = -1
    queue: deque[Job] = field(default_factory=deque)
    job: Job | None = None
    firing: Firing | None = None
    loop: LoopState | None = None
    replay: deque[Firing] = field(default_factory=deque)
    log: list[Logged] = field(default_factory=list)
    logged: int = 0
    mark: Mark | None = None
    is_evicted: bool = False
    is_reserved: bool = False
    is_decoding: bool = False
    in_flight: int = 0
    cached_tokens: int = 0
    waiting_since: float = float("inf")
    rows: RowSet | None = None
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
    def current(self) -> Firing | None:
        """The pass to compute next."""
        return self.replay[0] if self.replay else self.firing

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
        if last and last.firing is None and entry.firing is None and last.position + last.tokens == entry.position:
            self.log[-1] = Logged(tokens=last.tokens + entry.tokens, position=last.position)
        else:
            self.log.append(entry)


@dataclass(slots=True)
class Request:
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
