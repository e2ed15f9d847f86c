"""Fake node runner without a model: every job completes at once, ids come from a script."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from mstar_core.engine.base import NO_ADAPTER, Done, Failed, Handle, Job, LoopStep, Pressure, StepResult
from mstar_core.engine.runner import NodeRunner
from mstar_core.errors import EngineError
from mstar_core.graph.declare.sampling import SamplingParams


@dataclass
class FakeRunner(NodeRunner):
    """Fake NodeRunner. answer: outputs of one task run. ids: sampled ids of a request's loop, in order."""

    name: str
    answer: Callable[[Job], dict[str, torch.Tensor]]
    ids: Callable[[Handle], list[int]] = lambda handle: []
    fail_at: int | None = None
    queue: deque[Job] = field(default_factory=deque)
    open_handles: set[Handle] = field(default_factory=set)
    seen: list[Job] = field(default_factory=list)
    leases: dict[str, tuple[Handle, float]] = field(default_factory=dict)
    _loops: dict[int, tuple[Job, deque[int], int]] = field(default_factory=dict)

    def open(
        self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1, adapter: int = NO_ADAPTER
    ) -> None:
        self.open_handles.add(handle)

    def lease(self, handle: Handle, session: str, seconds: float) -> None:
        self.leases[session] = (handle, seconds)

    def end_lease(self, session: str) -> None:
        self.leases.pop(session, None)

    def submit(self, job: Job) -> None:
        if job.handle in self.open_handles:
            self.queue.append(job)
            self.seen.append(job)

    def close(self, handle: Handle) -> None:
        self.open_handles.discard(handle)
        self.queue = deque(job for job in self.queue if job.handle != handle)
        self._loops = {key: entry for key, entry in self._loops.items() if entry[0].handle != handle}

    def pressure(self) -> Pressure:
        return Pressure(ready=len(self.queue) + len(self._loops))

    def launch(self) -> StepResult | None:
        result = StepResult(rows=len(self.queue) + len(self._loops), duration_s=0.001)
        while self.queue:
            job = self.queue.popleft()
            if self.fail_at is not None and len(self.seen) > self.fail_at:
                result.failed.append(Failed(job=job, error=EngineError("the node broke", node=self.name)))
            elif job.loop is not None:
                self._begin(result, job)
            else:
                result.done.append(Done(job=job, outputs=self.answer(job)))
        self._iterate(result)
        return result

    def collect(self, running: object) -> StepResult:
        assert isinstance(running, StepResult)
        return running

    def _begin(self, result: StepResult, job: Job) -> None:
        assert job.loop is not None
        start = int(job.inputs["token"])
        if start in job.loop.stop_ids:
            result.done.append(Done(job=job, reason="stop"))
        else:
            self._loops[job.key] = (job, deque(self.ids(job.handle)), 0)

    def _iterate(self, result: StepResult) -> None:
        keys, values = [], []
        for key, (job, script, count) in list(self._loops.items()):
            assert job.loop is not None
            if count >= job.loop.max_iters:
                self._end(result, job, "length", count)
                continue
            value = script.popleft()
            keys.append(key)
            values.append(value)
            self._loops[key] = (job, script, count + 1)
            if value in job.loop.stop_ids:
                self._end(result, job, "stop", count + 1, value)
        if keys:
            result.loop = LoopStep(keys=np.array(keys), ids=np.array(values))

    def _end(self, result: StepResult, job: Job, reason: str, count: int, last: int = 0) -> None:
        del self._loops[job.key]
        result.done.append(Done(job=job, outputs={"token": torch.tensor([last])}, reason=reason, iterations=count))
