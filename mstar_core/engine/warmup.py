"""Warm-up of a node: requests that load, compile and capture its kernels before the first real one. For the worker.

A module that knows which requests to expect offers `warmup_requests`. They run like real requests, so the node learns
which passes arrive and captures them. With an empty kernel cache, they are first traced: gone through without running
their kernels, which are then compiled in parallel.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.module import WarmupRequest, WarmupStep
from mstar_core.engine.runner import NodeRunner
from mstar_core.graph.declare.sampling import SamplingParams

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from mstar_core.engine.cuda_graphs.compilation import Compiling

log = logging.getLogger(__name__)

WARMUP_HANDLE: Final = Handle(-1)
"""A handle that no real request has."""


Warmups = Sequence[tuple[NodeRunner, Sequence[WarmupRequest]]]
"""Runners with their warm-up requests."""


def trace_requests(warmups: Warmups, compiling: Compiling) -> None:
    """Go through the value-free requests of all runners, as `NodeModule.trace` does. Raises as `run_warmup` does."""
    for runner, requests in warmups:
        _require_declared(runner, requests)
        if _is_traceable(requests):
            with uncounted(runner):
                _go_through(runner, requests, compiling)


def trace_captures(runners: Sequence[NodeRunner], compiling: Compiling) -> None:
    """Go through the captures that traced requests have caused, unless the cache has all kernels so far."""
    for runner in runners if compiling.has_missed else ():
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
    counts = runner.graph_counts
    return contextlib.nullcontext() if counts is None else counts.held()


def run_warmup(runner: NodeRunner, requests: Sequence[WarmupRequest], report: Callable[[str], None]) -> None:
    """Run warm-up requests and then all idle work, which captures the passes that arrived. Their state is freed.

    report: called with a title before each piece of work. Raises the first error. Inputs that do not fit their declared
    ports are an EngineError before the first request runs.
    """
    _require_declared(runner, requests)
    for each in requests:
        report(each.title)
        with _opened(runner, each):
            for step in each.steps:
                _run(runner, step)
    report("captures")
    while runner.idle():
        report("captures")


def _require_declared(runner: NodeRunner, requests: Sequence[WarmupRequest]) -> None:
    for each in requests:
        for step in each.steps:
            runner.require_inputs(f"warm-up {each.title!r}", step.inputs)


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
