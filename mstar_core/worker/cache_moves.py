"""Caches and inputs that change ranks before a run: exports here, imports there, and the runs that wait for them.

Called by the executor, with which it shares the requests. The conductor names the moves in the run (`gives`, `takes`)
and is not involved afterwards: the cache goes from worker to worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from mstar_core.engine.base import CacheState, Done, Export, Job
from mstar_core.engine.runner import NodeRunner
from mstar_core.errors import EngineError
from mstar_core.graph.compile.cut import RankWalk
from mstar_core.graph.declare.nodes import MAIN
from mstar_core.messages.flow import CacheMoved, Value
from mstar_core.messages.tensors import TensorRef
from mstar_core.messages.work import Move, RunWalk, SignalRef
from mstar_core.worker.job_table import Jobs
from mstar_core.worker.outbox import Outbox
from mstar_core.worker.state.request import MoveJob, MovingRun, WorkerRequest
from mstar_core.worker.state.walks import RankWalks, run_inputs
from mstar_core.worker.telemetry.tracing import EdgeCounters, Tracer, cache_edge

if TYPE_CHECKING:
    from torch import Tensor

RUN_INPUT: Final = -1
"""Task number of a `Value` that is an input of the run, kept by an earlier walk on the sender's rank."""


class MoveTarget(Protocol):
    """The part of the executor that moving runs call."""

    def read(self, ref: TensorRef) -> Tensor: ...

    def run_input(self, request: WorkerRequest, ref: TensorRef | SignalRef) -> Tensor: ...

    def begin_share(
        self, request: WorkerRequest, message: RunWalk, partition: str, share: RankWalk, inputs: Mapping[str, Tensor]
    ) -> None: ...

    def begin_next(self, request: WorkerRequest, partition: str) -> None: ...


class CacheMoves:
    """Moves before runs, and counts of them. Owned by the executor.

    sent, received: caches. sent_bytes, received_bytes: their size. transfer_s: from sending to import, summed over
    those that came from this host.
    """

    def __init__(
        self,
        rank: int,
        runners: Mapping[str, NodeRunner],
        jobs: Jobs,
        outbox: Outbox,
        walks: RankWalks,
        target: MoveTarget,
        tracer: Tracer,
        edges: EdgeCounters,
        clock: Callable[[], float],
    ) -> None:
        self.sent = self.sent_bytes = 0
        self.received = self.received_bytes = 0
        self.transfer_s = 0.0
        self._rank = rank
        self._runners = runners
        self._jobs = jobs
        self._outbox = outbox
        self._walks = walks
        self._target = target
        self._clock = clock
        self._tracer = tracer
        self._edges = edges

    def begin(self, request: WorkerRequest, partition: str, message: RunWalk, shares: Mapping[int, RankWalk]) -> None:
        """Send what leaves before a run, and begin its share here once everything that it takes has come."""
        share = shares.get(self._rank)
        names = run_inputs(share) if share is not None else set()
        moving = MovingRun(message, partition, share)
        request.moving[partition] = moving
        for name, ref in message.inputs.items():
            if isinstance(ref, SignalRef) and ref.rank == self._rank:
                self._send_input(request, message, name, ref, shares)
            if name in names:
                if isinstance(ref, SignalRef) and ref.rank != self._rank:
                    moving.missing.add(name)
                else:
                    moving.inputs[name] = self._target.run_input(request, ref)
        for move in message.gives:
            self._export(request, moving, move)
        moving.missing.update(message.takes)
        for item in request.arrived.pop(message.run, ()):
            self._import(request, moving, item)
        early = request.early.get(message.run, [])
        for value in [item for item in early if item.task == RUN_INPUT]:
            early.remove(value)
            self._take_input(moving, value)
        self._go_on(request, moving)

    def came(self, request: WorkerRequest, item: CacheMoved) -> None:
        """Take a cache of another rank. Its run may not have been reached yet."""
        moving = _numbered(request, item.run)
        if moving is None:
            request.arrived.setdefault(item.run, []).append(item)
        else:
            self._import(request, moving, item)

    def input_came(self, request: WorkerRequest, item: Value) -> None:
        """Take an input of a run that another rank has kept."""
        moving = _numbered(request, item.run)
        if moving is None:
            request.early.setdefault(item.run, []).append(item)
        else:
            self._take_input(moving, item)
            self._go_on(request, moving)

    def done(self, entry: MoveJob, done: Done) -> None:
        """Take the end of an export or an import."""
        request, moving, move = entry.request, entry.moving, entry.move
        if done.cache is not None:
            moving.exports -= 1
            self.sent += 1
            self.sent_bytes += done.cache.size_bytes
            self._edges.crossed(cache_edge(move.node), move.node, move.rank, done.cache.size_bytes, into=move.node)
            held = {port: value for (node, port), value in request.held.items() if node == move.node}
            streamed = {name: request.streamed.get(name, 0) for name in sorted(request.split_streams)}
            self._outbox.cache(move, int(request.handle), moving.message.run, done.cache, held, streamed)
        else:
            moving.missing.discard(move)
            self.received += 1
            self.received_bytes += entry.size_bytes
            if entry.sent:
                self._note_transfer(entry)
        self._go_on(request, moving)

    def _note_transfer(self, entry: MoveJob) -> None:
        """Count the time of a cache from another rank of this host."""
        move, transfer_s = entry.move, max(0.0, self._clock() - entry.sent)
        self.transfer_s += transfer_s
        self._tracer.cache_came(entry.request, move.node, entry.moving.message.walk, entry.sent, entry.size_bytes)
        self._edges.arrived(cache_edge(move.node), move.node, move.rank, transfer_s)

    def counters(self) -> dict[str, float]:
        """Return the counts for telemetry; empty without moves."""
        if not (self.sent or self.received):
            return {}
        return {
            "moves_sent": self.sent,
            "moves_sent_bytes": self.sent_bytes,
            "moves_received": self.received,
            "moves_received_bytes": self.received_bytes,
            "moves_s": round(self.transfer_s, 6),
        }

    # -- parts of a run's beginning ----------------------------------------------------------------------------------

    def _send_input(
        self, request: WorkerRequest, message: RunWalk, name: str, ref: SignalRef, shares: Mapping[int, RankWalk]
    ) -> None:
        for rank, share in shares.items():
            if rank != self._rank and name in run_inputs(share):
                value = request.signals[ref.key]
                self._outbox.value(rank, int(request.handle), message.run, RUN_INPUT, name, [], value)

    def _take_input(self, moving: MovingRun, item: Value) -> None:
        if item.ref is None or item.port not in moving.missing:
            raise EngineError(f"walk {moving.message.walk} did not wait for input {item.port!r} of another rank")
        moving.inputs[item.port] = self._target.read(item.ref)
        moving.missing.discard(item.port)

    def _export(self, request: WorkerRequest, moving: MovingRun, move: Move) -> None:
        moving.exports += 1
        export = Export(self._walks.carried(move.node))
        self._submit(MoveJob(request, moving, move, self._clock()), export)

    def _import(self, request: WorkerRequest, moving: MovingRun, item: CacheMoved) -> None:
        move = Move(item.node, item.branch, item.source)
        if move not in moving.missing:
            raise EngineError(f"rank {item.source} sent a cache of {item.node} that walk {moving.message.walk} lacks")
        read = self._target.read
        state = CacheState(
            length=item.length,
            position=item.position,
            last=item.last,
            drawn=item.drawn,
            history=read(item.history),
            seen=None if item.seen is None else read(item.seen),
            counts=None if item.counts is None else read(item.counts),
            answer=None if item.answer is None else read(item.answer),
            pages=tuple(read(ref) for ref in item.pages),
            last_values={port: read(ref) for port, ref in item.values.items()},
        )
        for port, ref in item.held.items():
            value = read(ref)
            if move.branch == MAIN or (move.node, port) not in request.held:
                request.held[move.node, port] = value
        for stream, count in item.streamed.items():
            request.streamed[stream] = max(count, request.streamed.get(stream, 0))
        entry = MoveJob(request, moving, move, self._clock(), sent=item.sent, size_bytes=state.size_bytes)
        self._submit(entry, state)

    def _submit(self, entry: MoveJob, move: Export | CacheState) -> None:
        runner = self._runners.get(entry.move.node)
        if runner is None or not runner.has_cache:
            raise EngineError(f"node {entry.move.node} has no cache on this rank", node=entry.move.node)
        job = Job(key=self._jobs.next_key(), handle=entry.request.handle, branch=entry.move.branch, move=move)
        self._jobs.submit(runner, job, entry)

    def _go_on(self, request: WorkerRequest, moving: MovingRun) -> None:
        """Begin the share once nothing is missing. The next run begins after the share and all exports."""
        if moving.missing:
            return
        if moving.share is not None and not moving.has_begun:
            moving.has_begun = True
            self._target.begin_share(request, moving.message, moving.partition, moving.share, moving.inputs)
        if not moving.exports and request.moving.get(moving.partition) is moving:
            del request.moving[moving.partition]
            self._target.begin_next(request, moving.partition)


def _numbered(request: WorkerRequest, run: int) -> MovingRun | None:
    return next((moving for moving in request.moving.values() if moving.message.run == run), None)
