"""Rolling restart: renews one process or tensor-parallel group after the other while the deployment serves.

Workers come first, then the conductor and the api, because every process speaks to these two.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.errors import StartError
from mstar_core.messages.names import API, CONDUCTOR, rank_of
from mstar_core.supervisor.operations.changes import Changes
from mstar_core.supervisor.operations.cordons import Cordons

if TYPE_CHECKING:
    from mstar_core.supervisor.child import Child

ANSWER_S: Final = 5.0
"""Time limit for the conductor to confirm new cordons."""

Unit = list["Child"]
"""A process, or a tensor-parallel group with its leader first."""


class RollingDeployment(Protocol):
    """The parts of the supervisor that a rolling restart uses."""

    spec: DeploymentSpec
    deaths: list[dict[str, Any]]
    children: dict[str, Child]
    changes: Changes

    def units(self) -> list[list[Child]]:
        """Return the processes that are renewed together."""

    def renew(self, group: Unit) -> None:
        """Stop the processes of a group, and start them again once they have ended."""

    def pause(self) -> Callable[[], bool]:
        """Make new requests wait. Returns a function that tells whether no request runs any more."""

    def unpause(self) -> None:
        """Let waiting requests go on."""

    def hand_over(self) -> Callable[[], bool]:
        """Make the api accept no more connections. Returns a function that tells whether it has no request left."""

    def take_back(self) -> None:
        """Let the api accept connections again, if it still runs."""


def in_rolling_order(units: Iterable[Unit]) -> list[Unit]:
    """Return the units in the order of a rolling restart."""
    last = {CONDUCTOR: 1, API: 2}
    return sorted(units, key=lambda unit: (last.get(unit[0].name, 0), rank_of(unit[0].name) or 0))


def has_other_replica(plan: Plan, rank: int, ready: Iterable[int]) -> bool:
    """Return whether requests can be served without the process that leads `rank`: another replica of each node is up.

    ready: leading ranks that take requests.
    """
    others = frozenset(ready) - {rank}
    concerned = [place.replicas for place in plan.placements if any(replica[0] == rank for replica in place.replicas)]
    return all(any(replica[0] in others for replica in replicas) for replicas in concerned)


def ready_ranks(children: Mapping[str, Child]) -> frozenset[int]:
    """Return the ranks whose workers are ready; of a tensor-parallel group only that of its leader."""
    ready = (rank_of(name) for name, child in children.items() if child.is_ready)
    return frozenset(rank for rank in ready if rank is not None)


async def until_ready(
    deployment: RollingDeployment,
    names: Collection[str],
    is_ready: Callable[[], bool],
    *,
    seen: int,
    failed: str,
    hint: str,
) -> None:
    """Wait until processes that start are ready. Raises StartError if one dies before.

    seen: number of deaths of the deployment before they were started. failed: what the error says of that process.
    """

    def death() -> dict[str, Any] | None:
        return next((record for record in deployment.deaths[seen:] if record.get("name") in names), None)

    await deployment.changes.until(lambda: is_ready() or death() is not None)
    if (record := death()) is not None:
        raise StartError(f"{record['name']} {failed}", str(record.get("message", "")), hint)


class RollingRestart:
    """One rolling restart. drain_s: limit for the requests of a unit; those that remain end as by its death.

    begins: called with the name of each unit and the number of units before it. cut: called with the name of a unit
    whose drain limit is reached.
    """

    def __init__(
        self,
        deployment: RollingDeployment,
        cordons: Cordons,
        *,
        drain_s: float,
        begins: Callable[[str, int], None],
        cut: Callable[[str], None],
    ) -> None:
        self._deployment = deployment
        self._cordons = cordons
        self._drain_s = drain_s
        self._begins = begins
        self._cut = cut

    async def run(self) -> None:
        """Renew all processes. Raises StartError if one does not come back."""
        for number, unit in enumerate(in_rolling_order(self._deployment.units())):
            self._begins(unit[0].name, number)
            await self._renewal(unit)(unit)

    def _renewal(self, unit: Unit) -> Callable[[Unit], Awaitable[None]]:
        others: Mapping[str, Callable[[Unit], Awaitable[None]]] = {CONDUCTOR: self._conductor, API: self._api}
        return others.get(unit[0].name, self._worker)

    async def _worker(self, unit: Unit) -> None:
        deployment, cordons = self._deployment, self._cordons
        rank = rank_of(unit[0].name)
        assert rank is not None
        ranks = frozenset((rank,))
        is_alone = not has_other_replica(deployment.spec.plan, rank, ready_ranks(deployment.children) - cordons.ranks)
        has_ended = deployment.pause() if is_alone else bool
        try:
            cordons.set(passing=ranks)
            await self._drained(unit, lambda: cordons.is_idle(ranks) and (not is_alone or has_ended()))
            if not cordons.is_idle(ranks):
                cordons.evict(ranks)
                await deployment.changes.until(lambda: cordons.is_idle(ranks), ANSWER_S)
            await self._renewed(unit)
        finally:
            cordons.set(passing=frozenset())
            if is_alone:
                await self._go_on()

    async def _conductor(self, unit: Unit) -> None:
        has_ended = self._deployment.pause()
        try:
            await self._drained(unit, has_ended)
            await self._renewed(unit)
        finally:
            await self._go_on()

    async def _go_on(self) -> None:
        """Let waiting requests go on. None may overtake the news of a worker on the way to the conductor."""
        await self._deployment.changes.until(lambda: self._cordons.is_known, ANSWER_S)
        self._deployment.unpause()

    async def _api(self, unit: Unit) -> None:
        try:
            await self._drained(unit, self._deployment.hand_over())
            await self._renewed(unit)
        finally:
            self._deployment.take_back()

    async def _drained(self, unit: Unit, has_ended: Callable[[], bool]) -> None:
        if not await self._deployment.changes.until(has_ended, self._drain_s):
            self._cut(unit[0].name)

    async def _renewed(self, unit: Unit) -> None:
        """Renew the processes of a unit and wait until all are ready. Raises StartError if one dies before."""
        deployment, seen = self._deployment, len(self._deployment.deaths)
        lives = {child.name: child.incarnation for child in unit}

        def is_ready() -> bool:
            return all(child.is_ready and child.incarnation > lives[child.name] for child in unit)

        deployment.renew(unit)
        hint = "the other processes serve on"
        await until_ready(deployment, lives, is_ready, seen=seen, failed="did not come back", hint=hint)
