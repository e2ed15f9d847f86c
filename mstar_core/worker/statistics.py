"""Step counts and times of one node on one rank; summed up, so that a reader takes differences."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from mstar_core.engine.base import StepResult
from mstar_core.observe.metrics import STEP_ROWS, STEP_SECONDS, StepHistogram

RECENT: Final = 256
"""Steps that quantiles are taken from."""


@dataclass(slots=True)
class NodeStatistics:
    """Owned by the worker's loop; read by telemetry.

    launch_s, collect_s, route_s: seconds of the host that launching, collecting (any wait in it included) and routing
    steps took. busy_s: from launch to collection, so steps of several nodes overlap.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    last_rows: int = 0
    last_step_s: float = 0.0
    launch_s: float = 0.0
    collect_s: float = 0.0
    route_s: float = 0.0
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    took: StepHistogram = field(default_factory=lambda: StepHistogram(STEP_SECONDS))
    batched: StepHistogram = field(default_factory=lambda: StepHistogram(STEP_ROWS))

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self.steps += 1
        self.rows += result.rows
        self.tokens += result.tokens
        self.busy_s += result.duration_s
        self.last_rows = result.rows
        self.last_step_s = result.duration_s
        self.recent_s.append(result.duration_s)
        self.took.add(result.duration_s)
        self.batched.add(result.rows)

    def values(self) -> dict[str, float]:
        """Flat numbers for telemetry: totals, the last step's size and time, quantiles of the recent ones, buckets."""
        recent = sorted(self.recent_s)
        last = len(recent) - 1
        return {
            "steps": float(self.steps),
            "rows": float(self.rows),
            "tokens": float(self.tokens),
            "busy_s": round(self.busy_s, 4),
            "batch": float(self.last_rows),
            "step_s": round(self.last_step_s, 6),
            "step_p50_s": round(recent[last // 2], 6) if recent else 0.0,
            "step_p99_s": round(recent[last * 99 // 100], 6) if recent else 0.0,
            "launch_s": round(self.launch_s, 4),
            "collect_s": round(self.collect_s, 4),
            "route_s": round(self.route_s, 4),
            **self.took.values(),
            **self.batched.values(),
        }
