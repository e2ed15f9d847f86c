"""Interface of a runner to its scheduler: launches, their output, limits of captured steps, reads of device state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from mstar_core.engine.transfers import HostCopy

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.plan import DecodeBatch, StepPlan
    from mstar_core.engine.steps.updates import Update
    from mstar_core.errors import MstarError

AHEAD: Final = (5, 2)
"""Iterations in one replay of a loop that appends and may run ahead. New requests wait for no more than these."""

AHEAD_TOKENS: Final = 2600
"""Most tokens of such a replay: with more, an iteration outlasts the host's work between two iterations."""


class Device(Protocol):
    """The runner as its scheduler sees it. Nothing else of a node touches the device."""

    @property
    def limits(self) -> StepLimits:
        """Limits of the captured steps at present."""

    def decode_step_s(self, batch: DecodeBatch) -> float:
        """Return the device seconds of a captured decode step of a batch without masks; 0.0 if none was measured."""

    def launch(self, plan: StepPlan) -> StepOutput:
        """Launch a step. Sequences that fail are reported in the output."""

    def apply(self, updates: Sequence[Update]) -> None:
        """Carry out changes before a read; `launch` does so itself."""

    def loop_value(self, slot: int, port: str) -> Tensor | None:
        """Return a copy of a carried value of the resident loop by the output that gives it; None for another port."""

    def seen(self, slot: int) -> Tensor | None:
        """Return a copy of a slot's seen ids, bool [vocabulary]; None at a node without a vocabulary."""

    def counts(self, slot: int) -> Tensor | None:
        """Return how often each id was drawn in a slot, int32 [vocabulary]; None at a node without a vocabulary."""

    def gather_pages(self, pages: Sequence[int]) -> tuple[Tensor, ...]:
        """Copy pages into staging tensors behind the steps in flight, see `PageStore.gather`."""

    def attached_rows(self, port: str, pages: Sequence[int], first: int, count: int) -> Tensor:
        """Return copies of the rows of an attached port, [count, width]. first: place of the first in these pages."""

    def check_pages(self, groups: Sequence[Tensor], pages: int) -> None:
        """Raise EngineError unless staging tensors of another rank fit the pools of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Sizes that the captured steps of a node take at present.

    captures_passes: whether passes of loops are captured; appending: sequences of their largest bucket that appends, 0
    without one. prompt_tokens, prompts: of the largest bucket of prompts of ids, 0 without one.
    """

    captures_passes: bool = False
    appending: int = 0
    prompt_tokens: int = 0
    prompts: int = 0


@dataclass(frozen=True, slots=True)
class DrawnIds:
    """Ids that one forward drew: int64 [n] on the device, which a later step may overwrite, and their host copy.

    Of several steps in a row: int64 [steps, n].

    scores: host copy of their log-probabilities, see `engine/sampling/scores.py`; None if no sequence reports them.
    """

    ids: Tensor
    host: HostCopy
    scores: HostCopy | None = None

    @classmethod
    def of(cls, ids: Tensor, scores: Tensor | None = None) -> DrawnIds:
        """Start copying ids to the host. The next replay of any captured step overwrites those of a captured one."""
        return cls(ids, HostCopy(ids), None if scores is None else HostCopy(scores))

    @property
    def is_done(self) -> bool:
        """Whether the copies have arrived."""
        return self.host.is_done and (self.scores is None or self.scores.is_done)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """Output of a part of the decode batch: its sequences from `start` on, one per id of a step.

    first: the token of the plan that its ids, or the first row of them, belong to.
    reports: values of the ports that loops emit, one per sequence; `to_host` copies replace them. given: names of all
    outputs of its forward.
    """

    start: int
    count: int
    drawn: DrawnIds
    first: int = 0
    reports: dict[str, Tensor] = field(default_factory=dict)
    given: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """Output of one pass. ports: its share of the wanted outputs. iterations: those of its loop that they end.

    later: outputs of further iterations, one each, that the same replay has computed. drawn, index: the ids of its
    forward and its place among them; None if it drew none. given: names of all outputs of its forward.
    """

    ports: dict[str, Tensor]
    iterations: int = 1
    later: Sequence[dict[str, Tensor]] = ()
    drawn: DrawnIds | None = None
    index: int = -1
    given: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Output of a step. passes: as in the plan; None for one that failed. failed: slot -> error, decoding ones too.

    A failed sequence has changed nothing that others read; the rest of its batch was computed without it.
    """

    decode: Sequence[DecodeOutput] = ()
    passes: Sequence[PassOutput | None] = ()
    failed: Mapping[int, MstarError] = field(default_factory=dict)
