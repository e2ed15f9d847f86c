"""Jobs under way on this worker: made from firings, handed to the node's runner, found again by their key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.base import Job, JobKey, NodeRunner
from mstar_core.errors import EngineError
from mstar_core.graph.spec.nodes import Attend
from mstar_core.worker.resident import ResidentJob, TaskJob
from mstar_core.worker.stream_loop import RelayJob

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledTask
    from mstar_core.worker.request import WorkerRequest

FIRST_CHUNK_URGENCY: Final = 1e6
IDS_KIND: Final = b"ids"

UnderWay = TaskJob | ResidentJob | RelayJob


class Jobs:
    """Owned by the executor. units_per_s: of the sound that the model plays, 0 where nothing is played."""

    def __init__(self, runners: Mapping[str, NodeRunner], units_per_s: float, clock: Callable[[], float]) -> None:
        self.under_way: dict[JobKey, UnderWay] = {}
        self._runners = runners
        self.now = clock
        self._units_per_s = units_per_s
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
        sample: bool,
        rows: int = 1,
    ) -> Job:
        """A job of one firing, or of a loop that the caller sets."""
        only_ids = all(value.dtype is torch.int64 and value.dim() == 1 for value in inputs.values())
        self._next += 1
        return Job(
            key=JobKey(self._next),
            handle=request.handle,
            inputs=inputs,
            outputs=outputs,
            attend=task.node.attend or Attend(),
            branch=branch,
            sample=sample,
            rows=rows,
            tokens_hash_seed=IDS_KIND if only_ids else None,
            urgency=self.urgency(request),
        )

    def submit(self, runner: NodeRunner, job: Job, entry: UnderWay) -> None:
        """Hand a job over."""
        self.under_way[job.key] = entry
        entry.request.jobs.add(job.key)
        runner.submit(job)

    def end(self, key: JobKey) -> UnderWay | None:
        """Forget a job that ended; None when its request had ended before."""
        entry = self.under_way.pop(key, None)
        if entry is not None:
            entry.request.jobs.discard(key)
        return entry

    def forget(self, request: WorkerRequest) -> None:
        """Forget every job of a request."""
        for key in request.jobs:
            self.under_way.pop(key, None)
        request.jobs.clear()

    def runner(self, task: CompiledTask) -> NodeRunner:
        """Who runs a task here. Raises EngineError when nobody does."""
        spec = task.node.spec
        runner = self._runners.get(spec.name)
        if runner is None and spec.of is not None:
            runner = self._runners.get(spec.of.name)
        if runner is None:
            raise EngineError(f"node {spec.name} is not on this rank", node=spec.name)
        return runner

    def next_key(self) -> JobKey:
        """A number that no job had before."""
        self._next += 1
        return JobKey(self._next)

    def ahead_s(self, request: WorkerRequest) -> float | None:
        """Seconds of sound that the client has and has not heard; None before the first, and where nothing plays."""
        if request.first_output_s is None or not self._units_per_s:
            return None
        return request.first_output_s + request.emitted_units / self._units_per_s - self._clock()

    def urgency(self, request: WorkerRequest) -> float:
        """How soon the client runs dry: seconds of playback overdue; the first chunk of a stream comes first."""
        if request.first_output_s is None or not self._units_per_s:
            return FIRST_CHUNK_URGENCY
        return self._clock() - request.first_output_s - request.emitted_units / self._units_per_s
