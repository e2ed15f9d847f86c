"""What a node runs before the first request, so that kernels are loaded, compiled and captured by then. For the worker.

A module that knows which requests to expect offers `rehearsals() -> Sequence[Rehearsal]`. They run as any request does,
so that a node learns from them which passes come and captures these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec, NodeRunner, SamplingParams, WorksWhenIdle
from mstar_core.graph.nodes import Attend

if TYPE_CHECKING:
    from torch import Tensor

NOBODY: Final = Handle(-1)
"""A handle that no request has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One job of a rehearsal; fields as those of `Job`."""

    inputs: dict[str, Tensor]
    attend: Attend = field(default_factory=Attend)
    loop: LoopSpec | None = None
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A request of nobody. tokens: most that its cache holds; what: a few words for the operator."""

    what: str
    tokens: int
    acts: tuple[Act, ...]


@runtime_checkable
class Rehearses(Protocol):
    """A module that knows what will be asked of it."""

    def rehearsals(self) -> Sequence[Rehearsal]:
        """What to run before the first request, in this order."""


def rehearse(runner: NodeRunner, rehearsals: Sequence[Rehearsal], tell: Callable[[str], None]) -> None:
    """Run rehearsals and then all idle work, which captures what they taught. Nothing of them stays.

    tell: told what is done, before each piece of work. Raises what fails.
    """
    for each in rehearsals:
        tell(each.what)
        runner.open(NOBODY, SamplingParams(), each.tokens)
        try:
            for act in each.acts:
                _run(runner, act)
        finally:
            runner.close(NOBODY)
    tell("captures")
    while isinstance(runner, WorksWhenIdle) and runner.idle():
        tell("captures")


def _run(runner: NodeRunner, act: Act) -> None:
    job = Job(key=JobKey(-1), handle=NOBODY, inputs=dict(act.inputs), outputs=act.outputs, sample=False)
    job.attend, job.loop = act.attend, act.loop
    runner.submit(job)
    while (running := runner.launch()) is not None:
        for failed in runner.collect(running).failed:
            raise failed.error
