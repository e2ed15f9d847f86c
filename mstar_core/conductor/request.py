"""Conductor's record of one request: its programs, pending runs and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from mstar_core.conductor.arriving import ArrivingInput
from mstar_core.conductor.caches import CachePlaces
from mstar_core.conductor.resume import known_ids, saved_loops
from mstar_core.conductor.router import Homes
from mstar_core.errors import EngineError
from mstar_core.messages.requests import ErrorInfo, NewRequest
from mstar_core.messages.tensors import TensorRef
from mstar_core.messages.work import OpenRequest, RunInputRef, RunWalk, SignalRef, WalkDone
from mstar_core.plugin.program import (
    Answer,
    Fork,
    InputFact,
    ProgramGenerator,
    ProgramRequest,
    Run,
    RunInput,
    Segment,
    Signal,
    WalkResult,
    Wish,
)
from mstar_core.plugin.spec import ModelSpec, Partition
from mstar_core.transport.message_parts import inline_bytes, inline_numbers


@dataclass(slots=True)
class PendingRun:
    """One run in flight. waiting: ranks that have not reported their share."""

    walk: str
    waiting: set[int]
    reason: str = "done"
    counts: dict[str, int] = field(default_factory=dict)
    signals: dict[str, Signal] = field(default_factory=dict)
    values: dict[str, tuple[int | float, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class PartitionRun:
    """State of a partition's program. batch: whether it waits for a list of runs.

    wish: last value that it yielded. forks: forks that it yielded before that. finishes: whether nothing follows.
    taken: number of its runs so far. awaits: name of the growing input that it waits for, empty for none.
    """

    partition: Partition
    generator: ProgramGenerator
    pending: dict[int, PendingRun] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    batch: bool = False
    finished: bool = False
    wish: Wish | None = None
    forks: list[tuple[str, str]] = field(default_factory=list)
    finishes: bool = False
    taken: int = 0
    awaits: str = ""

    @property
    def place(self) -> str:
        """Place of its next run, the same in each attempt whatever the other partitions do."""
        return f"{self.partition.name}:{self.taken}"

    def next_wish(self, answer: Answer, *, first: bool = False) -> None:
        """Advance to the next wish with walks, or None at the end of the program, and collect forks before it.

        Raises the program's own errors, and EngineError when it goes on after a Run that finishes it.
        """
        self.forks = []
        self.wish = self.advance(answer, first=first)
        while isinstance(self.wish, Fork):
            self.forks.append((self.wish.source, self.wish.into))
            self.wish = self.advance(None)
        if self.finishes and self.wish is not None:
            raise EngineError(f"the program of partition {self.partition.name} went on after a Run that finishes it")
        self.finishes = any(run.finishes for run in self.runs[-1:])

    @property
    def runs(self) -> list[Run]:
        """Runs of the current wish."""
        match self.wish:
            case Run():
                return [self.wish]
            case list():
                return self.wish
            case _:
                return []

    def advance(self, answer: Answer, *, first: bool = False) -> Wish | None:
        """Send the program its answer and return its next wish, or None when it ended."""
        try:
            return next(self.generator) if first else self.generator.send(answer)
        except StopIteration:
            self.finished = True
            return None

    def report(self, done: WalkDone) -> bool:
        """Apply one rank's report. Returns whether every run of the wish is complete."""
        run = self.pending[done.run]
        run.waiting.discard(done.rank)
        run.counts.update(done.counts)
        run.values.update({port: tuple(numbers) for port, numbers in done.values.items()})
        if done.reason != "done":
            run.reason = done.reason
        return not any(pending.waiting for pending in self.pending.values())

    def answer(self) -> Answer:
        """Return the results of the completed wish and drop them."""
        runs = [self.pending.pop(number) for number in self.order]
        self.order.clear()
        results = [
            WalkResult(reason=run.reason, counts=run.counts, signals=run.signals, values=run.values) for run in runs
        ]
        return results if self.batch else results[0]


@dataclass(slots=True)
class ConductorRequest:
    """One request. Owned by `Conductor`; only `Conductor._end` ends it.

    walks: number of finished runs by walk. opening: message that its only rank gets with its first walks. is_told: a
    worker has reported its end to the api. caches: where its caches are, if it has nodes on several ranks. error: of a
    rank that could not read a tensor; it ends the request at `error_until` unless a death explains it before. growing:
    inputs that grow.
    """

    message: NewRequest
    facts: ProgramRequest
    homes: Homes
    partitions: dict[str, PartitionRun]
    deadline: float
    runs: int = 0
    length_stop: bool = False
    emitted: dict[int, int] = field(default_factory=dict)
    streamed: dict[int, dict[str, int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    walks: dict[str, int] = field(default_factory=dict)
    opening: OpenRequest | None = None
    is_told: bool = False
    caches: CachePlaces = field(default_factory=CachePlaces)
    error: ErrorInfo | None = None
    error_until: float = 0.0
    growing: dict[str, ArrivingInput] = field(default_factory=dict)

    @property
    def handle(self) -> int:
        return self.message.handle

    def has_failed(self, now: float) -> bool:
        """Return whether an error of a rank ends the request."""
        return self.error is not None and now >= self.error_until

    @property
    def is_finished(self) -> bool:
        return all(run.finished for run in self.partitions.values())

    def input(self, name: str) -> ArrivingInput:
        """Return an input that grows. Raises EngineError for any other."""
        found = self.growing.get(name)
        if found is None:
            raise EngineError(f"the input {name!r} does not grow in this request", f"growing: {sorted(self.growing)}")
        return found

    def waiting_for(self, run: int) -> PartitionRun | None:
        """Return the partition that has this run in flight."""
        return next((runs for runs in self.partitions.values() if run in runs.pending), None)

    def take(self, done: WalkDone) -> None:
        """Add one rank's counts to the request's."""
        self.emitted[done.rank] = max(done.emitted, self.emitted.get(done.rank, 0))
        self.streamed.setdefault(done.rank, {}).update(done.streamed)
        run = self.waiting_for(done.run)
        # Partitions that run for one modality of the answer read parts of the prompt again, with their own caches.
        if run is None or run.partition.wants is None:
            self.cached_tokens += done.cached_tokens
        self.is_told = self.is_told or done.is_told
        for name, count in done.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count

    def stream_total(self, stream: str) -> int:
        """Return the number of items on a stream. Ranks that follow each other on a stream count on."""
        return max((counts.get(stream, 0) for counts in self.streamed.values()), default=0)


def facts_of(message: NewRequest, spec: ModelSpec) -> ProgramRequest:
    """Return the request for its programs: facts about tensors, never tensors."""
    inputs = {
        name: InputFact(name=name, shape=tuple(ref.shape), dtype=ref.dtype) for name, ref in message.inputs.items()
    }
    last = len(message.segments) - 1
    segments = [
        Segment(
            kind=segment.kind,
            index=index,
            length=segment.length,
            is_last=index == last,
            inputs={
                n: InputFact(name=f"{index}/{n}", shape=tuple(r.shape), dtype=r.dtype)
                for n, r in segment.inputs.items()
            },
        )
        for index, segment in enumerate(message.segments)
    ]
    params = spec.params(**{name: tuple(v) if isinstance(v, list) else v for name, v in message.params.items()})
    return ProgramRequest(
        params=params,
        inputs=inputs,
        segments=segments,
        outputs=frozenset(message.outputs),
        facts=message.facts,
        growing=frozenset(message.growing),
    )


def run_message(
    request: ConductorRequest, run: Run, forks: list[tuple[str, str]], *, place: str, finishes: bool = False
) -> RunWalk:
    """Return the message of a Run. Raises EngineError when it names an input that the request lacks."""
    request.runs += 1
    limits = run.max_iters if run.max_iters is None or isinstance(run.max_iters, int) else dict(run.max_iters)
    inputs = {port: _input(request.message, port, value) for port, value in run.inputs.items()}
    return RunWalk(
        run=request.runs,
        walk=run.walk,
        max_iters=limits,
        branches=list(run.branches),
        rows=run.rows,
        sample=run.sample and not request.message.reads_only,
        keep=list(run.keep),
        inputs=inputs,
        forks=forks,
        homes=dict(request.homes.by_walk.get(run.walk, {})),
        finishes=finishes,
        contents={port: key for port, value in run.inputs.items() if (key := _content(request.message, port, value))},
        place=place if request.message.is_journaled else "",
        known=known_ids(request.message, place),
        saved=saved_loops(request.message, place),
        reads=list(run.reads),
        sampling=dict(run.sampling),
    )


def _content(message: NewRequest, port: str, value: RunInput) -> bytes:
    """Return the key of what determines an input, empty if unknown. The tensors of a segment differ by name."""
    if not isinstance(value, Segment) or not message.segments[value.index].content:
        return b""
    return message.segments[value.index].content + port.encode()


def _input(message: NewRequest, port: str, value: RunInput) -> RunInputRef:
    ref: TensorRef | None
    match value:
        case Signal():
            return SignalRef(key=value.key, rank=value.rank)
        case Segment():
            refs = message.segments[value.index].inputs
            ref = refs.get(port) or (next(iter(refs.values())) if len(refs) == 1 else None)
        case InputFact():
            ref = _fact_input(message, value)
        case tuple():
            ref = inline_numbers(value)
    if ref is None:
        raise EngineError(f"the program uses input {port!r}, which the request does not have")
    return ref


def _fact_input(message: NewRequest, fact: InputFact) -> TensorRef | None:
    index, slash, name = fact.name.partition("/")
    if slash and index.isdigit():
        return message.segments[int(index)].inputs.get(name)
    return message.inputs.get(fact.name)


def inline_bytes_of(run: RunWalk) -> int:
    """Return the bytes of the tensors inside the message of a run."""
    saved = (ref for state in run.saved.values() for ref in state.values.values())
    return sum(map(inline_bytes, chain(run.inputs.values(), saved)))


def signal_map(done: WalkDone) -> Mapping[str, Signal]:
    """Return the values that a rank kept for the program, by port."""
    return {
        port: Signal(port=port, key=key, rank=done.rank, dtype=dtype, shape=tuple(shape))
        for port, (key, dtype, shape) in done.signals.items()
    }
