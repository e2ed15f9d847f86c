"""Warm-up of a node: requests that load, compile and capture its kernels before the first real one. For the worker.

A module that knows which requests to expect offers `warmup_requests`. They run like real requests, so the node learns
which passes arrive and captures them. With an empty kernel cache, they are first traced: gone through without running
their kernels, which are then compiled in parallel.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec, NodeRunner, SamplingParams, WorksWhenIdle
from mstar_core.graph.declare.nodes import Attend

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCounts
    from mstar_core.engine.cuda_graphs.compilation import Compiling

log = logging.getLogger(__name__)

WARMUP_HANDLE: Final = Handle(-1)
"""A handle that no real request has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStep:
    """One job of a warm-up request; the fields are those of `Job`."""

    inputs: dict[str, Tensor]
    attend: Attend = field(default_factory=Attend)
    loop: LoopSpec | None = None
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRequest:
    """A synthetic warm-up request. tokens: the most that its cache holds; title: a few words for the operator.

    is_value_free: whether the request, and the captures that it causes, may be gone through with meaningless numbers:
    no Triton kernel makes an index for another operation, the host reads no value, and no kernel is chosen by timing.
    """

    title: str
    tokens: int
    steps: tuple[WarmupStep, ...]
    is_value_free: bool = False


@runtime_checkable
class HasWarmup(Protocol):
    """A module that knows which requests to expect."""

    def warmup_requests(self) -> Sequence[WarmupRequest]:
        """Return the requests to run before the first real one, in order."""


@runtime_checkable
class CompilesLater(Protocol):
    """A runner that can run its queued captures without capturing them."""

    @property
    def graph_counts(self) -> GraphCounts | None:
        """Return the counts of its graphs, which this leaves unchanged."""

    def compile_later(self) -> None:
        """Run each queued step once on padding, which compiles its kernels."""


@runtime_checkable
class TracesKernels(Protocol):
    """A runner or module that can go through the steps that it captures before the first request."""

    def trace(self, compiling: Compiling) -> None:
        """Launch the kernels of these steps on padding, where they are compiled instead of run.

        May return after its first steps if `compiling.has_missed` is still false: the cache has their kernels.
        """


Warmups = Sequence[tuple[NodeRunner, Sequence[WarmupRequest]]]
"""Runners with their warm-up requests."""


def trace_requests(warmups: Warmups, compiling: Compiling) -> None:
    """Go through the value-free requests of all runners. See TracesKernels."""
    for runner, requests in warmups:
        if _is_traceable(requests):
            with uncounted(runner):
                _go_through(runner, requests, compiling)


def trace_captures(runners: Sequence[NodeRunner], compiling: Compiling) -> None:
    """Go through the captures that traced requests have caused, unless the cache has all kernels so far."""
    for runner in runners if compiling.has_missed else ():
        if isinstance(runner, CompilesLater):
            with uncounted(runner):
                runner.compile_later()


def _is_traceable(requests: Sequence[WarmupRequest]) -> bool:
    return bool(requests) and all(each.is_value_free for each in requests)


def _go_through(runner: NodeRunner, requests: Sequence[WarmupRequest], compiling: Compiling) -> None:
    """Go through steps without running their kernels; all steps, unless the cache has the kernels of the first."""
    for each in requests:
        with _opened(runner, each):
            for step in each.steps:
                _run(runner, step)
                if not compiling.has_missed:
                    return


def uncounted(runner: NodeRunner) -> AbstractContextManager[None]:
    """Return a context after which the counts of a runner's graphs are as before."""
    counts = runner.graph_counts if isinstance(runner, CompilesLater) else None
    return contextlib.nullcontext() if counts is None else counts.held()


def run_warmup(runner: NodeRunner, requests: Sequence[WarmupRequest], report: Callable[[str], None]) -> None:
    """Run warm-up requests and then all idle work, which captures the passes that arrived. Their state is freed.

    report: called with a title before each piece of work. Raises the first error.
    """
    for each in requests:
        report(each.title)
        with _opened(runner, each):
            for step in each.steps:
                _run(runner, step)
    report("captures")
    while isinstance(runner, WorksWhenIdle) and runner.idle():
        report("captures")


@contextlib.contextmanager
def _opened(runner: NodeRunner, request: WarmupRequest) -> Iterator[None]:
    runner.open(WARMUP_HANDLE, SamplingParams(), request.tokens)
    try:
        yield
    finally:
        runner.close(WARMUP_HANDLE)


def _run(runner: NodeRunner, step: WarmupStep) -> None:
    job = Job(key=JobKey(-1), handle=WARMUP_HANDLE, inputs=dict(step.inputs), outputs=step.outputs, sample=False)
    job.attend, job.loop = step.attend, step.loop
    runner.submit(job)
    while (running := runner.launch()) is not None:
        for failed in runner.collect(running).failed:
            raise failed.error
