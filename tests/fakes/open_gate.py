"""Gate of a gateway without tenants: every request may run, and deployments check its key themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mstar_core.gateway.parts import AnsweredUsage, Replica, RequestFacts, TenantStanding
from mstar_core.gateway.serve_file import ServeFile


class OpenPermit:
    """A permit that counts nothing."""

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    async def written(self) -> None:
        """Write nothing."""

    def forwarded(self, replica: Replica) -> None:
        """Note nothing."""

    def used(self, usage: AnsweredUsage) -> None:
        """Count nothing."""

    def close(self, status: int) -> None:
        """Count nothing."""


class OpenGate:
    """A gate without limits."""

    takes_keys = False

    def __init__(self) -> None:
        self._permit = OpenPermit()

    async def start(self) -> None:
        """Open nothing."""

    async def close(self) -> None:
        """Close nothing."""

    async def apply(self, serve: ServeFile) -> None:
        """Take over nothing: a gateway that gets tenants is restarted."""

    def models_of(self, key: str | None, models: Sequence[str]) -> Sequence[str]:
        """Return all models."""
        return models

    async def standings(self) -> Sequence[TenantStanding]:
        """Return no tenant."""
        return ()

    async def admit(self, facts: RequestFacts) -> OpenPermit:
        """Return a permit at once."""
        return self._permit
