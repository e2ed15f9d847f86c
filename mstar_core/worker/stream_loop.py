"""Relays: walks that are one loop over a stream around one stateless node, the usual shape of a codec.

Their iterations follow from the stream alone, so no readiness is asked: a chunk is one job, its outputs leave, the next
chunk is taken. That is what a window of sound costs on the host, several hundred times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from mstar_core.engine.base import Job
from mstar_core.graph.compile.compiled import ROOT, CompiledLoop, CompiledTask, Kind
from mstar_core.graph.spec.nodes import CHUNK_FIRST, CHUNK_LAST, STATELESS, STEP
from mstar_core.worker.request import ActiveRun, WaitingChunk, WorkerRequest, parameter_name

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.base import NodeRunner
    from mstar_core.graph.compile.cut import RankWalk
    from mstar_core.graph.spec.streams import Chunk
    from mstar_core.messages.work import RunWalk
    from mstar_core.worker.jobs import Jobs
    from mstar_core.worker.streams import Streams

Emits = Callable[[WorkerRequest, str, str, "Tensor", dict[str, int]], None]
EndsWalk = Callable[[WorkerRequest, ActiveRun, str, dict[str, int]], None]

CHANGING: Final = frozenset((STEP, CHUNK_FIRST, CHUNK_LAST))
"""Special inputs that differ from chunk to chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """What is the same for every run of such a walk.

    chunk: the port that takes the chunk. changing: ports by their special name. fixed: number of an input -> name of a
    parameter (as `$param:x`) or of a Run's input. outputs: ports that leave.
    """

    loop: CompiledLoop
    task: CompiledTask
    stream: str
    chunk: str
    changing: tuple[tuple[str, str], ...]
    fixed: tuple[tuple[str, str, bool], ...]
    outputs: tuple[str, ...]

    def takes(self, message: RunWalk, given: Collection[str]) -> bool:
        """Whether a run can go this way: nothing is asked of it that needs more than its chunks."""
        inputs_are_there = all(name in given for _, name, is_parameter in self.fixed if not is_parameter)
        return message.max_iters is None and message.rows == 1 and not message.keep and inputs_are_there


@dataclass(slots=True, kw_only=True)
class RelayRun:
    """Where one run of a relay is. fixed, numbers: inputs that every job gets. count: chunks that became jobs."""

    relay: Relay
    fixed: Mapping[str, Tensor]
    numbers: Mapping[str, float | int | bool]
    runner: NodeRunner
    count: int = 0


class RelayJob(NamedTuple):
    """A job that is one chunk of a relay."""

    request: WorkerRequest
    run: ActiveRun
    step: int
    since: float = 0.0


def relay_of(share: RankWalk) -> Relay | None:
    """The relay that a rank's share of a walk is, or None."""
    walk = share.walk
    if len(walk.tasks) != 1 or len(walk.loops) != 1 or len(share.tasks) != 1:
        return None
    loop, task = walk.loops[0], walk.tasks[0]
    over = loop.loop.over
    is_plain = over is not None and loop.tap == 0 and loop.parent == ROOT and not (loop.variables or loop.results)
    has_rule = loop.stop_task is not None or loop.loop.stop is not None
    if not is_plain or has_rule or task.holds or task.node.spec.engine is not STATELESS:
        return None
    assert over is not None
    chunk, changing, fixed = "", [], []
    for entry in task.inputs:
        match entry.source.kind:
            case Kind.CHUNK:
                chunk = entry.port
            case Kind.SPECIAL if entry.source.port in CHANGING:
                changing.append((entry.port, entry.source.port))
            case Kind.SPECIAL | Kind.RUN as kind:
                fixed.append((entry.port, entry.source.port, kind is Kind.SPECIAL))
            case _:
                return None
    return Relay(
        loop=loop, task=task, stream=over.name, chunk=chunk, changing=tuple(changing), fixed=tuple(fixed),
        outputs=tuple(dict.fromkeys(outlet.port for outlet in task.outlets)),
    )  # fmt: skip


class Relays:
    """Runs relays. Owned by the executor."""

    def __init__(self, jobs: Jobs, streams: Streams, emit: Emits, end_walk: EndsWalk) -> None:
        self._jobs = jobs
        self._streams = streams
        self._emit = emit
        self._end_walk = end_walk

    def begin(self, request: WorkerRequest, run: ActiveRun, relay: Relay) -> None:
        """Take the first chunk, now or when it comes."""
        fixed = {port: run.inputs[name] for port, name, is_parameter in relay.fixed if not is_parameter}
        asked = {port: parameter_name(name) for port, name, is_parameter in relay.fixed if is_parameter}
        numbers = {port: request.numbers[name] for port, name in asked.items() if name in request.numbers}
        run.relay = RelayRun(relay=relay, fixed=fixed, numbers=numbers, runner=self._jobs.runner(relay.task))
        self._want(request, run)

    def chunk(self, request: WorkerRequest, run: ActiveRun, popped: tuple[Chunk, Tensor] | None) -> None:
        """A chunk becomes a job; without one the walk is over."""
        state = run.relay
        assert state is not None
        relay = state.relay
        if popped is None:
            self._end_walk(request, run, "done", {relay.loop.name: state.count})
            return
        chunk, items = popped
        numbers = dict(state.numbers)
        for port, name in relay.changing:
            numbers[port] = state.count if name == STEP else chunk.first if name == CHUNK_FIRST else chunk.last
        job = Job(
            key=self._jobs.next_key(),
            handle=request.handle,
            inputs={**state.fixed, relay.chunk: items},
            numbers=numbers,
            outputs=relay.outputs,
            urgency=self._jobs.urgency(request),
        )
        step, state.count = state.count, state.count + 1
        self._jobs.submit(state.runner, job, RelayJob(request, run, step, self._jobs.now()))

    def done(self, entry: RelayJob, outputs: Mapping[str, Tensor]) -> None:
        """What a job made leaves, and the next chunk is taken."""
        request, run = entry.request, entry.run
        state = run.relay
        assert state is not None
        for outlet in state.relay.task.outlets:
            value = outputs.get(outlet.port)
            if value is None:
                continue
            if outlet.stream is not None:
                self._streams.put(request, outlet.stream, value)
            elif outlet.modality is not None:
                self._emit(request, outlet.port, outlet.modality, value, {"step": entry.step})
        self._want(request, run)

    def _want(self, request: WorkerRequest, run: ActiveRun) -> None:
        assert run.relay is not None
        request.waiting[run.relay.relay.stream] = WaitingChunk(run, 0, (), self._jobs.now())
        self._streams.serve(request, run.relay.relay.stream)
