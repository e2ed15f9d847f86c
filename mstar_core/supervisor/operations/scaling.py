"""Change of the number of replicas of a running deployment: new processes join, or cordoned ones leave."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.config.live import REQUESTS, carried_requests
from mstar_core.config.scaling import Change, Column, FreeDevice, without
from mstar_core.errors import StartError
from mstar_core.messages.names import follower_name, worker_name
from mstar_core.observe.frames import RankStatus
from mstar_core.supervisor.operations.cordons import Cordons
from mstar_core.supervisor.operations.rolling import ANSWER_S, RollingDeployment, until_ready

UNKNOWN_BYTES: Final = 1 << 62
"""Free memory of a GPU that is not reserved yet: it is checked when the process starts."""


class ScalableDeployment(RollingDeployment, Protocol):
    """The parts of the supervisor that a change of scale uses."""

    def respecify(self, spec: DeploymentSpec) -> None:
        """Replace the spec and make the processes read it that can."""

    async def open_hosts(self) -> None:
        """Reserve room on hosts that only the plan names, and start their agents. Raises StartError."""

    async def close_hosts(self) -> None:
        """Give back the room on hosts that the plan does not name any more."""

    async def enlist(self) -> None:
        """Start the processes of the plan that have not been started."""

    async def retire(self, names: Sequence[str]) -> None:
        """End processes for good."""


def check_room(
    change: Change,
    ranks: Mapping[str, RankStatus],
    free_bytes: Mapping[tuple[str, str], int],
    host_free: Callable[[str], int | None],
) -> None:
    """Raise StartError if the new ranks do not fit into the free memory, by what the copied ones use.

    ranks: by number as text. free_bytes: of the devices, by host and device. host_free: returns the free memory of a
    host, None if unknown.
    """
    plans = {rank.rank: rank for rank in change.plan.ranks}
    needed: Counter[str] = Counter()
    for new, old in change.copied:
        known, plan = ranks.get(str(old)), plans[new]
        if known is None:
            continue
        if plan.device == "cpu":
            needed[plan.host] += known.resident_bytes or 0
        elif (used := known.memory_used or 0) > (free := free_bytes.get((plan.host, plan.device), 0)):
            raise _no_room(f"{plan.device} of host {plan.host}" if plan.host else plan.device, used, free)
    for host, size in needed.items():
        if (left := host_free(host)) is not None and size > left:
            raise _no_room(f"host {host}" if host else "the host", size, left)


NEW_HOST: Final = "host"
"""Beginning of the names of hosts that a change of scale adds. Where they are is known once they are reserved."""


def reservable(spec: DeploymentSpec, replicas: int) -> list[FreeDevice]:
    """Return GPUs that may be reserved for new replicas in a cluster: a new host for each, with as many as it needs."""
    current = min((len(place.replicas) for place in spec.plan.placements), default=1)
    on_gpu = sum(rank.device != "cpu" for rank in spec.plan.ranks)
    each = -(-on_gpu // max(1, current))
    taken = {host.name for host in spec.hosts}
    names = (name for number in itertools.count(1) if (name := f"{NEW_HOST}-{number}") not in taken)
    hosts = itertools.islice(names, max(0, replicas - current) if spec.hosts else 0)
    return [
        FreeDevice(name=f"cuda:{index}", key="", free_bytes=UNKNOWN_BYTES, host=host)
        for host in hosts
        for index in range(each)
    ]


def _no_room(where: str, needed: int, free: int) -> StartError:
    detail = f"they need {needed >> 20:,} MiB, as much as the ones that they copy use; {free >> 20:,} MiB are free"
    return StartError(f"the new replicas do not fit into the memory of {where}", detail, "ask for fewer", phase="plan")


class Scaling:
    """One change of scale. keys: of the locks of new devices. drain_s: limit for the requests of a leaving replica."""

    def __init__(
        self,
        deployment: ScalableDeployment,
        cordons: Cordons,
        change: Change,
        *,
        keys: Mapping[str, str],
        drain_s: float,
    ) -> None:
        self._deployment = deployment
        self._cordons = cordons
        self._change = change
        self._drain_s = drain_s
        self._keys = keys

    @property
    def steps(self) -> int:
        """Number of steps."""
        return bool(self._change.added) + len(self._change.removed)

    async def run(self, begins: Callable[[str, int], None]) -> None:
        """Start the new replicas, then end those that leave. Raises StartError if a new process does not start.

        begins: called with each step in words and the number of steps before it.
        """
        done = 0
        if self._change.added:
            begins(f"starting {_listed(*self._change.added)}", done)
            await self._add()
            done = 1
        for column in self._change.removed:
            begins(f"ending {_listed(column)}", done)
            await self._remove(column)
            done += 1

    async def _add(self) -> None:
        deployment, before = self._deployment, self._deployment.spec
        names = [name for column in self._change.added for name in self._names(column)]
        seen = len(deployment.deaths)

        def is_ready() -> bool:
            return all(name in deployment.children and deployment.children[name].is_ready for name in names)

        plan = self._change.plan
        gpus = {**before.gpus, **self._keys}
        deployment.respecify(msgspec.structs.replace(before, plan=plan, slots=before.rank_slots, gpus=gpus))
        try:
            await deployment.open_hosts()
            await deployment.enlist()
            hint = "the other replicas serve on"
            await until_ready(deployment, names, is_ready, seen=seen, failed="did not start", hint=hint)
        except BaseException:
            await deployment.retire(names)
            deployment.respecify(msgspec.structs.replace(deployment.spec, plan=before.plan, gpus=before.gpus))
            await deployment.close_hosts()
            raise

    async def _remove(self, column: Column) -> None:
        deployment, cordons = self._deployment, self._cordons
        plan = deployment.spec.plan
        leaders = frozenset(rank.rank for rank in plan.ranks if rank.rank in column and rank.nodes)
        cordons.set(passing=leaders)
        try:
            if not await deployment.changes.until(lambda: cordons.is_idle(leaders), self._drain_s):
                cordons.evict(leaders)
                await deployment.changes.until(lambda: cordons.is_idle(leaders), ANSWER_S)
            names = self._names(column)
            smaller = without(plan, set(column))
            deployment.respecify(msgspec.structs.replace(_limited(deployment.spec, smaller), plan=smaller))
            await deployment.retire(names)
            await deployment.close_hosts()
            cordons.set(kept=cordons.kept - leaders)
        finally:
            cordons.set(passing=frozenset())

    def _names(self, column: Column) -> list[str]:
        """Return the processes of a column, of the plan that has it."""
        plans = (self._change.plan, self._deployment.spec.plan)
        ranks = {rank.rank: rank for plan in plans for rank in plan.ranks if rank.rank in column}
        leading = [worker_name(rank.rank) for rank in ranks.values() if rank.nodes]
        return leading + [follower_name(rank.rank) for rank in ranks.values() if rank.follows]


def _limited(spec: DeploymentSpec, plan: Plan) -> DeploymentSpec:
    """Return a spec whose requests at once the replicas of a smaller plan carry."""
    most = carried_requests(plan, spec.rank_slots)
    if spec.max_concurrent_requests <= most:
        return spec
    provenance = {**spec.provenance, REQUESTS: f"lowered from {spec.max_concurrent_requests} as replicas left"}
    return msgspec.structs.replace(spec, max_concurrent_requests=most, provenance=provenance)


def _listed(*columns: Column) -> str:
    ranks = [str(rank) for column in columns for rank in column]
    return f"rank {', '.join(ranks)}"
