"""What a node runs before the first request, so that kernels are loaded, compiled and captured by then. For the worker.

A module that knows which requests to expect offers `rehearsals() -> Sequence[Rehearsal]`. They run as any request does,
so that a node learns from them which passes come and captures these. On a machine that has compiled none of the kernels
yet, `compile_ahead` goes through all of it once without running them, so that they are compiled side by side.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec, NodeRunner, SamplingParams, WorksWhenIdle
from mstar_core.engine.cuda_graphs.compilation import apart, compiling_only, is_wanted
from mstar_core.graph.spec.nodes import Attend

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from mstar_core.engine.cuda_graphs.cache import GraphCounts
    from mstar_core.engine.cuda_graphs.compilation import Compiling

log = logging.getLogger(__name__)

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
    """A request of nobody. tokens: most that its cache holds; what: a few words for the operator.

    is_blind: whether it, and the captures that it teaches, may be gone through with numbers that mean nothing: no
    Triton kernel makes an index that another operation takes, the host reads no value, and no kernel is chosen by
    trying out.
    """

    what: str
    tokens: int
    acts: tuple[Act, ...]
    is_blind: bool = False


@runtime_checkable
class Rehearses(Protocol):
    """A module that knows what will be asked of it."""

    def rehearsals(self) -> Sequence[Rehearsal]:
        """What to run before the first request, in this order."""


@runtime_checkable
class CompilesLater(Protocol):
    """A runner that can go through what it is still to capture."""

    @property
    def graph_counts(self) -> GraphCounts | None:
        """What its graphs count in, so that this does not."""

    def compile_later(self) -> None:
        """Run each step that is still to be captured once, with nobody's rows: its kernels are compiled by that."""


Cast = Sequence[tuple[NodeRunner, Sequence[Rehearsal]]]
"""Runners with what they rehearse."""


def compile_ahead(cast: Cast) -> None:
    """Compile the kernels of blind rehearsals, and of the captures that they teach, side by side before these run.

    Where the cache has those of a runner's first act, as on all later starts, nothing else is gone through. What fails
    is said once, and the start goes on as it would have without: each kernel is then compiled when it is first met.
    """
    blind = [(runner, given) for runner, given in cast if given and all(each.is_blind for each in given)]
    if not blind or not is_wanted():
        return
    try:
        apart(lambda: _compile_ahead(blind))
    except Exception as error:  # noqa: BLE001 nothing depends on it
        log.warning("kernels are compiled one after the other: %s: %s", type(error).__name__, error)


def _compile_ahead(cast: Cast) -> None:
    started = time.monotonic()
    with compiling_only() as compiling:
        for runner, rehearsals in cast:
            with _uncounted(runner):
                _go_through(runner, rehearsals, compiling)
        if not compiling.has_missed:
            return
        for runner, _ in cast:
            if isinstance(runner, CompilesLater):
                with _uncounted(runner):
                    runner.compile_later()
        count, gone_s = compiling.count, time.monotonic() - started
    log.info("%d kernels noted in %.2f s, compiled in %.2f s", count, gone_s, time.monotonic() - started - gone_s)


def _go_through(runner: NodeRunner, rehearsals: Sequence[Rehearsal], compiling: Compiling) -> None:
    """Play acts without their kernels; all of them, unless the cache has those of the first."""
    for each in rehearsals:
        with _opened(runner, each):
            for act in each.acts:
                _run(runner, act)
                if not compiling.has_missed:
                    return


def _uncounted(runner: NodeRunner) -> AbstractContextManager[None]:
    counts = runner.graph_counts if isinstance(runner, CompilesLater) else None
    return contextlib.nullcontext() if counts is None else counts.held()


def rehearse(runner: NodeRunner, rehearsals: Sequence[Rehearsal], tell: Callable[[str], None]) -> None:
    """Run rehearsals and then all idle work, which captures what they taught. Nothing of them stays.

    tell: told what is done, before each piece of work. Raises what fails.
    """
    for each in rehearsals:
        tell(each.what)
        with _opened(runner, each):
            for act in each.acts:
                _run(runner, act)
    tell("captures")
    while isinstance(runner, WorksWhenIdle) and runner.idle():
        tell("captures")


@contextlib.contextmanager
def _opened(runner: NodeRunner, rehearsal: Rehearsal) -> Iterator[None]:
    runner.open(NOBODY, SamplingParams(), rehearsal.tokens)
    try:
        yield
    finally:
        runner.close(NOBODY)


def _run(runner: NodeRunner, act: Act) -> None:
    job = Job(key=JobKey(-1), handle=NOBODY, inputs=dict(act.inputs), outputs=act.outputs, sample=False)
    job.attend, job.loop = act.attend, act.loop
    runner.submit(job)
    while (running := runner.launch()) is not None:
        for failed in runner.collect(running).failed:
            raise failed.error
