"""What the executor remembers of a job under way: one firing of a task, or a whole resident loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mstar_core.engine.base import LoopSpec
from mstar_core.graph.spec.walks import StopOn
from mstar_core.worker.tracing import Tally

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.graph.compile.compiled import CompiledLoop, CompiledTask, Outlet
    from mstar_core.graph.runtime.actions import FireLoop, Iteration
    from mstar_core.graph.spec.streams import Stream
    from mstar_core.worker.request import ActiveRun, WorkerRequest
    from mstar_core.worker.stream_inbox import StreamInbox
    from mstar_core.worker.streams import Streams

UNLIMITED = 2**62


@dataclass(slots=True)
class Firing:
    """One firing over several cache branches: done when each branch's job is; outputs are those of the first."""

    open_jobs: int = 1
    outputs: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskJob:
    """A job that is one firing of a task on one branch."""

    request: WorkerRequest
    run: ActiveRun
    task: int
    iteration: Iteration
    since: float = 0.0
    firing: Firing = field(default_factory=Firing)
    is_first_branch: bool = True

    def beside(self) -> TaskJob:
        """The same firing on a further branch."""
        return replace(self, is_first_branch=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentJob:
    """A job that is a whole loop, iterated by the engine.

    port: the sampled port; streams and modality: where its ids go in each iteration. outlets: those of other ports.
    inbox: where the ids go when that is one stream of this rank and nothing else. since: when it was handed over.
    """

    request: WorkerRequest
    run: ActiveRun
    loop: int
    task: int
    iteration: Iteration
    port: str
    streams: tuple[Stream, ...]
    modality: str | None
    outlets: tuple[Outlet, ...]
    inbox: StreamInbox | None = None
    since: float = 0.0
    tally: Tally = field(default_factory=Tally)

    @classmethod
    def of(
        cls, request: WorkerRequest, run: ActiveRun, fire: FireLoop, task: CompiledTask, streams: Streams, now: float
    ) -> ResidentJob:
        """The record of a loop's job."""
        sampling = task.node.spec.sampling
        port = sampling.port if sampling is not None else ""
        sampled = [outlet for outlet in task.outlets if outlet.port == port]
        into = tuple(outlet.stream for outlet in sampled if outlet.stream is not None)
        modality = next((outlet.modality for outlet in sampled if outlet.modality is not None), None)
        is_single = len(into) == 1 and modality is None
        return cls(
            request=request,
            run=run,
            loop=fire.loop,
            task=fire.task,
            iteration=fire.iteration,
            port=port,
            streams=into,
            modality=modality,
            outlets=tuple(outlet for outlet in task.outlets if outlet.port != port),
            inbox=streams.local_inbox(request, into[0]) if is_single else None,
            since=now,
        )


def loop_spec(loop: CompiledLoop, task: CompiledTask, limit: int | None, params: Mapping[str, Any]) -> LoopSpec:
    """What the engine is told of a loop that it iterates alone."""
    stop = loop.loop.stop
    ids: tuple[int, ...] = ()
    port = None if stop is None else stop.port
    if isinstance(stop, StopOn):
        switched_off = stop.unless is not None and bool(params.get(stop.unless))
        ids = () if switched_off else stop.ids
        port = None if switched_off else port
    sampled = task.node.spec.sampling.port if task.node.spec.sampling is not None else None
    emit = tuple(dict.fromkeys(outlet.port for outlet in task.outlets if outlet.port != sampled))
    return LoopSpec(
        max_iters=UNLIMITED if limit is None else limit,
        carry=dict(loop.loop.carry),
        stop_port=port,
        stop_ids=ids,
        fused=loop.loop.fused,
        emit=emit,
    )
