"""A step of the stateless engine in flight: when it is done, and who waits for what it gives. Used by that engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Set

    from mstar_core.engine.base import StepResult


@dataclass(slots=True)
class StatelessRunning:
    """A step in flight; its outputs are on the device already or on their way.

    finished: its end, None on a CPU. stays: whether nobody waits for its outputs but the device. before: the end of the
    step before it, which is when one that stays is handed on: not two of them may run ahead of the device.
    """

    result: StepResult
    started: float
    finished: torch.cuda.Event | None = None
    stays: bool = False
    before: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        """Whether its results may be taken without a wait of the host."""
        awaited = self.before if self.stays else self.finished
        return awaited is None or awaited.query()

    def take_over(self, device: torch.device) -> None:
        """Wait for what is meant for the host; what stays on the device, the worker's stream waits for.

        Whatever reads the outputs does so on the worker's stream, a copy to the host or to another rank included; their
        memory serves nobody else before that stream is through with it, also where their request is gone by then.
        """
        if self.finished is None:
            return
        main = torch.cuda.current_stream(device)
        if self.stays:
            main.wait_event(self.finished)
        else:
            self.finished.synchronize()
        for outputs in (item.outputs for items in (self.result.done, self.result.emissions) for item in items):
            for value in outputs.values():
                if value.is_cuda:
                    value.record_stream(main)


def stays(result: StepResult, ports: Set[str]) -> bool:
    """Whether a step gives nothing but outputs on these ports, with which nodes of its device go on."""
    if not ports or not result.done or result.failed or result.emissions:
        return False
    return all(done.outputs and done.outputs.keys() <= ports for done in result.done)
