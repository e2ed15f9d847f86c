"""All hosts of a fleet: each call goes to the host that its deployment or device names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.head import DeploymentHead
from mstar_core.gateway.fleet.hosting import DeploymentHost, DeploymentStart, Need
from mstar_core.gateway.fleet.hosts.names import host_of, name_there, qualified
from mstar_core.gateway.parts import Replica
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.host.gpu_locks import Holder
from mstar_core.host.other_hosts.contexts import LOCAL

Made = Callable[[str], DeploymentHost]


class FleetHosts:
    """The hosts by name. Owned by the fleet. make: returns the host of a name that is new, or raises MstarError."""

    def __init__(self, make: Made) -> None:
        self._make = make
        self._hosts: dict[str, DeploymentHost] = {}
        self._unknown: dict[str, MstarError] = {}

    async def take(self, names: Iterable[str]) -> None:
        """Connect to hosts that are new. Those that are no longer named stay, because their deployments end first."""
        self._unknown.clear()
        new = []
        for name in dict.fromkeys([LOCAL, *names]):
            if name not in self._hosts:
                try:
                    self._hosts[name] = self._make(name)
                except MstarError as error:  # no such context
                    self._unknown[name] = error
                else:
                    new.append(self._hosts[name].start())
        await asyncio.gather(*new)

    async def close(self) -> None:
        """End all connections. Deployments go on."""
        await asyncio.gather(*(host.close() for host in self._hosts.values()))

    def fault(self, host: str) -> MstarError | None:
        """Return why a host cannot be used now; None if it can."""
        return self._unknown.get(host) or self._hosts[host].fault

    async def survey(self, entry: ModelEntry, host: str) -> Need:
        """Return the memory of one deployment on a host. Raises the MstarError of an entry that cannot start there."""
        need = await self._of(host).survey(entry)
        claims = {
            qualified(host, key): structs.replace(claim, device=qualified(host, claim.device))
            for key, claim in need.claims.items()
        }
        return replace(need, claims=claims)

    async def launch(
        self, entry: ModelEntry, name: str, need: Need, owner: str, *, is_replacement: bool = False
    ) -> DeploymentStart:
        """Start a deployment called `name` on its host, with the token of its owner."""
        claims = {
            name_there(key): structs.replace(claim, device=name_there(claim.device))
            for key, claim in need.claims.items()
        }
        there = replace(need, claims=claims)
        return await self._of(host_of(name)).launch(
            entry, name_there(name), there, owner, is_replacement=is_replacement
        )

    async def heads(self, names: Sequence[str]) -> Mapping[str, tuple[Replica, DeploymentHead | None]]:
        """Return those of the deployments that run, with their heads; none of a host that cannot be used."""
        asked: dict[str, list[str]] = {}
        for name in names:
            if self.fault(host_of(name)) is None:
                asked.setdefault(host_of(name), []).append(name_there(name))
        found = await asyncio.gather(*(self._hosts[host].heads(there) for host, there in asked.items()))
        return {
            qualified(host, name): each
            for host, heads in zip(asked, found, strict=True)
            for name, each in heads.items()
        }

    async def sleep(self, name: str, level: int) -> None:
        """Return when the deployment sleeps. Raises StateConflict if requests run on it, MstarError if it cannot."""
        await self._of(host_of(name)).sleep(name_there(name), level)

    async def wake(self, name: str) -> None:
        """Return when the deployment serves again. Raises StartError, with its code, if its memory is taken."""
        await self._of(host_of(name)).wake(name_there(name))

    async def end(self, name: str) -> None:
        """Return when the deployment has ended; requests in flight finish first."""
        await self._of(host_of(name)).end(name_there(name))

    def host_memory(self, host: str) -> int:
        """Return the free memory of a host in bytes."""
        return self._of(host).host_memory()

    def holders(self, key: str) -> Sequence[Holder]:
        """Return the holders of a device in the ledger of its host; none while the host cannot be used."""
        host = host_of(key)
        if self.fault(host) is not None:
            return ()
        found = self._hosts[host].holders(name_there(key))
        return found if host == LOCAL else [replace(each, name=_holder_name(host, each.name)) for each in found]

    def _of(self, host: str) -> DeploymentHost:
        """Return a host that can be used. Raises its fault."""
        fault = self.fault(host)
        if fault is not None:
            raise fault
        return self._hosts[host]


def _holder_name(host: str, name: str) -> str:
    return qualified(host, name) if name else ""
