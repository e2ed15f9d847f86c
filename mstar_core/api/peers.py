"""What the api knows of the deployment: its state and which processes are there. Filled by the link, read by routes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from mstar_core.errors import MstarError, Unavailable, WorkerLost

CONDUCTOR: Final = "conductor"


@dataclass(slots=True)
class Deployment:
    """State of the deployment as last told by the supervisor. Owned by the link.

    state: starting, ready, draining, unhealthy. down: processes that are gone, with the sentence that says why.
    """

    state: str = "starting"
    phase: str = ""
    reason: str = ""
    is_draining: bool = False
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, str] = field(default_factory=dict)

    def problem(self) -> MstarError | None:
        """Why a request cannot be taken now; None when it can."""
        if self.is_draining or self.state == "draining":
            return Unavailable("the deployment is draining", hint="it takes no new requests", code="draining")
        if self.down and CONDUCTOR not in self.up:
            return WorkerLost(self.down.get(CONDUCTOR, "the conductor is gone"), hint="it is being restarted")
        if self.state == "starting":
            cause = next(iter(self.down.values()), "")
            if cause:
                return WorkerLost(cause, hint="it is being restarted")
            phase = f", phase {self.phase}" if self.phase else ""
            return Unavailable(f"the deployment is starting{phase}", hint=self.reason, code="starting")
        if self.state != "ready":
            return Unavailable(f"the deployment is {self.state}", hint=self.reason, code="unavailable")
        if CONDUCTOR not in self.up:
            return Unavailable("the conductor is not there yet", code="starting")
        return None
