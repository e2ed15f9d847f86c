"""Progress of a training stage, by seconds on a GPU or by steps in a test, and its log."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Pace:
    """Clock of one stage, owned by its training loop. Ends after `steps` if given, else after `seconds`."""

    seconds: float
    steps: int | None = None
    log: Path | None = None
    step: int = 0
    _start: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def advance(self) -> float:
        """Count one step and return the progress before it, 0 to 1; 1 ends the loop."""
        share = self.step / self.steps if self.steps else self.elapsed_s / self.seconds
        self.step += 1
        return min(share, 1.0)

    def rate(self, share: float, warm_up: int = 100) -> float:
        """Return the factor of the learning rate: linear warm-up in steps, then cosine to 2 %."""
        return min(self.step / warm_up, 1.0) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))

    def note(self, **values: object) -> None:
        """Print one JSON line and append it to the log."""
        line = json.dumps({"step": self.step, "seconds": round(self.elapsed_s, 1), **values})
        print(line, flush=True)
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(line + "\n")
