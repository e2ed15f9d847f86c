"""Runs of stream loops: each chunk of the stream is one job. Used by the executor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mstar_core.engine.base import Job
from mstar_core.graph.declare.nodes import CHUNK_FIRST, STEP
from mstar_core.worker.job_table import Jobs
from mstar_core.worker.state.request import (
    ActiveRun,
    ChunkJob,
    SpanTotal,
    StreamLoopRun,
    WaitingChunk,
    WorkerRequest,
    parameter_name,
)
from mstar_core.worker.state.walks import StreamLoop
from mstar_core.worker.streams import Streams

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.declare.streams import Chunk

Emits = Callable[[WorkerRequest, str, str, "Tensor", dict[str, int]], None]
EndsWalk = Callable[[WorkerRequest, ActiveRun, str, dict[str, int]], None]


class StreamLoops:
    """Fast path of the executor for stream loops: no WalkState, a few hundred chunks per second."""

    def __init__(self, jobs: Jobs, streams: Streams, emit: Emits, end_walk: EndsWalk) -> None:
        self._jobs = jobs
        self._streams = streams
        self._emit = emit
        self._end_walk = end_walk

    def begin(self, request: WorkerRequest, run: ActiveRun, plan: StreamLoop) -> None:
        """Start a run and take the first chunk as soon as it is ready."""
        fixed = {port: run.inputs[name] for port, name, is_parameter in plan.fixed if not is_parameter}
        asked = {port: parameter_name(name) for port, name, is_parameter in plan.fixed if is_parameter}
        numbers = {port: request.numbers[name] for port, name in asked.items() if name in request.numbers}
        runner = self._jobs.runner(plan.task)
        run.stream_loop = StreamLoopRun(plan=plan, fixed=fixed, numbers=numbers, runner=runner)
        self._want(request, run)

    def chunk(self, request: WorkerRequest, run: ActiveRun, popped: tuple[Chunk, Tensor] | None) -> None:
        """Submit a job for a chunk, or end the walk after the last one."""
        state = run.stream_loop
        assert state is not None
        plan = state.plan
        if popped is None:
            self._end_walk(request, run, "done", {plan.loop.name: state.count})
            return
        chunk, items = popped
        numbers = dict(state.numbers)
        for port, name in plan.changing:
            numbers[port] = state.count if name == STEP else chunk.first if name == CHUNK_FIRST else chunk.last
        job = Job(
            key=self._jobs.next_key(),
            handle=request.handle,
            inputs={**state.fixed, plan.chunk: items},
            numbers=numbers,
            outputs=plan.outputs,
            urgency=self._jobs.urgency(request),
        )
        step, state.count = state.count, state.count + 1
        self._jobs.submit(state.runner, job, ChunkJob(request, run, step, SpanTotal(), self._jobs.now()))

    def done(self, entry: ChunkJob, outputs: Mapping[str, Tensor]) -> None:
        """Send the outputs of a job and take the next chunk."""
        request, run = entry.request, entry.run
        assert run.stream_loop is not None
        for outlet in run.stream_loop.plan.task.outlets:
            value = outputs.get(outlet.port)
            if value is None:
                continue
            if outlet.stream is not None:
                self._streams.put(request, outlet.stream, value)
            elif outlet.modality is not None:
                self._emit(request, outlet.port, outlet.modality, value, {"step": entry.step})
        self._want(request, run)

    def _want(self, request: WorkerRequest, run: ActiveRun) -> None:
        assert run.stream_loop is not None
        stream = run.stream_loop.plan.stream
        request.waiting[stream] = WaitingChunk(run, 0, (), self._jobs.now())
        self._streams.serve(request, stream)
