"""Jobs under way on a worker: made from tasks and loops, handed to the node's runner, found again by key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mstar_core.engine.base import Job, JobKey, LoopSpec
from mstar_core.engine.runner import NodeRunner
from mstar_core.errors import EngineError
from mstar_core.graph.declare.nodes import Attend
from mstar_core.graph.declare.walks import StopOn
from mstar_core.worker.state.first_sound import FirstSounds
from mstar_core.worker.state.request import ActiveRun, LoopJob, MoveJob, UnderWay, WorkerRequest
from mstar_core.worker.streams import Streams
from mstar_core.worker.telemetry.tracing import Tracer

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledLoop, CompiledTask
    from mstar_core.graph.runtime.actions import FireLoop
    from mstar_core.worker.journal import PlaceLog

FIRST_CHUNK_URGENCY: Final = 1e6
IDS_KIND: Final = b"ids"
CAUSAL: Final = Attend()

UNLIMITED = 2**62


class Jobs:
    """Jobs by key. Owned by the executor. first: those that lead to a first sound."""

    def __init__(
        self, runners: Mapping[str, NodeRunner], tracer: Tracer, clock: Callable[[], float], first: FirstSounds
    ) -> None:
        self.under_way: dict[JobKey, UnderWay] = {}
        self.first = first
        self._runners = runners
        self.now = clock
        self._tracer = tracer
        self._clock = clock
        self._next = 0

    def make(
        self,
        request: WorkerRequest,
        task: CompiledTask,
        inputs: dict[str, Tensor],
        outputs: tuple[str, ...],
        branch: str,
        *,
        sample: bool = False,
        rows: int = 1,
        content: bytes | None = None,
        numbers: dict[str, float | int | bool] | None = None,
    ) -> Job:
        """Return a job of a task. The caller sets `loop` for an engine loop.

        content: key of what determines the inputs, with the request's salt; None if unknown. Not needed for ids alone.
        """
        self._next += 1
        return Job(
            key=JobKey(self._next),
            handle=request.handle,
            inputs=inputs,
            numbers=numbers or {},
            outputs=outputs,
            edges=task.edges,
            attend=task.node.attend or CAUSAL,
            branch=branch,
            sample=sample,
            rows=rows,
            tokens_hash_seed=request.salt + IDS_KIND,
            content=content,
            urgency=self.urgency(request),
        )

    def submit(self, runner: NodeRunner, job: Job, entry: UnderWay) -> None:
        """Hand a job to its runner."""
        self.under_way[job.key] = entry
        if not isinstance(entry, MoveJob):
            self._tracer.submitted(entry)
        self.first.submitted(job.key, runner.name, entry)
        entry.request.jobs.add(job.key)
        runner.submit(job)

    def end(self, key: JobKey) -> UnderWay | None:
        """Remove a job that ended. Returns None when its request ended before."""
        entry = self.under_way.pop(key, None)
        if entry is not None:
            entry.request.jobs.discard(key)
            self.first.ended((key,))
        return entry

    def forget(self, request: WorkerRequest) -> None:
        """Remove every job of a request."""
        self.first.ended(request.jobs)
        for key in request.jobs:
            self.under_way.pop(key, None)
        request.jobs.clear()

    def runner(self, task: CompiledTask) -> NodeRunner:
        """Return the runner of a task. Raises EngineError when its node is not on this rank."""
        spec = task.node.spec
        runner = self._runners.get(spec.name)
        if runner is None and spec.of is not None:
            runner = self._runners.get(spec.of.name)
        if runner is None:
            raise EngineError(f"node {spec.name} is not on this rank", node=spec.name)
        return runner

    def next_key(self) -> JobKey:
        """Return a fresh job key."""
        self._next += 1
        return JobKey(self._next)

    def ahead_s(self, request: WorkerRequest) -> float | None:
        """Return the seconds of audio that the client has not played yet; None before the first and without audio."""
        return None if request.sound.dry_at is None else request.sound.dry_at - self._clock()

    def urgency(self, request: WorkerRequest) -> float:
        """Return the seconds that playback is overdue; a request without sound is the most urgent."""
        return FIRST_CHUNK_URGENCY if request.sound.dry_at is None else self._clock() - request.sound.dry_at


def loop_job(
    request: WorkerRequest,
    run: ActiveRun,
    fire: FireLoop,
    task: CompiledTask,
    streams: Streams,
    now: float,
    log: PlaceLog | None = None,
) -> LoopJob:
    """Return the record of an engine loop's job. log: takes its ids."""
    sampling = task.node.spec.sampling
    port = sampling.port if sampling is not None else ""
    sampled = [outlet for outlet in task.outlets if outlet.port == port]
    targets = tuple(outlet.stream for outlet in sampled if outlet.stream is not None)
    modality = next((outlet.modality for outlet in sampled if outlet.modality is not None), None)
    is_single = len(targets) == 1 and modality is None
    over = run.share.walk.loops[fire.loop].loop.over
    return LoopJob(
        request=request,
        run=run,
        loop=fire.loop,
        task=fire.task,
        iteration=fire.iteration,
        port=port,
        streams=targets,
        modality=modality,
        outlets=tuple(outlet for outlet in task.outlets if outlet.port != port),
        inbox=streams.local_inbox(request, targets[0]) if is_single else None,
        feed=None if over is None else over.name,
        since=now,
        log=log,
    )


def loop_spec(
    loop: CompiledLoop, task: CompiledTask, limit: int | None, params: Mapping[str, Any], leaving: Collection[str] = ()
) -> LoopSpec:
    """Return the description of a loop for the engine. leaving: ports whose values leave this process."""
    stop = loop.loop.stop
    ids: tuple[int, ...] = ()
    port = None if stop is None else stop.port
    if isinstance(stop, StopOn):
        switched_off = stop.unless is not None and bool(params.get(stop.unless))
        ids = () if switched_off else stop.ids
        port = None if switched_off else port
    sampled = task.node.spec.sampling.port if task.node.spec.sampling is not None else None
    emit = tuple(dict.fromkeys(outlet.port for outlet in task.outlets if outlet.port != sampled))
    over = loop.loop.over
    goes_on = over is not None and over.chunk.after_end == "empty" and (limit is not None or stop is not None)
    return LoopSpec(
        max_iters=UNLIMITED if limit is None else limit,
        carry=dict(loop.loop.carry),
        stop_port=port,
        stop_ids=ids,
        fused=loop.loop.fused,
        emit=emit,
        host_emit=tuple(port for port in emit if port in leaving),
        feed=None if over is None else over.into[1],
        after_end="empty" if goes_on else "stop",
        is_read=any(outlet.port == sampled for outlet in task.outlets),
    )


def feeder(runner: NodeRunner, key: JobKey) -> Callable[[Sequence[int], bool], None]:
    """Return the function that gives a loop the next ids of its stream. Raises EngineError if its runner takes none."""
    if not runner.has_cache:
        raise EngineError(f"node {runner.name} takes no stream while its loop runs", node=runner.name)
    return partial(runner.feed, key)


def leaving_ports(request: WorkerRequest, task: CompiledTask, rank: int) -> set[str]:
    """Return the output ports of a task that go to the client, or by a stream to another rank."""
    return {
        outlet.port
        for outlet in task.outlets
        if (outlet.stream is None and (not request.outputs or outlet.modality in request.outputs))
        or (outlet.stream is not None and request.homes.get(outlet.stream.into[0].name, rank) != rank)
    }
