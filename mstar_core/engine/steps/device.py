"""Interface of a runner to its scheduler: launches, limits of captured steps, and reads of device state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.steps.limits import StepLimits
    from mstar_core.engine.steps.output import StepOutput
    from mstar_core.engine.steps.plan import StepPlan
    from mstar_core.engine.steps.updates import Update


class Device(Protocol):
    """The runner as its scheduler sees it. Nothing else of a node touches the device."""

    @property
    def limits(self) -> StepLimits:
        """Limits of the captured steps at present."""

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

    def check_pages(self, groups: Sequence[Tensor], pages: int) -> None:
        """Raise EngineError unless staging tensors of another rank fit the pools of this one."""
