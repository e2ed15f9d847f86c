"""Clock, learning rate and log of a training stage."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Pace:
    """Progress of one stage, owned by its loop. It ends after `seconds` of one core, or after `steps` if given."""

    seconds: float
    steps: int | None = None
    log: Path | None = None
    step: int = 0
    _start: float = field(default_factory=time.process_time)

    @property
    def elapsed_s(self) -> float:
        return time.process_time() - self._start

    def advance(self) -> float:
        """Count one step. Returns the progress before it, 0 to 1; 1 ends the loop."""
        share = self.step / self.steps if self.steps else self.elapsed_s / self.seconds
        self.step += 1
        return min(share, 1.0)

    def set_rate(self, optimizer: torch.optim.Optimizer, rate: float, share: float, warm_up: int = 50) -> None:
        """Set the learning rate: warm-up over steps, then level, then a fall to 2 % over the last 60 %."""
        fall = max(0.0, (share - 0.4) / 0.6)
        factor = min(self.step / warm_up, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fall)))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor

    def note(self, **values: object) -> None:
        """Print one JSON line and append it to the log."""
        line = json.dumps({"step": self.step, "seconds": round(self.elapsed_s, 1), **values})
        print(line, flush=True)
        if self.log is not None:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
