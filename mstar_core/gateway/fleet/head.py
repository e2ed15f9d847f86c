"""State of a deployment of this host, read from its admin socket. Used by fleets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.admin_socket import call
from mstar_core.gateway.parts import LoadProgress, ModelState

ANSWER_S: Final = 2.0
WAKE: Final = "wake"
"""Phase of a deployment that wakes; its progress is in bytes."""

STATES: Final = {
    "starting": ModelState.LOADING,
    "ready": ModelState.READY,
    "degraded": ModelState.READY,
    "sleeping": ModelState.SLEEPING,
    "asleep": ModelState.SLEEPING,
    "failed": ModelState.FAILED,
    "unhealthy": ModelState.FAILED,
}
"""States of a model by those of a deployment. A deployment that drains or stops is absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentHead:
    """Report of a supervisor. done, total: bytes of the current phase of a start, or of a wake.

    owner: token of the gateway that has started it. sleep_level: of its sleep, 0 if it is awake. sleep_copies: its
    weights stay in host memory after a wake. weights_bytes: their size, 0 if that is not known yet.
    """

    state: str
    reason: str = ""
    phase: str = ""
    done: int = 0
    total: int = 0
    running: int = 0
    waiting: int = 0
    pid: int = 0
    owner: str = ""
    sleep_level: int = 0
    sleep_copies: bool = False
    weights_bytes: int = 0

    @property
    def model_state(self) -> ModelState:
        """The state of the model that this deployment serves."""
        return STATES.get(self.state, ModelState.ABSENT)

    @property
    def is_coming(self) -> bool:
        """Whether it starts or wakes."""
        state = self.model_state
        return state is ModelState.LOADING or state is ModelState.SLEEPING and self.phase == WAKE

    @property
    def progress(self) -> LoadProgress:
        """Progress of the start or wake, for requests that wait for it."""
        share = min(1.0, self.done / self.total) if self.total else None
        state = ModelState.LOADING if self.is_coming else self.model_state
        return LoadProgress(state=state, text=self.phase or self.reason or self.state, share=share)


async def read_head(admin_socket: Path) -> DeploymentHead | None:
    """Return the head of a deployment; None if its supervisor does not answer in time."""
    try:
        facts = await call(admin_socket, "GET", "/v1/", limit_s=ANSWER_S)
    except MstarError:
        return None
    known = {name: facts[name] for name in DeploymentHead.__slots__ if facts.get(name) is not None}
    return DeploymentHead(**known) if "state" in known else None
