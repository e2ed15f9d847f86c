"""Record of an operation on a running deployment, at most one at a time. Owned by the supervisor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Operation:
    """Progress and outcome of an operation. number: counts operations. kind: in words, such as `rolling restart`.

    state: running, done or failed. done, total: its steps; step: the current one, in words. error, hint: why it failed,
    and what to try.
    """

    number: int
    kind: str
    state: str = "running"
    done: int = 0
    total: int = 0
    step: str = ""
    error: str = ""
    hint: str = ""

    @property
    def is_running(self) -> bool:
        return self.state == "running"

    def facts(self) -> dict[str, Any]:
        """Return all fields, for the admin socket."""
        return asdict(self)
