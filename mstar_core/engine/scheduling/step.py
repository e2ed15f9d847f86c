"""A step of a KV node on the host: its plans, whose sequences they hold, and what they gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mstar_core.engine.steps.plan import DecodeBatch
from mstar_core.engine.transfers import contiguous_runs

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.constraints.matcher import Matcher
    from mstar_core.engine.base import Job, StepResult
    from mstar_core.engine.scheduling.device_share import TimedStep
    from mstar_core.engine.scheduling.sequence import Branch, ForwardPass
    from mstar_core.engine.slack import TimedWork
    from mstar_core.engine.steps.device import DecodeOutput, DrawnIds, StepOutput
    from mstar_core.engine.steps.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Decoding:
    """Sequences of a decode batch, in its order.

    keys: int64 [n], of their jobs; constrained: of those with a grammar. is_read: whether something takes ids of one as
    they come.
    """

    sequences: list[Branch]
    keys: np.ndarray
    batch: DecodeBatch
    constrained: frozenset[int] = frozenset()
    is_read: bool = True

    @property
    def matchers(self) -> list[Matcher]:
        """Matchers of the constrained sequences, in the order of their masks."""
        return [branch.matcher for branch in self.sequences if branch.matcher is not None]


@dataclass(slots=True)
class ScheduledPass:
    """Part or all of a pass of one branch in a step.

    count: tokens. samples: an id is drawn from the last one. ahead: the most iterations that one replay may compute.
    """

    branch: Branch
    forward: ForwardPass
    job: Job | None
    count: int
    is_last: bool
    samples: bool
    ahead: int = 1


@dataclass(slots=True)
class Launch:
    """One plan of a step.

    place: cache index of the first id that each decoding sequence draws; left: its iterations left after that id, which
    may be fewer than the ids that follow.
    """

    plan: StepPlan
    decoding: Decoding | None
    place: np.ndarray
    left: np.ndarray
    passes: list[ScheduledPass]
    output: StepOutput | None = None

    @property
    def steps(self) -> int:
        """Tokens of each decoding sequence."""
        return self.plan.decode.steps if self.plan.decode is not None else 0

    def branch_of(self, slot: int) -> Branch:
        """Return the branch of a slot in this plan."""
        decoding = self.decoding.sequences if self.decoding is not None else []
        return next(branch for branch in (*decoding, *(one.branch for one in self.passes)) if branch.slot == slot)


class HostTransfer(Protocol):
    """A copy to the host in progress, such as a HostCopy. pending: the host tensor."""

    @property
    def pending(self) -> Tensor: ...

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> Tensor: ...


@dataclass(slots=True)
class KVStep:
    """A step in flight. launches: one, or one per iteration of its fused loops.

    dropped: keys of decoding sequences whose ids no longer count. held: branches that wait for it. copies: outputs on
    their way to the host. A step without copies to the host is done once it is launched, or nearly over if it is timed.
    work: its time on the device, if that is measured for `engine.slack`.
    """

    result: StepResult
    started: float
    launches: list[Launch] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    held: list[Branch] = field(default_factory=list)
    copies: list[HostTransfer] = field(default_factory=list)
    timed: TimedStep | None = None
    work: TimedWork | None = None

    @property
    def plan(self) -> StepPlan | None:
        """Its newest plan; None for a step that only has results."""
        return self.launches[-1].plan if self.launches else None

    @property
    def is_done(self) -> bool:
        """Whether everything that the host reads of this step has arrived."""
        if self.timed is not None and not self.timed.is_nearly_over:
            return False
        return all(copy.is_done for copy in self.copies) and all(drawn.is_done for drawn in self.drawn)

    @property
    def drawn(self) -> Iterator[DrawnIds]:
        """Ids that its forwards drew."""
        for launch in self.launches:
            if launch.output is not None:
                for part in (*launch.output.decode, *launch.output.passes):
                    if part is not None and part.drawn is not None:
                        yield part.drawn

    def decodes(self, key: int) -> int:
        """Return how many iterations of a resident loop it computes; 0 if they no longer count."""
        launch = self.launches[0] if self.launches else None
        if launch is None or launch.decoding is None or key in self.dropped or key not in launch.decoding.keys:
            return 0
        return launch.steps

    @property
    def undecided(self) -> frozenset[int]:
        """Keys of constrained loops whose id it draws: their next mask depends on it."""
        decoding = self.launches[0].decoding if self.launches else None
        return frozenset() if decoding is None else decoding.constrained - self.dropped

    def copy_to_host(
        self, ports: frozenset[str], streamed: frozenset[str], to_host: Callable[[Tensor], HostTransfer]
    ) -> None:
        """Start copying loop outputs to the host, behind the step. Contiguous outputs of one pass share a copy.

        ports: copied at the end of loops and for emitted iterations; streamed: for emitted iterations only.
        What a decode batch reports is copied as a whole, also for ports that its loops name in `host_emit`.
        """
        outputs = [(done.outputs, ports) for done in self.result.done]
        for launch in self.launches:
            for part in launch.output.decode if launch.output is not None else ():
                if part.reports:
                    assert launch.decoding is not None
                    self._copy_decode(part, launch.decoding.batch.to_host | ports | streamed, to_host)
        outputs += [(emission.outputs, ports | streamed) for emission in self.result.emissions]
        for port in sorted(ports | streamed) if outputs else ():
            owners = [values for values, names in outputs if port in names and port in values]
            for span, values in contiguous_runs([owner[port] for owner in owners]):
                self.copies.append(to_host(values))
                for owner, value in zip(owners[span], self.copies[-1].pending, strict=True):
                    owner[port] = value

    def _copy_decode(
        self, part: DecodeOutput, ports: frozenset[str], to_host: Callable[[Tensor], HostTransfer]
    ) -> None:
        """Start copying what a decode batch reports, one copy per port."""
        for port in sorted(ports & part.reports.keys()):
            self.copies.append(to_host(part.reports[port]))
            part.reports[port] = self.copies[-1].pending
