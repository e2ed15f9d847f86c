"""Everything a worker keeps of one request: walks under way, values, streams, counts. Freed in one function."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mstar_core.engine.base import Handle, JobKey, SamplingParams
from mstar_core.graph.runtime.actions import Iteration, Key
from mstar_core.graph.spec.nodes import PARAM_PREFIX, Sampling
from mstar_core.messages.flow import Value
from mstar_core.messages.work import OpenRequest, RunWalk
from mstar_core.plugin.params import param_specs
from mstar_core.worker.stream_inbox import StreamInbox

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.compile.cut import RankWalk
    from mstar_core.graph.runtime.walk_state import WalkState
    from mstar_core.worker.stream_loop import RelayRun
    from mstar_core.worker.tracing import Tally


@dataclass(slots=True)
class ActiveRun:
    """One run of one walk on this rank.

    values: what tasks produced and somebody still needs. flags: (first, last) of the chunk of each iteration.
    signals: port -> key of the value that the program asked to keep. relay: set where the run goes without readiness.
    tallies: time of firings inside loops, by node.
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
    relay: RelayRun | None = None
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.message.run


@dataclass(slots=True)
class WaitingChunk:
    """A walk that waits for the next chunk of a stream, since a time of the executor's clock."""

    run: ActiveRun
    address: int
    iteration: Iteration
    since: float = 0.0


@dataclass(slots=True)
class WorkerRequest:
    """One request on this worker. Owned by `Executor`; ended by `Executor.close` alone.

    queues: runs handed over and not begun, by partition. held: what output ports of nodes last held.
    signals: values kept for the program, by key.
    early: values from other ranks for runs that have not begun here.
    streamed: items sent on each stream to another rank; produced: streams whose items were made and stay here.
    emitted: outputs sent to the api from here. tokens: ids drawn here. waited_s: in queues of nodes here.
    counts, cached_tokens: of the runs that ended here.
    """

    handle: Handle
    params: Mapping[str, Any]
    numbers: Mapping[str, float | int | bool]
    seed: int
    homes: Mapping[str, int]
    outputs: frozenset[str]
    opened_s: float
    queues: dict[str, deque[RunWalk]] = field(default_factory=dict)
    active: dict[str, ActiveRun] = field(default_factory=dict)
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
    emitted_units: int = 0
    first_output_s: float | None = None
    tokens: int = 0
    waited_s: float = 0.0

    def run_numbered(self, number: int) -> ActiveRun | None:
        """The active run with that number."""
        return next((run for run in self.active.values() if run.number == number), None)

    def count(self, counts: Mapping[str, int], cached_tokens: int) -> None:
        """Add what a run counted that ended here."""
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.cached_tokens += cached_tokens


def parameter_numbers(params_type: type[Any], values: Mapping[str, Any], seed: int) -> dict[str, float | int | bool]:
    """Parameters as nodes read them: numbers and booleans as they are, choices by index; `seed` is the one in force."""
    numbers: dict[str, float | int | bool] = {}
    for spec in param_specs(params_type):
        value = values.get(spec.name)
        if isinstance(value, (bool, int, float)):
            numbers[spec.name] = value
        elif spec.choices and value in spec.choices:
            numbers[spec.name] = spec.choices.index(value)
    return {**numbers, "seed": seed}


def parameter_name(input_name: str) -> str:
    """The parameter behind an input name made by `from_param`."""
    return input_name.removeprefix(PARAM_PREFIX)


def sampling_params(sampling: Sampling | None, values: Mapping[str, Any], seed: int) -> SamplingParams:
    """How a node draws ids for a request, from its parameters by their usual names behind the node's prefix."""
    if sampling is None:
        return SamplingParams(seed=seed)

    def value(name: str, default: float) -> float:
        found = values.get(sampling.prefix + name)
        return default if found is None else float(found)

    return SamplingParams(
        temperature=value("temperature", 0.0),
        top_p=value("top_p", 1.0),
        top_k=int(value("top_k", 0)),
        min_p=value("min_p", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        seed=seed,
    )


def opened(message: OpenRequest, params_type: type[Any], now: float) -> WorkerRequest:
    """The worker's side of a request that was just announced."""
    return WorkerRequest(
        handle=Handle(message.handle),
        params=message.params,
        numbers=parameter_numbers(params_type, message.params, message.seed),
        seed=message.seed,
        homes=message.homes,
        outputs=frozenset(message.outputs),
        opened_s=now,
    )
