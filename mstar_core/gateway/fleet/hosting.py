"""Interface of a host that runs deployments of a fleet. Real in `local_host.py` and `hosts/`, faked in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.head import DeploymentHead
from mstar_core.gateway.parts import Replica
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.host.gpu_locks import Holder, MemoryClaim


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory of one deployment of a model. claims: by key of the ledger, empty where no ledger counts it.

    budget: value of `up --memory`; empty: whole GPUs, which a sleeping deployment does not give back.
    can_sleep: its devices can give memory back. config: path of the deployment file, empty if not known. why: reason
    for the file and the devices.
    """

    claims: Mapping[str, MemoryClaim] = field(default_factory=dict)
    budget: str = ""
    can_sleep: bool = True
    config: str = ""
    why: str = ""

    @property
    def claims_bytes(self) -> int:
        """Bytes of all its devices."""
        return sum(claim.need_bytes for claim in self.claims.values())

    @property
    def is_shared(self) -> bool:
        """Whether others may use the rest of its devices."""
        return bool(self.budget)

    @property
    def ends(self) -> bool:
        """Whether only the end of the deployment gives its memory back."""
        return not self.can_sleep or bool(self.claims) and not self.is_shared


class DeploymentStart(Protocol):
    """A start in progress."""

    async def until_placed(self) -> None:
        """Return when the deployment holds its memory. Raises the MstarError of a start that failed before."""
        ...

    async def until_ready(self) -> None:
        """Return when the deployment serves. Raises the MstarError of a start that failed."""
        ...


class DeploymentHost(Protocol):
    """Deployments of one host and its memory ledger."""

    @property
    def fault(self) -> MstarError | None:
        """Return why the host cannot be used now; None if it can."""
        ...

    async def start(self) -> None:
        """Connect, and return when the host can be used or has a fault."""
        ...

    async def close(self) -> None:
        """End the connection. Deployments go on."""
        ...

    async def survey(self, entry: ModelEntry) -> Need:
        """Return the memory of one deployment. Raises the MstarError of an entry that can never start."""
        ...

    async def launch(
        self, entry: ModelEntry, name: str, need: Need, owner: str, *, is_replacement: bool = False
    ) -> DeploymentStart:
        """Start a deployment called `name`. owner: token for its record.

        is_replacement: it takes over from the one of this name once it serves.
        """
        ...

    async def heads(self, names: Sequence[str]) -> Mapping[str, tuple[Replica, DeploymentHead | None]]:
        """Return those of the deployments that run, with their heads; None for one that does not answer."""
        ...

    async def sleep(self, name: str, level: int) -> None:
        """Return when the deployment sleeps. Raises StateConflict if requests run on it, MstarError if it cannot."""
        ...

    async def wake(self, name: str) -> None:
        """Return when the deployment serves again. Raises StartError, with its code, if its memory is taken."""
        ...

    async def end(self, name: str) -> None:
        """Return when the deployment has ended; requests in flight finish first."""
        ...

    def host_memory(self) -> int:
        """Return the free memory of the host in bytes."""
        ...

    def holders(self, key: str) -> Sequence[Holder]:
        """Return the holders of a device in the ledger."""
        ...
