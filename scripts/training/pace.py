"""Clock, learning rate and log of a training stage."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Pace:
    """Progress of one stage, owned by its loop. It ends after `seconds`, or after `steps` if these are given.

    clock: seconds, of the wall or of one core.
    """

    seconds: float
    steps: int | None = None
    log: Path | None = None
    step: int = 0
    clock: Callable[[], float] = time.monotonic
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self._start

    def advance(self) -> float:
        """Count one step. Returns the progress before it, 0 to 1; 1 ends the loop."""
        share = self.step / self.steps if self.steps else self.elapsed_s / self.seconds
        self.step += 1
        return min(share, 1.0)

    def factor(self, share: float, warm_up: int, level: float) -> float:
        """Return the factor of the learning rate: linear warm-up over steps, then 1, then a cosine to 2 %.

        level: share of the stage at which the cosine begins.
        """
        fall = max(0.0, (share - level) / (1 - level))
        return min(self.step / warm_up, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))

    def set_rate(self, optimizer: torch.optim.Optimizer, rate: float, share: float, warm_up: int = 50) -> None:
        """Set the learning rate: it falls over the last 60 % of the stage."""
        factor = self.factor(share, warm_up, 0.4)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor

    def note(self, **values: object) -> None:
        """Print one JSON line and append it to the log."""
        line = json.dumps({"step": self.step, "seconds": round(self.elapsed_s, 1), **values})
        print(line, flush=True)
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
