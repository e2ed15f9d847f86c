"""Execution of walks on one rank: turns actions of walk states into engine jobs, and step results into events.

Called by the worker's loop with messages and step results. An error in one request fails that request alone. `close`
frees everything of a request.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.config.graph_view import graph_of, stream_ends
from mstar_core.engine.base import Done, Emission, Handle, JobKey, LoopSpec, LoopStep, StepResult
from mstar_core.engine.runner import NodeRunner
from mstar_core.errors import EngineError, MstarError
from mstar_core.graph.compile.cut import RankWalk
from mstar_core.graph.declare.nodes import MAIN, STATELESS
from mstar_core.graph.declare.streams import Chunk
from mstar_core.graph.runtime.actions import (
    Action,
    AskStop,
    Emit,
    EndWalk,
    Fire,
    FireLoop,
    Free,
    Hold,
    Iteration,
    Key,
    Recall,
    Ref,
    Save,
    Send,
    ToStream,
    Want,
)
from mstar_core.graph.runtime.stream_walk import StreamWalk
from mstar_core.graph.runtime.walk_state import WalkState
from mstar_core.messages.flow import NO_SOUND, CacheMoved, Playing, StreamItems, StreamTensor, Value
from mstar_core.messages.requests import error_info
from mstar_core.messages.tensors import TensorRef
from mstar_core.messages.work import EndStream, OpenRequest, ReleaseSignal, RunWalk, RunWalks, SignalRef, WalkDone
from mstar_core.plugin.spec import ModelSpec
from mstar_core.plugin.surface import EVENTS, LOGPROBS, PROGRESS, units_of
from mstar_core.process.failures import attempt
from mstar_core.transport.shm import TensorTransport
from mstar_core.worker.adapters import RankAdapters
from mstar_core.worker.arrays import narrowed, to_tensor
from mstar_core.worker.cache_moves import RUN_INPUT, CacheMoves
from mstar_core.worker.incoming.arrivals import refs_of
from mstar_core.worker.incoming.reads import Incoming, TensorReads
from mstar_core.worker.incoming.run_inputs import RunInputs, lent_to
from mstar_core.worker.job_table import Jobs, feeder, leaving_ports, loop_job, loop_spec
from mstar_core.worker.journal import PlaceLog, draws_id
from mstar_core.worker.outbox import Outbox
from mstar_core.worker.state.feature_cache import FeatureCache, content_of, output_key
from mstar_core.worker.state.first_sound import FirstSounds
from mstar_core.worker.state.playback import Playback
from mstar_core.worker.state.request import (
    ActiveRun,
    ChunkJob,
    Feature,
    LoopJob,
    MoveJob,
    ReportedCounts,
    SpanTotal,
    TaskJob,
    UnderWay,
    WaitingChunk,
    WorkerRequest,
    opened,
    sampling_params,
)
from mstar_core.worker.state.values import (
    Number,
    described,
    gather,
    held_value,
    numbers_of,
    resolve,
    saved_starts,
    split_numbers,
    start_stops,
    stop_said,
    wanted_ports,
)
from mstar_core.worker.state.walks import RankWalks, run_inputs
from mstar_core.worker.streams import Streams, sent_items
from mstar_core.worker.telemetry.tracing import EdgeCounters, Tracer, jobs_of, node_at, node_of, parts_by_node

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledTask
    from mstar_core.worker.state.stream_inbox import StreamInbox

log = logging.getLogger(__name__)

SAVED_BYTES: Final = 256 << 20
"""Largest state of a loop that is saved. A loop with a larger one begins anew after a death."""

EARLY_S: Final = 0.25
"""Sound that the client still has when items are handed over early: time to make more of it."""


class Guard:
    """Isolation boundary around the work of one request: an error inside fails this request and no other."""

    __slots__ = ("_fail", "_request")

    def __init__(self, fail: Callable[[WorkerRequest, BaseException], None], request: WorkerRequest) -> None:
        self._fail = fail
        self._request = request

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if not isinstance(error, MstarError):
            log.error("request %d failed", self._request.handle, exc_info=error)
        self._fail(self._request, error)
        return True


class Executor:
    """The requests of one worker. Owned by the worker's loop. ended: counts of those whose last report is due."""

    def __init__(
        self,
        spec: ModelSpec,
        rank: int,
        runners: Mapping[str, NodeRunner],
        outbox: Outbox,
        transport: TensorTransport,
        clock: Callable[[], float],
        feature_cache_bytes: int = 0,
        incoming: TensorReads | None = None,
        adapters: RankAdapters | None = None,
    ) -> None:
        """incoming: reads of tensors that are not in the shared memory of this host. adapters: LoRA adapters here."""
        self.adapters = adapters or RankAdapters()
        self._incoming = Incoming() if incoming is None else incoming
        self.inputs = RunInputs(self._incoming)
        self.features = FeatureCache(feature_cache_bytes)
        self.requests: dict[Handle, WorkerRequest] = {}
        self.ended: list[ReportedCounts] = []
        self.unknown = 0
        self._spec = spec
        self._rank = rank
        self._runners = runners
        self._outbox = outbox
        self._transport = transport
        self._clock = clock
        self._walks = RankWalks(spec, rank)
        self._streams = Streams(spec, rank, outbox, self._chunk)
        self.tracer = Tracer(clock)
        audio = spec.output("audio")
        values_per_s = float(getattr(audio, "rate", 0) or 0) * float(getattr(audio, "channels", 1) or 1)
        self.playback = Playback(values_per_s, clock)
        graph = graph_of(spec)
        ends = stream_ends(graph)
        self.edges = EdgeCounters(rank, ends)
        self.playing_node = next((edge.source for edge in graph.edges if edge.modality == "audio"), "")
        feeders = {source for source, into in ends.values() if into == self.playing_node}
        self.first = FirstSounds(self.playing_node, feeders, self.playback, lambda: len(self.requests), self._missing)
        self._jobs = Jobs(runners, self.tracer, clock, self.first)
        self.moves = CacheMoves(rank, runners, self._jobs, outbox, self._walks, self, self.tracer, self.edges, clock)
        self._next_signal = 0
        self._with_branches = frozenset(node.owner.name for node in spec.nodes if node.of is not None)

    # -- messages -----------------------------------------------------------------------------------------------------

    def open(self, message: OpenRequest) -> None:
        """Open a request whose walks will follow."""
        request = opened(message, self._spec.params, self._clock())
        self.requests[request.handle] = request
        with self._guard(request):
            row = self.adapters.row(message.adapter)
            for name, runner in self._local_runners(request):
                sampling = sampling_params(self._spec.node(name).sampling, request.params, request.seed)
                runner.open(request.handle, sampling, message.max_tokens, message.rows, row)
                if message.session:
                    runner.lease(request.handle, message.session, message.lease_s)

    def end_session(self, session: str) -> None:
        """End what this rank keeps for a session."""
        for runner in self._runners.values():
            attempt(runner.end_lease, session)

    def run(self, message: RunWalks) -> None:
        """Queue walks of one partition. The first begins at once unless one of the partition is running."""
        if message.opens is not None:
            self.open(message.opens)
        request = self._open_request(message.handle)
        if request is None:
            return
        with self._guard(request):
            request.queues.setdefault(message.partition, deque()).extend(message.runs)
            for run in message.runs:
                self._begin_reads(request, run)
            self.begin_next(request, message.partition)

    def _begin_reads(self, request: WorkerRequest, message: RunWalk) -> None:
        """Begin to read the inputs and saved states of a run that are in the memory of another host."""
        if any(map(self._incoming.reads, lent_to(message))):
            share = self._walks.share(message.walk, {**request.homes, **message.homes})
            self.inputs.begin(request, message, set() if share is None else run_inputs(share))

    def begin_with_inputs(self) -> int:
        """Begin the runs whose inputs have come from another host. Returns their number."""
        waiting = self.inputs.take_waiting()
        for request, partition in waiting:
            if request.handle in self.requests:
                with self._guard(request):
                    self.begin_next(request, partition)
        return len(waiting) - self.inputs.waiting

    def end_stream(self, message: EndStream) -> None:
        """Set the total number of items of a stream."""
        request = self._open_request(message.handle)
        if request is None:
            return
        with self._guard(request):
            self._streams.inbox(request, message.stream).end(message.total)
            self._streams.serve(request, message.stream)

    def value(self, item: Value, sent: float = 0.0) -> None:
        """Take a value from another rank. sent: time of sending."""
        request = self._open_request(item.handle)
        if request is None:
            return
        with self._guard(request):
            if item.task == RUN_INPUT:
                self.moves.input_came(request, item)
                return
            run = request.run_numbered(item.run)
            if run is None:
                request.early.setdefault(item.run, []).append(item)
            else:
                if sent and item.ref is not None:
                    source = node_at(run.share.walk, item.task)
                    self.edges.arrived(item.port, source, request.homes.get(source, self._rank), self._clock() - sent)
                self._arrived(request, run, item)

    def stream_items(self, message: StreamItems) -> None:
        """Take ids of a stream from another rank, one per sequence of its step."""
        now = self._clock()
        for handle, index, value in zip(message.handles, message.index, message.ids, strict=True):
            request = self._open_request(handle)
            if request is None:
                continue
            with self._guard(request):
                inbox = self._streams.inbox(request, message.stream)
                inbox.came(message.sent, now)
                inbox.put_id(index, value)
                self._streams.serve(request, message.stream)

    def stream_tensor(self, message: StreamTensor) -> None:
        """Take one tensor item of a stream from another rank."""
        request = self._open_request(message.handle)
        if request is None:
            return
        with self._guard(request):
            inbox = self._streams.inbox(request, message.stream)
            inbox.came(message.sent, self._clock())
            inbox.put_tensor(message.index, self.read(message.ref))
            inbox.is_dry = message.is_dry
            self._streams.serve(request, message.stream)

    def hand_over_early(self) -> int:
        """Hand over items that wait for a whole chunk if the client's sound is about to run dry. Returns their streams.

        Their producers wait for an item of their own streams, such as more of a text that arrives while it is spoken.
        """
        due = [key for key, request in self._streams.held.items() if self._early_in_s(request) <= 0]
        for key in due:
            request = self._streams.held.pop(key)
            if self.requests.get(request.handle) is request:
                with self._guard(request):
                    self._streams.serve(request, key[1], is_early=True)
        return len(due)

    def early_in_s(self) -> float:
        """Return the seconds until `hand_over_early` has something to do, infinite if nothing waits."""
        return min((max(0.0, self._early_in_s(request)) for request in self._streams.held.values()), default=math.inf)

    def _early_in_s(self, request: WorkerRequest) -> float:
        is_open = self.requests.get(request.handle) is request
        return -self._jobs.urgency(request) - EARLY_S if is_open else 0.0

    def cache_moved(self, message: CacheMoved) -> None:
        """Take a cache of another rank."""
        request = self._open_request(message.handle)
        if request is None:
            return
        with self._guard(request):
            self.moves.came(request, message)

    def _open_request(self, handle: int) -> WorkerRequest | None:
        """Return the open request of a message. Counts the message as unknown if there is none."""
        request = self.requests.get(Handle(handle))
        self.unknown += request is None
        return request

    def release_signal(self, message: ReleaseSignal) -> None:
        """Free a value whose handle the program dropped."""
        request = self.requests.get(Handle(message.handle))
        if request is not None:
            request.signals.pop(message.key, None)

    def close(self, handle: Handle) -> None:
        """Free everything of a request, whatever its state. Never raises and ignores unknown handles."""
        request = self.requests.pop(handle, None)
        if request is None:
            return
        self.playback.ended(handle)
        self.ended.append(request.reported)
        attempt(self.edges.closed, request)
        attempt(self.tracer.closed, request, self._jobs.under_way)
        attempt(self.tracer.transfers, request, request.inboxes.values())
        for run in request.active.values():
            attempt(run.state.cancel)
        attempt(self._jobs.forget, request)
        for item in (item for items in request.early.values() for item in items):
            if item.ref is not None:
                attempt(self._outbox.read, item.ref)  # its run never begins here
        for ref in (ref for items in request.arrived.values() for item in items for ref in refs_of(item)):
            attempt(self._outbox.read, ref)
        attempt(self.inputs.closed, request)
        for runner in self._runners.values():
            attempt(runner.close, handle)

    @property
    def under_way(self) -> Collection[UnderWay]:
        """Jobs that runners have not finished."""
        return self._jobs.under_way.values()

    @property
    def importing_bytes(self) -> int:
        """Bytes of caches that came and have no pages yet."""
        return sum(entry.size_bytes for entry in self.under_way if isinstance(entry, MoveJob))

    def least_ahead_s(self) -> float | None:
        """Return the smallest number of seconds of audio ahead of playback, over all requests; None without any."""
        times = (self._jobs.ahead_s(request) for request in self.requests.values())
        return min((ahead_s for ahead_s in times if ahead_s is not None), default=None)

    def users(self, runners: Collection[str]) -> list[Handle]:
        """Return the requests that run a walk with one of these runners here, or hold slots of one; none: all."""
        if not runners:
            return list(self.requests)
        used = set[Handle]()
        for name in runners:
            contention = self._runners[name].contention()
            used |= set(contention.holding) | set(contention.waiting)
        for handle, request in self.requests.items():
            for run in request.active.values():
                tasks = run.share.walk.tasks
                if any(tasks[at].node.spec.owner.name in runners for at in run.share.tasks):
                    used.add(handle)
        return sorted(used & set(self.requests))

    def fail_waiting(self, runners: Collection[str], error: MstarError) -> None:
        """Fail the requests that wait for these runners."""
        for entry in list(self.under_way):
            if self._spec.node(node_of(entry)).owner.name in runners:
                self.fail(entry.request, error)

    def close_all(self) -> None:
        """Free every request, after the loss of the conductor."""
        for handle in list(self.requests):
            self.close(handle)

    # -- step results --------------------------------------------------------------------------------------------------

    def take(self, result: StepResult) -> None:
        """Route the results of one collected step."""
        self.tracer.step(result, self._jobs.under_way)
        if result.loop is not None:
            self._loop_step(result.loop, result.scores)
        for key, value in result.draws:
            drawing = self._jobs.under_way.get(key)
            if isinstance(drawing, LoopJob) and drawing.log is not None:
                drawing.log.drew(value)
        for emission in result.emissions:
            self._emission(emission, result.scores.get(emission.job.key))
        for done in result.done:
            self._job_done(done, result.scores.get(done.job.key))
        for failed in result.failed:
            entry = self._jobs.under_way.get(failed.job.key)
            if entry is not None:
                self.fail(entry.request, failed.error)

    def split(self, runner: str, result: StepResult) -> Mapping[str, StepResult]:
        """Divide a step among a node and its cache branches, by the jobs that it ran."""
        if runner not in self._with_branches:
            return {runner: result}
        entries = (self._jobs.under_way.get(key) for key in jobs_of(result))
        return parts_by_node(result, [node_of(entry) for entry in entries if entry is not None]) or {runner: result}

    def fail_handle(self, handle: int, error: BaseException) -> None:
        """End a request whose message could not be handled, if it is open here."""
        request = self.requests.get(Handle(handle))
        if request is not None:
            self.fail(request, error)

    def fail(self, request: WorkerRequest, error: BaseException) -> None:
        """End a request here and notify the conductor, which ends it on all ranks."""
        if request.handle not in self.requests:
            return
        self.close(request.handle)
        self._outbox.failed(request.handle, error_info(error, "the engine failed on this request"))

    def _loop_step(self, step: LoopStep, scores: Mapping[JobKey, np.ndarray]) -> None:
        # Cost model: once per sequence and decode step. It allocates no objects; ids are plain ints.
        jobs = self._jobs.under_way
        for key, value in zip(step.keys.tolist(), step.ids.tolist(), strict=True):
            entry = jobs.get(key)
            if type(entry) is not LoopJob:
                continue
            request = entry.request
            request.tokens += 1
            if entry.log is not None:
                entry.log.drew(value)
            try:
                if entry.inbox is not None:
                    if entry.inbox.take_id(value):
                        self._streams.serve(request, entry.inbox.stream.name)
                    continue
                for stream in entry.streams:
                    self._streams.put_id(request, stream, value)
                if entry.modality is not None:
                    self._emit(
                        request,
                        entry.port,
                        entry.modality,
                        torch.tensor([value]),
                        {},
                        scores.get(JobKey(key)) if scores else None,
                    )
            except MstarError as error:  # isolation boundary: one sequence
                self.fail(request, error)

    def _emission(self, emission: Emission, scores: np.ndarray | None) -> None:
        entry = self._jobs.under_way.get(emission.job.key)
        if not isinstance(entry, LoopJob):
            return
        request = entry.request
        with self._guard(request):
            if entry.log is not None:
                entry.log.emitted(emission.outputs)
            for outlet in entry.outlets:
                tensor = emission.outputs.get(outlet.port)
                if tensor is None:
                    continue
                if outlet.stream is not None:
                    self._streams.put(request, outlet.stream, tensor, is_dry=emission.is_dry)
                if outlet.modality is not None:
                    self._emit(request, outlet.port, outlet.modality, tensor, {"step": emission.iteration}, scores)

    def _job_done(self, done: Done, scores: np.ndarray | None) -> None:
        entry = self._jobs.end(done.job.key)
        if entry is None:
            return
        with self._guard(entry.request):
            match entry:
                case MoveJob():
                    self.moves.done(entry, done)
                case ChunkJob():
                    self._chunk_done(entry, done.outputs)
                case LoopJob():
                    self._loop_done(entry, done)
                case TaskJob():
                    self._task_done(entry, done, scores)

    def _loop_done(self, entry: LoopJob, done: Done) -> None:
        request, run = entry.request, entry.run
        run.cached_tokens += done.cached_tokens
        self.tracer.loop(entry, run.share.walk.tasks[entry.task].name, done)
        if entry.feed is not None:
            self._streams.end_feed(request, entry.feed, done.iterations)
        if entry.log is not None:
            run.note_drawn(run.share.walk.loops[entry.loop].name, done.iterations * entry.log.width)
        last = (*entry.iteration, done.iterations - 1)
        for port, tensor in done.outputs.items():
            run.values[Key(entry.task, port, last)] = tensor
        self._keep_signals(request, run, done.outputs)
        if entry.port in run.message.reads:
            run.read[entry.port] = done.drawn.tolist() if done.drawn is not None else []
        actions = run.state.loop_done(entry.loop, entry.iteration, done.reason, done.iterations, done.outputs)
        self._carry_out(request, run, actions)

    def _task_done(self, entry: TaskJob, done: Done, scores: np.ndarray | None) -> None:
        request, run = entry.request, entry.run
        run.cached_tokens += done.cached_tokens
        if entry.is_first_branch:
            entry.task_run.outputs = done.outputs
        entry.task_run.open_jobs -= 1
        if entry.task_run.open_jobs:
            return
        task, iteration, outputs = entry.task, entry.iteration, entry.task_run.outputs
        spec = run.share.walk.tasks[task].node.spec
        if spec.sampling is not None and spec.sampling.port in outputs:
            request.tokens += 1
            if entry.log is not None:
                entry.log.drew(int(outputs[spec.sampling.port]))
            if scores is not None:
                run.scores[Key(task, spec.sampling.port, iteration)] = scores
        self.tracer.task(entry, spec.name, is_looped=bool(iteration))
        if entry.feature is not None:
            self.features.put(entry.feature, outputs)
        self._finish_task(request, run, task, iteration, outputs)

    def _finish_task(
        self, request: WorkerRequest, run: ActiveRun, task: int, iteration: Iteration, outputs: Mapping[str, Tensor]
    ) -> None:
        """Hand the outputs of a task to its walk."""
        for port, tensor in outputs.items():
            run.values[Key(task, port, iteration)] = tensor
        self._keep_signals(request, run, outputs)
        stop = stop_said(request, run, task, outputs)
        self._carry_out(request, run, run.state.done(task, iteration, outputs, stop))

    def _keep_signals(self, request: WorkerRequest, run: ActiveRun, outputs: Mapping[str, Tensor]) -> None:
        for port in run.message.reads:
            if port in outputs:
                run.read[port] = numbers_of(port, outputs[port])
        for port in run.message.keep:
            if port in outputs:
                request.signals.pop(run.signals.get(port, -1), None)
                self._next_signal += 1
                run.signals[port] = self._next_signal
                request.signals[self._next_signal] = outputs[port]

    # -- walks ---------------------------------------------------------------------------------------------------------

    def begin_next(self, request: WorkerRequest, partition: str) -> None:
        """Begin the next run of a partition, if there is one and no other runs or moves."""
        queue = request.queues.get(partition)
        if partition in request.active or partition in request.moving or not queue:
            return
        if self.inputs.wait(request, partition, queue[0]):
            return
        message = queue.popleft()
        shares = self._walks.shares(message.walk, {**request.homes, **message.homes})
        for source, into in message.forks:
            for _, runner in self._local_runners(request):
                runner.fork(request.handle, source, into)
        share = shares.get(self._rank)
        if share is None or self._has_moves(message, shares):
            self.moves.begin(request, partition, message, shares)
            return
        names = run_inputs(share)
        inputs = {name: self.run_input(request, ref) for name, ref in message.inputs.items() if name in names}
        self.begin_share(request, message, partition, share, inputs)

    def _has_moves(self, message: RunWalk, shares: Mapping[int, RankWalk]) -> bool:
        """Whether caches or inputs change ranks before a run."""
        refs = [ref for ref in message.inputs.values() if isinstance(ref, SignalRef)]
        return bool(message.gives or message.takes) or any(len(shares) > 1 or ref.rank != self._rank for ref in refs)

    def begin_share(
        self, request: WorkerRequest, message: RunWalk, partition: str, share: RankWalk, inputs: Mapping[str, Tensor]
    ) -> None:
        """Begin this rank's share of a run."""
        branches = message.branches or [MAIN]
        if StreamWalk.fits(share, message.max_iters, inputs):
            state: WalkState = StreamWalk(share, message.inputs.keys())
        else:
            starts, firsts = saved_starts(share.walk, message.saved, partial(self.run_input, request))
            inputs = {**inputs, **starts}
            state = WalkState(share, message.max_iters, message.inputs.keys(), branches, firsts)
        run = ActiveRun(message, partition, share, state, inputs)
        if isinstance(state, StreamWalk):
            run.fixed = split_numbers(request, run, state.fixed, ())
            run.left_out = request.leave_out_chunks(state.task) if request.chunks else 0
        request.active[partition] = run
        self._carry_out(request, run, state.start())
        for item in request.early.pop(message.run, ()):
            if request.active.get(partition) is run:
                self._arrived(request, run, item)

    def _arrived(self, request: WorkerRequest, run: ActiveRun, item: Value) -> None:
        iteration = tuple(item.iteration)
        if item.ref is not None:
            run.values[Key(item.task, item.port, iteration)] = self.read(item.ref)
        self._carry_out(request, run, run.state.arrived(item.task, item.port, iteration, item.ref is not None))

    def _carry_out(self, request: WorkerRequest, run: ActiveRun, actions: list[Action]) -> None:
        """Carry out the actions of a walk state in order, those that they lead to included."""
        for action in actions:
            if request.handle not in self.requests:
                return
            match action:
                case Fire() as fire:
                    self._fire(request, run, fire)
                case Free(value):
                    run.values.pop(value, None)
                    run.scores.pop(value, None)
                case Want(address, stream, iteration):
                    request.waiting[stream] = WaitingChunk(run, address, iteration, self._clock())
                    self._streams.serve(request, stream)
                case FireLoop() as fire:
                    self._fire_loop(request, run, fire)
                case AskStop(loop, iteration, value):
                    actions += run.state.tested(loop, iteration, start_stops(request, run, loop, value))
                case Hold(node, port, value):
                    request.held[node, port] = run.values[value]
                case Recall(value, node, port):
                    run.values[value] = held_value(request, node, port)
                case Save(loop, iteration, refs):
                    self._save(request, run, loop, iteration, gather(request, run, refs, ()))
                case Emit(value, port, modality, iteration):
                    self._emit_value(request, run, value, port, modality, iteration)
                case ToStream(value, stream, _):
                    tensor = resolve(request, run, value)
                    if tensor is not None:
                        self._streams.put(request, stream, tensor)
                case Send(rank, address, port, iteration, value):
                    tensor = None if value is None else resolve(request, run, value)
                    if tensor is not None:
                        self.edges.crossed(port, node_at(run.share.walk, address), rank, tensor.nbytes)
                    self._outbox.value(rank, request.handle, run.number, address, port, list(iteration), tensor)
                case EndWalk(reason, counts):
                    self._end_walk(request, run, reason, counts)

    def _save(
        self, request: WorkerRequest, run: ActiveRun, loop: int, iteration: int, values: Mapping[str, Tensor]
    ) -> None:
        """Send the state of a loop to the api, unless it is large or the request has one attempt only."""
        if run.is_journaled and sum(value.nbytes for value in values.values()) <= SAVED_BYTES:
            place = f"{run.message.place}/{run.share.walk.loops[loop].name}"
            self._outbox.saved(request.handle, place, iteration, values)

    def _end_walk(self, request: WorkerRequest, run: ActiveRun, reason: str, counts: dict[str, int]) -> None:
        self.tracer.walk_ended(request, run)
        self._end_loops(request, run)
        run.values.clear()
        request.active.pop(run.partition, None)
        if request.handle in self.playback.heard and self._makes_sound(run):
            self.playback.ended(request.handle)
            self._tell(request, NO_SOUND, 0.0)
        if reason == "cancelled":
            return
        request.count(counts, run.cached_tokens)
        signals = {port: described(key, request.signals[key]) for port, key in run.signals.items()}
        self._report(request, run.message, reason, counts, signals, run.cached_tokens, run.read)
        if reason == "ended":
            self._skip_queued(request, run.partition)
        self.begin_next(request, run.partition)

    def _report(
        self,
        request: WorkerRequest,
        message: RunWalk,
        reason: str,
        counts: dict[str, int],
        signals: dict[str, tuple[int, str, list[int]]],
        cached_tokens: int,
        values: dict[str, list[int | float]] | None = None,
    ) -> None:
        """Report the end of this rank's share of a run."""
        if message.finishes:
            self._outbox.finished(request.handle, request.emitted, request.counts, request.cached_tokens)
        self._outbox.walk_done(
            WalkDone(
                handle=request.handle,
                run=message.run,
                rank=self._rank,
                reason=reason,
                counts=counts,
                emitted=request.emitted,
                streamed=sent_items(request),
                signals=signals,
                cached_tokens=cached_tokens,
                is_told=message.finishes,
                values=values or {},
            )
        )

    def _skip_queued(self, request: WorkerRequest, partition: str) -> None:
        """End the queued runs of a partition, which belong to the list of a run whose stream had no item for it."""
        queue = request.queues.get(partition)
        while queue:
            message = queue.popleft()
            share = self._walks.share(message.walk, {**request.homes, **message.homes})
            if share is None or len(share.tasks) < len(share.walk.tasks):
                raise EngineError(
                    f"walk {message.walk} cannot be skipped",
                    "it runs on several ranks, and a walk before it found its stream empty",
                    "run the walks one by one, and stop at the reason 'ended'",
                )
            self._report(request, message, "ended", {}, {}, 0)

    def _end_loops(self, request: WorkerRequest, run: ActiveRun) -> None:
        """Free the cached tokens that live as long as a loop of this walk."""
        if not self._walks.keeps_for_loops(run.share):
            return
        for _, runner in self._local_runners(request):
            runner.end_loops(request.handle)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _fire(self, request: WorkerRequest, run: ActiveRun, fire: Fire) -> None:
        task = run.share.walk.tasks[fire.task]
        branches = fire.branches or (MAIN,)
        outputs = wanted_ports(request, run, task)
        content = self._content(request, run, fire)
        feature = self._feature(task, outputs, content)
        known = None if feature is None else self.features.find(feature)
        if known is not None:
            self._finish_task(request, run, fire.task, fire.iteration, known)
            return
        numbers: dict[str, Number] = {}
        if task.node.spec.engine is STATELESS:
            inputs, numbers = split_numbers(request, run, fire.inputs, fire.iteration)
        else:
            inputs = gather(request, run, fire.inputs, fire.iteration)
        entry = TaskJob(
            request=request, run=run, task=fire.task, iteration=fire.iteration, since=self._clock(), feature=feature
        )
        entry.task_run.open_jobs = len(branches)
        for number, branch in enumerate(branches):
            sample = run.message.sample and number == 0
            wanted = outputs if number == 0 else ()
            rows = run.message.rows
            job = self._jobs.make(
                request, task, inputs, wanted, branch, sample=sample, rows=rows, content=content, numbers=numbers
            )
            job.sampling, job.suppress = run.message.sampling, task.node.suppress
            job.yields = request.sound.dry_at is None and task.node.spec.name != self.playing_node
            if sample and run.is_journaled and draws_id(task, job.outputs):
                draw = run.next_draw(task.name)
                entry.log, job.known = self._outbox.journal.of_draw(request.handle, *draw)
                run.note_drawn(task.name, 1)
            self._jobs.submit(self._jobs.runner(task), job, entry if number == 0 else entry.beside())

    def _fire_chunk(
        self, request: WorkerRequest, run: ActiveRun, state: StreamWalk, chunk: Chunk, items: Tensor
    ) -> None:
        """Run the task of a stream loop on a chunk."""
        task, entry = state.task, ChunkJob(request, run, state.count, SpanTotal(), self._clock())
        inputs, numbers = run.fixed
        inputs, numbers = {**inputs, state.chunk_port: items}, numbers | state.numbers(chunk)
        job = self._jobs.make(request, task, inputs, wanted_ports(request, run, task), MAIN, numbers=numbers)
        self._jobs.submit(self._jobs.runner(task), job, entry)

    def _chunk_done(self, entry: ChunkJob, outputs: Mapping[str, Tensor]) -> None:
        """Send the outputs of a stream loop's task, and take the next chunk."""
        request, run, state = entry.request, entry.run, entry.run.state
        assert isinstance(state, StreamWalk)
        self.tracer.task(entry, state.task.name, is_looped=False)
        for outlet in state.task.outlets:
            value = outputs.get(outlet.port)
            if value is None:
                continue
            if outlet.stream is not None:
                self._streams.put(request, outlet.stream, value)
            elif outlet.modality is not None:
                self._emit(request, outlet.port, outlet.modality, value, {"step": entry.step})
        self._await_chunk(request, run, state)
        self._streams.serve(request, state.stream)

    def _await_chunk(self, request: WorkerRequest, run: ActiveRun, state: StreamWalk) -> None:
        waiting = WaitingChunk(run, state.walk.address(0), (state.count,), self._clock())
        request.waiting[state.stream] = waiting

    def _content(self, request: WorkerRequest, run: ActiveRun, fire: Fire) -> bytes | None:
        """Return the key of what determines a task's inputs, and keep it for tasks that take its outputs."""
        task = run.share.walk.tasks[fire.task]
        is_stateless = task.node.spec.engine is STATELESS
        # Ids alone need no key, and nothing is kept of media whose processor gives none.
        if run.message.rows > 1 or task.path or (not run.message.contents and (is_stateless or len(fire.inputs) < 2)):
            return None
        content = content_of(fire.inputs, run, request.numbers, request.salt)
        if content is not None and is_stateless and len(fire.branches) <= 1:
            run.contents[fire.task] = output_key(task, content)
        return content

    def _feature(self, task: CompiledTask, outputs: tuple[str, ...], content: bytes | None) -> Feature | None:
        """Return the key under which the outputs of a stateless task may be known, or None."""
        if content is None or task.node.spec.engine is not STATELESS or not self.features.limit_bytes:
            return None
        return task.name, outputs, content

    def _fire_loop(self, request: WorkerRequest, run: ActiveRun, fire: FireLoop) -> None:
        task = run.share.walk.tasks[fire.task]
        loop = run.share.walk.loops[fire.loop]
        inputs = gather(request, run, fire.inputs, (*fire.iteration, 0))
        branch = (fire.branches or (MAIN,))[0]
        leaving = leaving_ports(request, task, self._rank)
        spec: LoopSpec = loop_spec(loop, task, fire.limit, request.params, leaving)
        ports, rows = wanted_ports(request, run, task), run.message.rows
        runner, log = self._jobs.runner(task), None
        if run.is_journaled:
            log, spec = self._logged(request, run, loop.name, task, spec)
        job = self._jobs.make(request, task, inputs, ports, branch, sample=True, rows=rows)
        job.loop, job.sampling = spec, run.message.sampling
        entry = loop_job(request, run, fire, task, self._streams, self._clock(), log)
        self._jobs.submit(runner, job, entry)
        if entry.feed is not None:
            self._streams.feed(request, entry.feed, feeder(runner, job.key))

    def _missing(self, entry: LoopJob) -> int | None:
        """Return the iterations of a loop until the first piece of sound can be made here, see `FirstSounds`."""
        request, streams = entry.request, [*entry.streams, *(outlet.stream for outlet in entry.outlets)]
        for stream in streams:
            if stream is not None and stream.into[0].name == self.playing_node:
                is_here = request.homes.get(self.playing_node) == self._rank
                return self._streams.inbox(request, stream.name).missing if is_here else None
        return None

    def _logged(
        self, request: WorkerRequest, run: ActiveRun, name: str, task: CompiledTask, spec: LoopSpec
    ) -> tuple[PlaceLog | None, LoopSpec]:
        """Return the log of a loop's ids, if it draws any that count, and the loop with the ids that are known."""
        sampling, ports = task.node.spec.sampling, self._jobs.runner(task).journal_ports(spec)
        if ports is None or sampling is None or sampling.port not in spec.carry:
            return None, spec
        draw = run.next_draw(name)
        log, known = self._outbox.journal.of_loop(request.handle, *draw, task.node.spec, ports)
        return log, replace(spec, known=known, host_emit=tuple(dict.fromkeys((*spec.host_emit, *ports))))

    def _local_runners(self, request: WorkerRequest) -> list[tuple[str, NodeRunner]]:
        return [(name, runner) for name, runner in self._runners.items() if name in request.homes]

    # -- values --------------------------------------------------------------------------------------------------------

    def run_input(self, request: WorkerRequest, ref: TensorRef | SignalRef) -> Tensor:
        """Return an input of a run that is on this rank, or a value of a saved state."""
        if isinstance(ref, SignalRef):
            if ref.rank != self._rank:
                raise EngineError(
                    "a kept value is on another rank", f"it is on rank {ref.rank}, the walk on rank {self._rank}"
                )
            return request.signals[ref.key]
        if self._incoming.reads(ref):
            return self.inputs.take(request, ref)
        return self._copied(ref)  # the api frees its tensors when the request ends

    def read(self, ref: TensorRef) -> Tensor:
        """Return a tensor of another process and end its loan."""
        tensor = self._incoming.take(ref) if self._incoming.reads(ref) else self._copied(ref)
        self._outbox.read(ref)
        return tensor

    def _copied(self, ref: TensorRef) -> Tensor:
        """Return a copy of a tensor in shared memory. Raises TransportError if its loan ends before that."""
        return self._transport.read(ref, lambda array: to_tensor(array, ref.dtype))

    # -- outputs -------------------------------------------------------------------------------------------------------

    def _emit_value(
        self, request: WorkerRequest, run: ActiveRun, value: Ref, port: str, modality: str | None, iteration: Iteration
    ) -> None:
        tensor = resolve(request, run, value)
        if tensor is not None and modality is not None:
            scores = run.scores.pop(value, None) if isinstance(value, Key) and run.scores else None
            self._emit(request, port, modality, tensor, {"step": iteration[-1]} if iteration else {}, scores)

    def _emit(
        self,
        request: WorkerRequest,
        port: str,
        modality: str,
        tensor: Tensor,
        meta: dict[str, int],
        scores: np.ndarray | None = None,
    ) -> None:
        """Send an output to the client. scores: log-probabilities of its id, which go first."""
        if modality == PROGRESS and tensor.is_cpu:
            step, steps = (int(value) for value in tensor.tolist())
            request.note_step(step, steps, self._clock())
        if modality not in request.outputs and (request.outputs or modality in EVENTS):
            return
        if modality == PROGRESS:
            self._outbox.output(request.handle, request.emitted, port, modality, tensor, {})
            request.emitted += 1
            return
        if modality == "audio":
            self._play(request, tensor.numel())
        if scores is not None and modality == "text":
            self._emit_part(request, f"{port}.{LOGPROBS}", LOGPROBS, torch.from_numpy(scores[None]), {})
        self._emit_part(request, port, modality, tensor, meta)

    def _makes_sound(self, run: ActiveRun) -> bool:
        return any(task.node.spec.name == self.playing_node for task in run.share.walk.tasks)

    def _play(self, request: WorkerRequest, values: int) -> None:
        """Note a piece of sound that leaves, and tell the other ranks of the request how long it lasts."""
        sound = request.sound
        if sound.dry_at is None:
            self.first.ended(request.jobs)
        self.playback.sent(request.handle, sound, values, is_heard=request.is_heard)
        if request.is_heard and sound.dry_at is not None:
            now = self._clock()
            self._tell(request, sound.dry_at - now, self.playback.needed_s(sound, now))

    def _tell(self, request: WorkerRequest, ahead_s: float, needed_s: float) -> None:
        for rank in {*request.homes.values()} - {self._rank}:
            self._outbox.playing(rank, request.handle, ahead_s, needed_s)

    def playing(self, message: Playing) -> None:
        """Take the playback of requests whose sound another rank makes."""
        now = self._clock()
        for handle, ahead_s, needed_s in zip(message.handles, message.ahead_s, message.needed_s, strict=True):
            request = self.requests.get(Handle(handle))
            if request is None:
                continue
            if ahead_s < 0:
                self.playback.ended(request.handle)
                continue
            self.first.ended(request.jobs)
            request.sound.dry_at, request.sound.done_at = now + ahead_s, now + needed_s
            self.playback.heard[request.handle] = request.sound

    def _emit_part(
        self, request: WorkerRequest, port: str, modality: str, tensor: Tensor, meta: Mapping[str, int]
    ) -> None:
        """Send an output, unless the api has it from an earlier attempt."""
        if request.delivered and request.skips(port, units_of(modality, tensor.shape)):
            return
        narrow = narrowed(tensor, modality, request.params.get("output_dtype"))
        skipped = request.skipped.pop(port, 0) if request.skipped else 0
        self._outbox.output(request.handle, request.emitted, port, modality, narrow, dict(meta), skipped)
        request.emitted += 1

    def _chunk(
        self, request: WorkerRequest, waiting: WaitingChunk, inbox: StreamInbox, popped: tuple[Chunk, Tensor] | None
    ) -> None:
        """Hand a chunk, or the end of the stream, to the walk that waits."""
        run, address, iteration = waiting.run, waiting.address, waiting.iteration
        if popped is not None:
            self.tracer.chunk(request, waiting)
        if popped is None:
            self._carry_out(request, run, run.state.stream_ended(address, iteration))
            return
        chunk, items = popped
        if isinstance(run.state, StreamWalk) and run.state.count < run.left_out:
            run.state.numbers(chunk)
            self._await_chunk(request, run, run.state)
            return
        if node_at(run.share.walk, address) == self.playing_node:
            self.playback.took(request.sound, inbox, chunk.stop)
        if isinstance(run.state, StreamWalk):
            self._fire_chunk(request, run, run.state, chunk, items)
            return
        run.values[Key(address, "$chunk", iteration)] = items
        run.flags.clear()
        run.flags[iteration] = (chunk.first, chunk.last)
        self._carry_out(request, run, run.state.chunk(address, iteration))

    def _guard(self, request: WorkerRequest) -> Guard:
        return Guard(self.fail, request)
