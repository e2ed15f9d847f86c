"""GPU in virtual time: streams that run beside each other, and runners whose steps take their time on it.

A runner computes its step at launch, and its results count once the GPU has done the step's work. Work of a node
without a cache has a stream of its own, and begins behind what the worker's stream held when its inputs were submitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from mstar_core.conformance.clock import FakeClock
from mstar_core.engine.base import Handle, Job, JobKey, Pressure, StepResult
from mstar_core.engine.runner import NodeRunner, Running
from mstar_core.engine.slack import Slack
from mstar_core.worker.loop import Worker

WORKER = "worker"
"""Stream of all nodes with a cache."""


@dataclass(slots=True, eq=False)
class Work:
    """Work of one step. left_s: time alone on the GPU that it still needs. after: work that ends before it begins."""

    stream: str
    left_s: float
    after: tuple[Work, ...] = ()


@dataclass
class VirtualGpu:
    """A GPU without memory. beside: rate of a stream's work while another stream works too, 1.0 without an entry.

    noted_s: time of the step that is computed now. queues: work that is not done, by stream. at: present of the GPU.
    """

    clock: FakeClock
    beside: dict[str, float]
    noted_s: float = 0.0
    queues: dict[str, list[Work]] = field(default_factory=dict)
    at: float = 0.0

    def note(self, seconds: float) -> None:
        """Add to the time of the step that is computed now."""
        self.noted_s += seconds

    def tail(self) -> Work | None:
        """Return the last work of the worker's stream that is not done."""
        self.advance()
        queue = self.queues.get(WORKER)
        return queue[-1] if queue else None

    def add(self, stream: str, after: tuple[Work, ...]) -> Work:
        """Queue the work that was noted."""
        self.advance()
        work = Work(stream, self.noted_s, after)
        self.noted_s = 0.0
        self.queues.setdefault(stream, []).append(work)
        return work

    def is_done(self, work: Work) -> bool:
        self.advance()
        return work.left_s <= 0.0

    def advance(self) -> None:
        """Compute up to the present."""
        while self.at < self.clock.now:
            heads = [queue[0] for queue in self.queues.values() if queue]
            heads = [work for work in heads if all(other.left_s <= 0.0 for other in work.after)]
            if not heads:
                break
            rates = [self.beside.get(work.stream, 1.0) if len(heads) > 1 else 1.0 for work in heads]
            span = min(work.left_s / rate for work, rate in zip(heads, rates, strict=True))
            span = min(span, self.clock.now - self.at)
            for work, rate in zip(heads, rates, strict=True):
                work.left_s -= rate * span
                if work.left_s < 1e-12:
                    work.left_s = 0.0
                    self.queues[work.stream].pop(0)
            self.at += span
        self.at = self.clock.now


@dataclass
class HostCosts:
    """Seconds of the worker's thread for the launch of a step, and for its collection with the routing of results."""

    launch_s: float
    collect_s: float


class OnGpu(NodeRunner):
    """A runner whose steps take their time on a virtual GPU."""

    def __init__(self, inner: NodeRunner, gpu: VirtualGpu, costs: HostCosts) -> None:
        self.name = inner.name
        self.has_cache = inner.has_cache  # type: ignore[misc]  # of one runner here
        self._inner, self._gpu, self._costs = inner, gpu, costs
        self._work: dict[int, Work] = {}
        self._after: list[Work] = []
        self.launched: list[float] = []

    def open(self, handle: Handle, *more: Any, **named: Any) -> None:
        self._inner.open(handle, *more, **named)

    def submit(self, job: Job) -> None:
        tail = self._gpu.tail()
        if tail is not None and not self.has_cache:
            self._after.append(tail)
        self._inner.submit(job)

    def feed(self, key: JobKey, ids: Any, ended: bool) -> None:
        self._inner.feed(key, ids, ended)

    def close(self, handle: Handle) -> None:
        self._inner.close(handle)

    def end_loops(self, handle: Handle) -> None:
        self._inner.end_loops(handle)

    def yield_to(self, slack: Slack) -> None:
        self._inner.yield_to(slack)

    def contention(self) -> Any:
        return self._inner.contention()

    def pressure(self) -> Pressure:
        return self._inner.pressure()

    def memory(self) -> Any:
        return self._inner.memory()

    def launch(self) -> Running | None:
        started = self._gpu.clock.now
        running = self._inner.launch()
        if running is None:
            return None
        self._gpu.clock.sleep(self._costs.launch_s)
        stream = WORKER if self.has_cache else self.name
        self._work[id(running)] = self._gpu.add(stream, tuple(self._after))
        self._after.clear()
        self.launched.append(started)
        return running

    def is_done(self, running: Running) -> bool:
        return self._gpu.is_done(self._work[id(running)])

    def collect(self, running: Running) -> StepResult:
        assert self._gpu.is_done(self._work.pop(id(running)))
        self._gpu.clock.sleep(self._costs.collect_s)
        return self._inner.collect(running)


def put_on_gpu(worker: Worker, gpu: VirtualGpu, costs: HostCosts) -> dict[str, OnGpu]:
    """Let the steps of a worker that has not begun take their time on a virtual GPU. Returns its runners."""
    runners = {name: OnGpu(runner, gpu, costs) for name, runner in worker.runners.items()}
    cast("dict[str, NodeRunner]", worker.runners).update(runners)
    worker.steps.sleep = gpu.clock.sleep
    return runners
