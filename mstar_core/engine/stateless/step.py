"""Step of the stateless engine in flight, and the hand-over of its outputs to their readers."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from mstar_core.engine.base import StepResult


@dataclass(slots=True)
class StatelessStep:
    """A step in flight. finished: event at its end, None on a CPU. stays: only the device reads its outputs.

    before: the end of the step before. A step that stays is collected from then on, so at most one of them runs ahead
    of the device.
    """

    result: StepResult
    started: float
    finished: torch.cuda.Event | None = None
    stays: bool = False
    before: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        """Whether it can be collected without waiting."""
        awaited = self.before if self.stays else self.finished
        return awaited is None or awaited.query()

    def hand_over(self, device: torch.device) -> None:
        """Make its outputs ready: the host waits for those that it reads, the worker's stream for those that stay.

        All readers, copies to the host and to other ranks included, use the worker's stream. The memory of an output is
        not reused before that stream has passed its readers, even if the request is gone by then.
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
    """Return whether a step gives nothing but outputs on these ports, which nodes of its device read."""
    if not ports or not result.done or result.failed or result.emissions:
        return False
    return all(done.outputs and done.outputs.keys() <= ports for done in result.done)
