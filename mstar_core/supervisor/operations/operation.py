"""Record of an operation on a running deployment, at most one at a time. Owned by the supervisor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Operation:
    """Progress and outcome of an operation. number: counts operations. kind: in words, such as `rolling restart`.

    state: running, done or failed. done, total: its steps; step: the current one, in words; steps: all that have begun,
    for readers that poll. error, hint: why it failed, and what to try.
    """

    number: int
    kind: str
    state: str = "running"
    done: int = 0
    total: int = 0
    step: str = ""
    steps: list[str] = field(default_factory=list)
    error: str = ""
    hint: str = ""

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def begin(self, step: str, done: int) -> None:
        """Note that a step begins after `done` others."""
        self.step, self.done = step, done
        self.steps.append(step)

    def facts(self) -> dict[str, Any]:
        """Return all fields, for the admin socket."""
        return asdict(self)
