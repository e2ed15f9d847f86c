"""Operations of a running deployment: cordons, and one longer operation at a time. Owned by the supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from mstar_core.config.live import with_live
from mstar_core.config.scaling import FreeDevice, with_replicas
from mstar_core.config.schema import values_of
from mstar_core.errors import MstarError, StateConflict, Unavailable
from mstar_core.host.gpu_locks import acquire_gpus, release
from mstar_core.messages.life import Cordon
from mstar_core.observe.frames import RankStatus
from mstar_core.supervisor.events import Events
from mstar_core.supervisor.operations.cordons import Cordons, leaders_of
from mstar_core.supervisor.operations.operation import Operation
from mstar_core.supervisor.operations.rolling import RollingRestart, has_other_replica, ready_ranks
from mstar_core.supervisor.operations.scaling import ScalableDeployment, Scaling, check_room, reservable

SERVING = ("ready", "degraded")
CARRIED_OUT = (*SERVING, "sleeping")
"""States in which an operation goes on."""


class OperableDeployment(ScalableDeployment, Protocol):
    """The parts of the supervisor that operations use."""

    state: str
    reason: str
    events: Events

    def ranks(self) -> Mapping[str, RankStatus]:
        """Return the ranks as they are shown, by number."""

    def host_free(self, host: str) -> int | None:
        """Return the free memory of a host in bytes, None if unknown. host: empty for the supervisor's."""

    @property
    def is_restarting(self) -> bool:
        """Whether a restart of all processes is in progress."""

    def check_awake(self) -> None:
        """Raise StateConflict if the deployment, or a node of it, sleeps."""


class Operations:
    """Checks, runs and records operations.

    tell: sends the cordons to the conductor. start: runs a coroutine as a task of the supervisor. show: shows the step
    of an operation as the reason of the deployment's state. ended: called after each operation.
    """

    def __init__(
        self,
        deployment: OperableDeployment,
        *,
        tell: Callable[[Cordon], object],
        start: Callable[[Coroutine[Any, Any, None]], object],
        show: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        self.cordons = Cordons(tell, deployment.changes)
        self.latest: Operation | None = None
        self._next_rank = 0
        self._locks: dict[str, dict[str, int]] = {}  # of GPUs of added ranks, by device
        self._deployment = deployment
        self._start = start
        self._show = show
        self._ended = ended

    @property
    def is_running(self) -> bool:
        """Whether an operation is in progress."""
        return self.latest is not None and self.latest.is_running

    # -- cordons ------------------------------------------------------------------------------------------------

    def cordon(self, rank: int) -> dict[str, list[int]]:
        """Make the router avoid a rank, or the group that it follows in, until `uncordon`. Returns the cordons.

        Its requests may finish within the drain limit; those that remain then end as by the death of its worker.
        Raises NotFound for an unknown rank, StateConflict if no other replica could take its requests.
        """
        deployment, cordons = self._deployment, self.cordons
        leaders = leaders_of(deployment.spec.plan, rank)
        others = ready_ranks(deployment.children) - cordons.ranks - leaders
        for leader in leaders - cordons.ranks:
            if not has_other_replica(deployment.spec.plan, leader, others):
                hint = "mstarctl drain refuses all requests; mstarctl restart --rolling renews its process"
                raise StateConflict(f"rank {rank} has no other replica that is ready", hint=hint, code="only_replica")
        if new := leaders - cordons.kept:
            deployment.events.add("rank.cordoned", ranks=sorted(new))
            cordons.set(kept=cordons.kept | leaders)
            self._start(self._evict_late(leaders))
        return self._cordons_of(leaders)

    def uncordon(self, rank: int) -> dict[str, list[int]]:
        """Let the router choose a rank again. Returns the cordons. Raises NotFound."""
        cordons, leaders = self.cordons, leaders_of(self._deployment.spec.plan, rank)
        if ended := leaders & cordons.kept:
            self._deployment.events.add("rank.uncordoned", ranks=sorted(ended))
            cordons.set(kept=cordons.kept - leaders)
        return self._cordons_of(leaders)

    def _cordons_of(self, leaders: frozenset[int]) -> dict[str, list[int]]:
        """Return the ranks that a call concerned, and all that operators have cordoned."""
        return {"ranks": sorted(leaders), "cordoned": sorted(self.cordons.kept)}

    async def _evict_late(self, ranks: frozenset[int]) -> None:
        cordons, limit_s = self.cordons, self._deployment.spec.drain_timeout_s
        is_over = await self._deployment.changes.until(
            lambda: cordons.is_idle(ranks) or not ranks <= cordons.kept, limit_s
        )
        if not is_over:
            self._deployment.events.add("rank.evicted", ranks=sorted(ranks), after_s=limit_s)
            cordons.evict(ranks)

    # -- settings -----------------------------------------------------------------------------------------------

    def set_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change live keys of the configuration. Returns the new and the old values. Raises ConfigError."""
        deployment = self._deployment
        before, at = values_of(deployment.spec), time.strftime("%Y-%m-%d %H:%M:%S%z")
        spec = with_live(deployment.spec, values, at)
        after = values_of(spec)
        changed = {key: {"value": after[key], "before": before[key]} for key in values}
        deployment.respecify(spec)
        deployment.events.add("config.set", values={key: after[key] for key in values})
        return {"values": changed}

    # -- operations ---------------------------------------------------------------------------------------------

    def restart(self) -> dict[str, Any]:
        """Begin a rolling restart and return its record.

        Raises StateConflict during another operation or restart, Unavailable unless all processes are ready.
        """
        self.check_ready()
        deployment = self._deployment
        operation = self._begin("rolling restart", len(deployment.units()))
        limit_s = deployment.spec.drain_timeout_s
        rolling = RollingRestart(
            deployment,
            self.cordons,
            drain_s=limit_s,
            begins=partial(self._step, operation),
            cut=lambda name: deployment.events.add("child.evicted", child=name, after_s=limit_s),
        )
        self._start(self._carry_out(operation, rolling.run()))
        return operation.facts()

    def scale(self, replicas: int, free: Sequence[FreeDevice]) -> dict[str, Any]:
        """Begin a change of the number of replicas and return its record. free: GPUs that new ranks may use.

        Raises ConfigError for a number or a plan that cannot be, StartError if devices or memory do not suffice, and
        what `restart` raises.
        """
        self.check_ready()
        deployment, plan = self._deployment, self._deployment.spec.plan
        self._next_rank = max(self._next_rank, *(rank.rank + 1 for rank in plan.ranks))
        hosts = [host.name for host in deployment.spec.hosts] or [""]
        free = [*free, *reservable(deployment.spec, replicas)]
        change = with_replicas(plan, replicas, free, self._next_rank, hosts=hosts, spread=deployment.spec.ray.spread)
        free_bytes = {(device.host, device.name): device.free_bytes for device in free}
        check_room(change, deployment.ranks(), free_bytes, deployment.host_free)
        added = {rank for column in change.added for rank in column}
        # Agents lock the GPUs of other hosts before they start a process there.
        devices = {rank.device for rank in change.plan.ranks if rank.rank in added and not rank.host}
        keys = {device.name: device.key for device in free if device.name in devices and not device.host}
        for name, key in keys.items():
            self._locks[name] = acquire_gpus({name: key}, deployment.spec.name)
        limit_s = deployment.spec.drain_timeout_s
        scaling = Scaling(deployment, self.cordons, change, keys=keys, drain_s=limit_s)
        operation = self._begin("change of scale", scaling.steps)
        self._next_rank = max(self._next_rank, *(rank.rank + 1 for rank in change.plan.ranks))
        deployment.events.add("deployment.scaled", replicas=replicas, added=sorted(added))
        self._start(self._carry_out(operation, scaling.run(partial(self._step, operation))))
        return operation.facts()

    def replace(self, run: Callable[[Callable[[str, int], None]], Coroutine[Any, Any, None]]) -> None:
        """Begin the replacement by another deployment. run: called with the function that records each step.

        Raises what `check_serving` raises.
        """
        self.check_serving()
        operation = self._begin("replacement", 2)
        self._start(self._carry_out(operation, run(partial(self._step, operation))))

    def begin(self, kind: str, work: Coroutine[Any, Any, None]) -> dict[str, Any]:
        """Begin an operation of one step, during which the deployment stays ready. Returns its record."""
        operation = self._begin(kind, 1)
        operation.begin(kind, 0)
        self._start(self._carry_out(operation, work))
        return operation.facts()

    def locks(self) -> dict[str, int]:
        """Return the descriptors of the locks of added GPUs by key."""
        return {key: fd for held in self._locks.values() for key, fd in held.items()}

    def check_idle(self) -> None:
        """Raise StateConflict if an operation is in progress."""
        if self.latest is not None and self.latest.is_running:
            hint = f"mstarctl ps {self._deployment.spec.name} shows its progress"
            raise StateConflict(f"a {self.latest.kind} is in progress", self.latest.step, hint, code="in_progress")

    def check_ready(self, *, is_asleep_good: bool = False) -> None:
        """Raise the reason why no operation can begin. is_asleep_good: it may begin while nodes sleep.

        Raises StateConflict during another operation or restart, Unavailable unless all processes are ready.
        """
        self._check_unbroken()
        deployment = self._deployment
        if not is_asleep_good:
            deployment.check_awake()
        late = [f"{c.name} is in phase {c.phase}" for c in deployment.children.values() if c.state != "ready"]
        is_good = deployment.state == "ready" or (is_asleep_good and deployment.state == "sleeping")
        if not is_good or late:
            why, hint = ", ".join(late) or f"it is {deployment.state}", "wait until mstarctl ps shows ready"
            raise Unavailable("not all processes are ready", why, hint, code="not_ready")

    def check_serving(self) -> None:
        """Raise the reason why the deployment cannot be replaced. Processes that are being restarted are none."""
        self._check_unbroken()
        self._deployment.check_awake()
        if self._deployment.state not in SERVING:
            why, hint = f"it is {self._deployment.state}", "wait until mstarctl ps shows ready"
            raise Unavailable("the deployment does not serve", why, hint, code="not_ready")

    def _check_unbroken(self) -> None:
        self.check_idle()
        deployment = self._deployment
        if deployment.is_restarting:
            hint = "wait until mstarctl ps shows ready"
            raise StateConflict("the deployment is restarting", hint=hint, code="restarting")
        if deployment.state == "draining":
            raise Unavailable("the deployment is draining", hint="mstarctl resume ends the drain", code="draining")
        if deployment.state == "unhealthy":
            hint = "mstarctl restart, without --rolling, starts all processes again"
            raise Unavailable("the deployment is unhealthy", deployment.reason, hint, code="unhealthy")

    def _begin(self, kind: str, total: int) -> Operation:
        self.latest = Operation(number=1 if self.latest is None else self.latest.number + 1, kind=kind, total=total)
        return self.latest

    def _step(self, operation: Operation, step: str, done: int) -> None:
        self._check_serving()
        operation.begin(step, done)
        self._show(f"{operation.kind}: {step}, {done + 1} of {operation.total}")

    def _check_serving(self) -> None:
        """Raise StateConflict if the deployment drains or ends, which abandons an operation."""
        deployment = self._deployment
        if deployment.state not in CARRIED_OUT:
            raise StateConflict(f"the deployment is {deployment.state}", hint=f"mstarctl ps {deployment.spec.name}")

    async def _carry_out(self, operation: Operation, work: Coroutine[Any, Any, None]) -> None:
        """Run an operation to its end. It is abandoned if the deployment drains or ends meanwhile."""
        changes = self._deployment.changes
        doing = asyncio.ensure_future(work)
        doing.add_done_callback(lambda task: changes.notify())
        state, cause, hint = "failed", "the supervisor has ended it", ""
        try:
            await changes.until(lambda: doing.done() or self._deployment.state not in CARRIED_OUT)
            if not doing.done():
                self._check_serving()
            await doing
            state, cause, operation.done = "done", "", operation.total
        except MstarError as error:
            cause, hint = f"{error.title}{': ' if error.detail else ''}{error.detail}", error.hint
            self._deployment.events.add("operation.failed", operation=operation.kind, step=operation.step, cause=cause)
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)
            operation.state, operation.error, operation.hint = state, cause, hint
            self._release_locks()
            self._ended()
            changes.notify()

    def _release_locks(self) -> None:
        """Release the GPUs that an operation has locked and that no rank uses now."""
        used = {rank.device for rank in self._deployment.spec.plan.ranks if not rank.host}
        for device in [device for device in self._locks if device not in used]:
            release(self._locks.pop(device))
