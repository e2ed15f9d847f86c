"""Fleet with a life cycle: loads models on demand, wakes them, and lets idle ones sleep where memory is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import msgspec

from mstar_core.errors import MstarError, NotFound, StateConflict, Unavailable, Unreachable
from mstar_core.gateway.fleet.clock import Clock
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.fleet.hosts.hosts import FleetHosts
from mstar_core.gateway.fleet.hosts.names import host_of
from mstar_core.gateway.fleet.hosts.placing import Option, everywhere, ordered
from mstar_core.gateway.fleet.managed_model import TURN_S, Failure, ManagedModel, Member
from mstar_core.gateway.fleet.room import Limit, Victim, can_suffice, choose_victims, held_by_device, refusal, shortages
from mstar_core.gateway.fleet.scaling import desired_replicas
from mstar_core.gateway.fleet.turns import MemoryTurn, MemoryTurns
from mstar_core.gateway.parts import Fleet, LoadProgress, ModelState, ModelStatus, Replica
from mstar_core.gateway.serve_file import ModelEntry, ServeFile, hosts_of
from mstar_core.gateway.serve_values import KeepKind
from mstar_core.gateway.sleep_rule import caution_of, with_default

log = logging.getLogger(__name__)

SCAN_S: Final = 1.0
"""Time between two readings of the heads of all deployments."""

PATIENCE_S: Final = 300.0
"""Longest wait for memory before requests are refused."""

HANDED_S: Final = 2.0
"""Time for which a replica stays awake for a request to which it was handed out."""

BACKOFF_S: Final = (5.0, 300.0)
"""First and longest time until a model that failed is tried again."""

ATTEMPTS: Final = 5
"""Attempts to take memory that another process took first."""

LOADED: Final = "loaded"
WOKEN: Final = "woken"
NEVER: Final = "gpu_memory_never"
AWAKE: Final = (ModelState.READY, ModelState.IDLE)
ROOM_CODES: Final = ("gpu_memory_short", "gpu_in_use", "gpu_memory", "no_memory")
STARTS: Final = ("target", "file", "weights", "device", "gpus", "set", "sleepable", "memory_text")
"""Fields of an entry that need a new deployment if they change."""


class ManagedFleet:
    """Models of a serve.yaml. Owned by the gateway's main, on its event loop.

    others: serves the models that are not managed: with a `url`, and deployments that others started. owner: token in
    the records of the deployments that this gateway, or one before it, has started.
    """

    def __init__(self, serve: ServeFile, hosts: FleetHosts, clock: Clock, others: Fleet, owner: str) -> None:
        self._serve = serve
        self._hosts = hosts
        self._clock = clock
        self._others = others
        self._owner = owner
        self._models: dict[str, ManagedModel] = {}
        self._members: dict[str, Member] = {}
        self._keeping: set[str] = set()  # deployments that keep copies of their weights on their host
        self._turns = MemoryTurns()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._adopt(serve)

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Find the deployments that run already, then follow them."""
        await self._others.start()
        await self._hosts.take(self._named())
        await self.scan()
        self._spawn(self._follow(), "fleet")
        self._spawn(self._plan_sleepers(), "plans of sleepers")

    async def close(self, *, is_final: bool) -> None:
        """Stop to manage. is_final: end the deployments that the gateway started; else another gateway goes on."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if is_final:
            owned = [member for member in self._members.values() if member.is_own]
            await asyncio.gather(*(self._end(member) for member in owned), return_exceptions=True)
        await self._hosts.close()
        await self._others.close(is_final=is_final)

    async def apply(self, serve: ServeFile) -> None:
        """Take over changed models. A model whose deployment must differ is replaced while it serves."""
        before, removed = dict(self._models), set(self._models) - {entry.name for entry in _managed(serve)}
        self._serve = serve
        self._adopt(serve)
        await self._hosts.take(self._named())
        for name in removed:
            for member in before[name].members:
                if member.is_own and member.state is not ModelState.ABSENT:
                    self._spawn(self._let_go(member), f"end {member.name}")
        for name, model in self._models.items():
            old = before.get(name)
            if old is not None and any(getattr(old.entry, key) != getattr(model.entry, key) for key in STARTS):
                self._spawn(self._replace(model), f"replace {name}")
        await self._others.apply(serve)
        await self.scan()
        self._spawn(self._plan_sleepers(), "plans of sleepers")

    async def _plan_sleepers(self) -> None:
        """Plan the models whose `keep` needs a sleep, so that one that cannot sleep is known before it is idle."""
        for model in list(self._models.values()):
            if model.entry.keep.kind is KeepKind.IDLE and model.need is None and model.can_sleep is None:
                try:
                    await self._need(model, model.hosts[0])
                except MstarError as error:  # its first request gets the cause
                    log.warning("%s cannot be planned: %s", model.name, error)
                    continue
            if caution := caution_of(model.entry, model.can_sleep):
                log.warning("%s: %s", model.name, caution)

    def _named(self) -> set[str]:
        """Return the hosts of all models."""
        return {host for model in self._models.values() for host in model.hosts}

    def _adopt(self, serve: ServeFile) -> None:
        """Make the models of a configuration. Those that stay keep their deployments."""
        models: dict[str, ManagedModel] = {}
        for entry in _managed(serve):
            model = ManagedModel(entry=entry)
            old = self._models.get(entry.name)
            if old is not None:
                model.members, model.loads, model.wakes = old.members, old.loads, old.wakes
                model.load_s, model.wake_s = old.load_s, old.wake_s
                is_same = all(getattr(old.entry, key) == getattr(entry, key) for key in STARTS)
                model.needs, model.owed = (old.needs if is_same else {}), old.owed
            models[entry.name] = model
        self._models = models
        self._members = {member.name: member for model in models.values() for member in model.members}

    # -- what the door reads --------------------------------------------------------------------------------------

    def names(self) -> Sequence[str]:
        """Return the names of all models in order."""
        ours = self._ours()
        return sorted([*self._models, *(name for name in self._others.names() if name not in ours)])

    def _ours(self) -> set[str]:
        """Return the names that deployments of models of this gateway have, or may get."""
        return set(self._members) | {name for model in self._models.values() for name in model.names()}

    def models(self) -> Sequence[ModelStatus]:
        """Return all models, by name. Reads the ledger of memory."""
        ours = self._ours()
        others = [status for status in self._others.models() if status.name not in ours]
        return sorted([*map(self._status, self._models.values()), *others], key=lambda status: status.name)

    def resolve(self, name: str) -> str | None:
        """Return the model with this name, else the first with this alias."""
        if name in self._models:
            return name
        aliased = next((model.name for model in self._models.values() if name in model.entry.aliases), None)
        return aliased or self._others.resolve(name)

    async def ready(self, model: str, progress: Callable[[LoadProgress], None]) -> Sequence[Replica]:
        """Return the replicas that take requests, after the model was loaded or woken.

        Raises Unavailable with `retry_after_s` where its queue is full, where it failed, or where no room can be made.
        """
        managed = self._models.get(model)
        if managed is None:
            return await self._others.ready(model, progress)
        if managed.awake and not managed.is_yielding:
            return self._hand_out(managed)
        seen, now = managed.failure, self._clock.now()
        if seen is not None and now < seen.until:
            raise self._unavailable(managed, seen)
        if managed.queued >= managed.entry.max_queue:
            raise Unavailable(
                f"the queue of {model} is full",
                f"{managed.queued} requests wait while it is {managed.state}",
                "retry later",
                code="queue_full",
                retry_after_s=managed.left_s(now),
            )
        managed.queued += 1
        try:
            return await self._wait_for(managed, seen, progress)
        finally:
            managed.queued -= 1

    async def _wait_for(
        self, managed: ManagedModel, seen: Failure | None, progress: Callable[[LoadProgress], None]
    ) -> Sequence[Replica]:
        while not managed.awake or managed.is_yielding:
            if self._models.get(managed.name) is not managed:
                current = self._models.get(managed.name)
                if current is None:
                    raise NotFound(f"model {managed.name!r} was removed", kind="model", name=managed.name)
                return await self.ready(managed.name, progress)
            if managed.failure is not None and managed.failure is not seen:
                raise self._unavailable(managed, managed.failure)
            changed = self._changed
            self._ensure(managed)
            progress(managed.progress())
            await self._clock.wait(changed, SCAN_S)
        return self._hand_out(managed)

    @contextmanager
    def using(self, replica: Replica) -> Iterator[None]:
        """Hold a replica awake while a request runs on it."""
        member = self._members.get(replica.deployment)
        if member is None:
            with self._others.using(replica):
                yield
            return
        member.running += 1
        member.last_used = self._clock.now()
        self._taken_up(member)
        try:
            yield
        finally:
            member.running -= 1
            member.last_used = self._clock.now()
            if not member.running:
                self._notify()

    def _hand_out(self, managed: ManagedModel) -> Sequence[Replica]:
        until = self._clock.now() + HANDED_S
        awake = managed.awake
        for member in awake:
            member.kept_until = until
            member.handed += 1
        return [member.replica for member in awake if member.replica is not None]

    def _taken_up(self, member: Member) -> None:
        """Count a request that has begun, so that replicas are kept for no longer than requests are about to come."""
        model = self._models.get(member.replica.model) if member.replica is not None else None
        for each in () if model is None else model.members:
            each.handed = max(0, each.handed - 1)
            if not each.handed and model is not None and not model.queued:
                each.kept_until = 0.0

    def _unavailable(self, managed: ManagedModel, failure: Failure) -> Unavailable:
        error = failure.error
        facts = {name: error.facts[name] for name in ("holders",) if name in error.facts}
        after_s = max(1.0, failure.until - self._clock.now())
        title = error.title if managed.name in error.title else f"{managed.name} cannot serve: {error.title}"
        stated = error.facts.get("retry_after_s")
        after_s = max(after_s, float(stated)) if isinstance(stated, int | float) else after_s
        hint = error.hint if error.code == NEVER else "retry later"
        return Unavailable(title, error.detail, hint, code=error.code, retry_after_s=after_s, **facts)

    def _status(self, model: ManagedModel) -> ModelStatus:
        claims = {key: claim for need in model.needs.values() for key, claim in need.claims.items()}
        devices = {key: claim.device for key, claim in claims.items()}
        failure = model.failure
        return ModelStatus(
            name=model.name,
            aliases=model.entry.aliases,
            state=model.state,
            replicas=tuple(member.replica for member in model.awake if member.replica is not None),
            totals={claim.device: claim.total_bytes for claim in claims.values()},
            held=held_by_device(devices, self._hosts.holders, [member.name for member in model.members]),
            running=model.running,
            queued=model.queued,
            loads=model.loads,
            wakes=model.wakes,
            sleep_level=model.sleep_level,
            reason=model.waits_for or ("" if failure is None else str(failure.error)),
            can_sleep=model.can_sleep,
            caution="; ".join(filter(None, [caution_of(model.entry, model.can_sleep), *self._faults(model)])),
            places=model.places(),
            progress=model.progress() if model.state is ModelState.LOADING else None,
            config="" if model.need is None else model.need.config,
        )

    # -- following ------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        never = asyncio.Event()
        while True:
            await self._clock.wait(never, SCAN_S)
            try:
                await self.scan()
            except Exception:  # isolation boundary: one failed reading must not end the fleet
                log.exception("the deployments could not be read")

    async def scan(self) -> None:
        """Read the heads of all deployments, then apply the rules of time: idle models, replicas, pinned models."""
        names = [name for model in self._models.values() for name in model.names()]
        known = set(names)
        names += [member.name for member in self._members.values() if member.name not in known]
        moves = {name: member.moves for name, member in self._members.items()}
        heads = await self._hosts.heads(names)
        now = self._clock.now()
        for model in self._models.values():
            for name in dict.fromkeys([*model.names(), *(member.name for member in model.members)]):
                member = self._members.get(name)
                if member is not None and member.moves != moves.get(name, 0):
                    continue  # it was moved meanwhile: its head may be from before
                if name in heads or member is not None:
                    self._note(model, name, heads.get(name), now)
        self._notify()
        for model in list(self._models.values()):
            self._keep(model, now)
            self._scale(model, now)

    def _note(self, model: ManagedModel, name: str, found: Any, now: float) -> None:
        """Take over what a deployment reports. found: its replica and head, None if it does not run."""
        member = model.member(name)
        if name not in self._members:  # of an earlier gateway, of another one, or of an operator
            self._members[name] = member
            member.last_used = now
        if found is None:
            if self._hosts.fault(member.host) is not None and member.state is not ModelState.ABSENT:
                self._lose(model, member)
            member.is_lost = member.is_lost and self._hosts.fault(member.host) is not None
            member.replica = member.head = None
            member.reported = 0
            member.state = ModelState.ABSENT
            return
        replica, head = found
        member.is_lost = False
        member.replica = Replica(model=model.name, deployment=name, url=replica.url, key=replica.key)
        member.head = head
        if head is None:
            return  # a silent supervisor does not keep its api from serving
        member.is_own = head.owner == self._owner
        member.level = head.sleep_level or member.level  # of a sleep that another gateway has ordered
        if head.sleep_copies:
            self._keeping.add(name)
        else:
            self._keeping.discard(name)
        was_awake, member.state = member.state in AWAKE, head.model_state
        if member.state in AWAKE and not was_awake:
            self._has_come(member, now if model.task is None else model.began)
        member.reported = max(0, head.running + head.waiting - member.running)
        if member.reported:
            member.last_used = now

    def _lose(self, model: ManagedModel, member: Member) -> None:
        """Note that the host of a deployment is lost. Another host takes its place if it was serving."""
        log.warning("%s is lost with its host", member.name)
        member.is_lost = True
        model.owed += member.state in AWAKE

    def _faults(self, model: ManagedModel) -> Iterator[str]:
        """Yield why hosts of a model cannot be used."""
        for host in model.hosts:
            if fault := self._hosts.fault(host):
                yield f"{fault.title}: {fault.detail}" if fault.detail else fault.title

    def _keep(self, model: ManagedModel, now: float) -> None:
        """Apply `keep`: load a pinned model, let one sleep that was idle for its time."""
        if model.is_pinned:
            if not model.awake and (model.failure is None or now >= model.failure.until):
                self._ensure(model)
            return
        idle_s = model.entry.keep.idle_s
        for member in model.awake if idle_s is not None else ():
            if not member.is_busy(now) and now - member.last_used >= (idle_s or 0.0):
                self._spawn(self._sleep_idle(model, member), f"sleep {member.name}")
                member.is_moving = True

    async def _sleep_idle(self, model: ManagedModel, member: Member) -> None:
        is_ended = model.ends(member) and member.is_own
        await self._put_away(Victim(model=model, member=member, is_ended=is_ended))

    def _scale(self, model: ManagedModel, now: float) -> None:
        awake = model.awake
        waiting = sum(member.head.waiting for member in awake if member.head is not None)
        running = sum(member.head.running for member in awake if member.head is not None)
        wanted = desired_replicas(model, waiting, running, now)
        if model.task is not None:
            return
        if model.owed:  # of a lost host
            model.owed -= 1
            if len(awake) < model.entry.replicas.most:
                model.task = self._spawn(self._bring_up(model, 0.0), f"restore {model.name}")
            return
        stray = next((each for each in awake if each.host not in model.hosts and each.is_own), None)
        if stray is not None:  # its host is no longer one of the model's
            self._spare(model, stray, now)
            return
        if wanted == len(awake) or not awake:
            return
        model.scaled_at = now
        if wanted > len(awake):
            model.task = self._spawn(self._bring_up(model, 0.0), f"scale {model.name}")
            return
        self._spare(model, next((each for each in reversed(awake) if not each.is_busy(now)), awake[-1]), now)

    def _spare(self, model: ManagedModel, member: Member, now: float) -> None:
        """End a replica without requests, or let one sleep that others started."""
        if not member.is_busy(now):
            member.is_moving = True
            victim = Victim(model=model, member=member, is_ended=member.is_own)
            self._spawn(self._put_away(victim), f"end {member.name}")

    # -- loading and waking ---------------------------------------------------------------------------------------

    def _ensure(self, model: ManagedModel) -> None:
        """Bring a model up, unless that is in progress, here or by another gateway."""
        is_coming = any(member.state is ModelState.LOADING for member in model.members)
        if model.task is None and not is_coming and (not model.awake or model.is_yielding):
            model.task = self._spawn(self._bring_up(model, PATIENCE_S), f"load {model.name}")

    async def _bring_up(self, model: ManagedModel, patience_s: float) -> None:
        """Load or wake one deployment of a model. patience_s: longest wait for memory."""
        is_first = not model.awake
        model.began = began = self._clock.now()
        try:
            await self._until(lambda: not any(member.is_moving for member in model.members) and not model.is_yielding)
            if is_first and model.awake:
                return
            how = await self._place(model, patience_s)
            await self.scan()
            model.scaled_at = self._clock.now()
            if model.awake and how is not None:
                model.measured(model.scaled_at - began, is_wake=how == WOKEN)
                log.info("%s was %s in %.3f s", model.name, how, model.scaled_at - began)
            model.failure = None
        except MstarError as error:
            if is_first:
                self._failed(model, error)
            log.warning("%s: %s", model.name, error)
        except Exception as error:  # isolation boundary: one model must not leave its requests waiting
            log.exception("%s could not be brought up", model.name)
            self._failed(model, MstarError("the gateway could not start it", f"{type(error).__name__}: {error}"))
        finally:
            model.task, model.waits_for = None, ""
            self._notify()

    async def _place(self, model: ManagedModel, patience_s: float) -> str | None:
        """Take memory and start or wake a deployment. Returns which of the two, None if another gateway does it."""
        asleep = next((member for member in model.members if member.state is ModelState.SLEEPING), None)
        if asleep is None:
            return await self._start(model, patience_s)
        need = await self._need(model, asleep.host)
        try:
            async with self._room(model, need, asleep.name, patience_s) as turn:
                await self._taken(lambda: self._wake(asleep), model, need, asleep.name, patience_s, turn)
                asleep.state = ModelState.READY
                self._has_come(asleep, model.began)
            return WOKEN
        except StateConflict:  # another gateway, or a request at its own port, wakes it
            await self._clock.wait(asyncio.Event(), SCAN_S)
            return None
        except MstarError as error:
            if error.code in ROOM_CODES or not asleep.is_own:
                raise
            log.warning("%s cannot wake and is started again: %s", asleep.name, error)
            with suppress(Unreachable):  # its host is lost
                await self._end(asleep)
        return await self._start(model, patience_s)

    async def _start(self, model: ManagedModel, patience_s: float) -> str | None:
        """Start a deployment on the first host that can take it, one with free memory before others."""
        running = [member for member in model.members if member.state not in (ModelState.ABSENT, ModelState.FAILED)]
        if len(running) >= model.entry.replicas.most:
            await self._clock.wait(asyncio.Event(), SCAN_S)
            return None
        if len(model.hosts) == 1:
            need = await self._need(model, model.hosts[0])
            return await self._start_on(model, model.hosts[0], need, patience_s)
        faults: dict[str, MstarError] = {}
        options = await self._options(model, faults)
        for limit_s in dict.fromkeys((0.0, patience_s)):  # a host without a wait before one with a wait
            for option in options:
                if limit_s and faults[option.host].code not in ROOM_CODES:
                    continue
                try:
                    return await self._start_on(model, option.host, option.need, limit_s)
                except MstarError as error:
                    log.warning("%s does not start on host %s: %s", model.name, option.host, error)
                    faults[option.host] = error
        raise everywhere(model.name, faults)

    async def _options(self, model: ManagedModel, faults: dict[str, MstarError]) -> list[Option]:
        """Return the hosts that can run a deployment, in the order in which they are tried. faults: of the others."""
        needs = await asyncio.gather(*(self._need(model, host) for host in model.hosts), return_exceptions=True)
        options = []
        for host, need in zip(model.hosts, needs, strict=True):
            fault = need if isinstance(need, MstarError) else self._hosts.fault(host)
            if fault is not None:
                faults[host] = fault
            elif isinstance(need, BaseException):
                raise need
            else:
                is_short = bool(shortages(need, self._hosts.holders, "", self._limit()))
                running = sum(member.host == host for member in model.awake)
                options.append(Option(host=host, need=need, is_short=is_short, running=running))
        return ordered(options)

    async def _need(self, model: ManagedModel, host: str) -> Need:
        """Return the memory of a deployment on a host, which is planned once. Raises the MstarError of its plan."""
        if host not in model.needs:
            model.needs[host] = need = await self._hosts.survey(model.entry, host)
            log.info("%s takes the file %s: %s", model.name, need.config or "of its plugin", need.why or "planned")
        return model.needs[host]

    async def _start_on(self, model: ManagedModel, host: str, need: Need, patience_s: float) -> str | None:
        """Start a deployment on a host. Returns LOADED, None if another gateway does it."""
        name = await self._free_name(model, host)
        async with self._room(model, need, name, patience_s) as turn:

            async def begin() -> Any:
                entry = self._started_entry(model, need, name)
                launch = await self._hosts.launch(entry, name, need, self._owner)
                await launch.until_placed()
                return launch

            try:
                launch = await self._taken(begin, model, need, name, patience_s, turn)
            except MstarError as error:
                if error.code == "name_in_use":  # another gateway was faster, or one before this: it is followed
                    await self._clock.wait(asyncio.Event(), SCAN_S)
                    return None
                raise
            member = self._members.setdefault(name, model.member(name))
            member.is_own = True
            member.state = ModelState.LOADING  # others that wait for these devices must know that it will serve
            member.kept_until = float("inf")
        try:
            await launch.until_ready()
        except BaseException:
            member.state = ModelState.ABSENT  # until the next scan finds what is left of it
            raise
        finally:
            self._has_come(member, model.began)
        return LOADED

    async def _wake(self, member: Member) -> None:
        began = self._clock.now()
        await self._hosts.wake(member.name)
        member.wake_s = self._clock.now() - began
        member.moves += 1

    async def _free_name(self, model: ManagedModel, host: str) -> str:
        """Return the name of the next deployment of a host, after one that has failed was ended. Raises Unavailable."""
        for name in model.names_on(host):
            if self._state_of(name) is ModelState.ABSENT:
                return name
        there = [member for member in model.members if member.host == host]
        failed = next((member for member in there if member.state is ModelState.FAILED), None)
        if failed is None or not failed.is_own:
            why = failed.head.reason if failed is not None and failed.head is not None else "others started it"
            title = f"deployment {model.name!r} does not serve, and this gateway has not started it"
            raise Unavailable(title, why, f"mstarctl ps {model.name}", code="not_serving")
        log.warning("%s has failed and is started again", failed.name)
        await self._end(failed)
        return failed.name

    def _has_come(self, member: Member, began: float) -> None:
        """Keep a deployment awake for the requests that have waited for it. began: time of its load or wake."""
        now = self._clock.now()
        member.came_s = now - began
        member.last_used = member.woken_at = now
        member.handed = 0
        member.kept_until = now + HANDED_S

    async def _taken(
        self,
        take: Callable[[], Coroutine[Any, Any, Any]],
        model: ManagedModel,
        need: Need,
        name: str,
        patience_s: float,
        turn: MemoryTurn,
    ) -> Any:
        """Do what takes memory; make room again if another process took it first."""
        for _ in range(ATTEMPTS - 1):
            try:
                return await take()
            except MstarError as error:
                if error.code not in ROOM_CODES:
                    raise
                await self._make_room(model, need, name, patience_s, turn)
        return await take()

    def _state_of(self, name: str) -> ModelState:
        member = self._members.get(name)
        return ModelState.ABSENT if member is None else member.state

    def _failed(self, model: ManagedModel, error: MstarError) -> None:
        """Keep the failure of a model with the time of the next attempt."""
        now, before = self._clock.now(), model.failure
        if error.code in ROOM_CODES:
            model.failure = Failure(error=error, until=now, count=0)
            return
        count = 1 if before is None else before.count + 1
        first, longest = BACKOFF_S
        if error.code == NEVER:  # only another entry or device helps
            first = longest
        model.failure = Failure(error=error, until=now + min(longest, first * 2 ** (count - 1)), count=count)

    async def _replace(self, model: ManagedModel) -> None:
        """Replace the deployments of a model whose entry has changed, while they serve."""
        try:
            for member in [member for member in model.awake if member.is_own]:
                await self._succeed(model, member, await self._need(model, member.host))
            for member in model.members:
                if member.state is ModelState.SLEEPING and member.is_own:
                    await self._end(member)
        except MstarError as error:
            log.warning("%s keeps its old deployment: %s", model.name, error)
            model.waits_for = f"not replaced: {error.title}"

    async def _succeed(self, model: ManagedModel, member: Member, need: Need) -> None:
        """Start the successor of a deployment, and return when it serves. Raises the MstarError of a failed start."""
        async with self._room(model, need, f"{member.name} beside itself", 0.0):
            entry = self._started_entry(model, need, member.name)
            launch = await self._hosts.launch(entry, member.name, need, self._owner, is_replacement=True)
            await launch.until_placed()
        await launch.until_ready()

    # -- memory ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _room(self, model: ManagedModel, need: Need, name: str, patience_s: float) -> AsyncIterator[MemoryTurn]:
        """Hold the devices of a deployment, with room for it, while it takes its memory."""
        turn = self._turns.enter(
            model.name, need.claims, lambda: not shortages(need, self._hosts.holders, name, self._limit())
        )
        try:
            await self._make_room(model, need, name, patience_s, turn)
            yield turn
        finally:
            self._turns.leave(turn)
            self._notify()

    async def _make_room(self, model: ManagedModel, need: Need, name: str, patience_s: float, turn: MemoryTurn) -> None:
        """Wait for a model's turn, and let others sleep until the memory is free.

        Raises Unavailable that names the holders.
        """
        began = self._clock.now()
        limit = self._limit()
        while True:
            now = self._clock.now()
            short = shortages(need, self._hosts.holders, name, limit)
            if not self._turns.may_take(turn):
                began = now
                model.waits_for = f"waits behind {', '.join(each.model for each in self._turns.ahead(turn))}"
                await self._clock.wait(self._changed, SCAN_S)
                continue
            if not turn.is_passing and self._turns.is_passed(turn):  # the ledger changes under it
                await self._clock.wait(self._changed, SCAN_S)
                continue
            if not short:
                break
            models = list(self._models.values())
            if now - began >= patience_s > 0 or not can_suffice(models, short, model, now, may_wait=patience_s > 0):
                raise refusal(model.name, short, model.expected_s())
            is_late = patience_s > 0 and now - began >= TURN_S
            victims = choose_victims(models, short, model, now, is_late=is_late)
            if victims:
                model.waits_for = f"waits for {', '.join(each.member.name for each in victims)} to make room"
                turn.givers.update(each.model.name for each in victims)
                await asyncio.gather(*map(self._yield, victims))
                continue
            if patience_s <= 0:
                raise refusal(model.name, short, model.expected_s())
            names = dict.fromkeys(holder.name or "another deployment" for each in short for holder in each.holders)
            model.waits_for = f"waits for memory that {', '.join(names)} holds"
            await self._clock.wait(self._changed, SCAN_S)
        model.waits_for = ""

    def _limit(self) -> Limit | None:
        """Return the memory of each device that this gateway may take, None without a limit."""
        most = self._serve.memory.gpu_bytes
        return None if most is None else Limit(most_bytes=most, names=frozenset(self._members))

    async def _yield(self, victim: Victim) -> None:
        """Let a deployment sleep after its requests have finished. Its model takes no new ones meanwhile."""
        model, member = victim.model, victim.member
        if not member.is_busy(self._clock.now()):
            await self._put_away(victim)
            return
        model.is_yielding = True
        try:
            await self._until(lambda: not member.is_busy(self._clock.now()) or not member.is_awake)
            if member.is_awake:
                await self._put_away(victim)
        finally:
            model.is_yielding = False
            self._notify()

    async def _put_away(self, victim: Victim) -> None:
        """Let a deployment sleep, or end it. One that is busy by requests of others stays."""
        member = victim.member
        member.is_moving = True
        self._notify()
        try:
            if victim.is_ended:
                await self._end(member)
                return
            try:
                level = member.level = self._level(victim)
                began = self._clock.now()
                await self._hosts.sleep(member.name, level)
                member.slept_s = self._clock.now() - began
                member.state, member.rest = ModelState.SLEEPING, self._rest(victim)
            except StateConflict:
                member.reported, member.last_used = max(1, member.reported), self._clock.now()
            except MstarError as error:
                if not member.is_own:
                    raise
                log.warning("%s cannot sleep and ends: %s", member.name, error)
                await self._end(member)
        except MstarError as error:
            log.warning("%s makes no room: %s", member.name, error)
            member.reported = max(1, member.reported)
        finally:
            member.is_moving = False
            member.moves += 1
            self._notify()

    def _rest(self, victim: Victim) -> dict[str, int]:
        """Return the bytes by key that a deployment holds in its sleep."""
        need = victim.model.needs.get(victim.member.host)
        name = victim.member.name
        keys = () if need is None else need.claims
        return {key: sum(h.held_bytes or 0 for h in self._hosts.holders(key) if h.name == name) for key in keys}

    def _level(self, victim: Victim) -> int:
        """Return 1 if the weights fit the host memory for sleeping models, 2 otherwise: they are read again then."""
        host, needs = victim.member.host, victim.model.needs
        own = needs[host].claims_bytes if host in needs else 0
        most = self._serve.memory.host_bytes
        if most is None:  # those that fall asleep meanwhile have not taken theirs yet
            moving = [model.needs.get(host) for model in self._models.values() for m in model.members if m.is_moving]
            room = self._hosts.host_memory(host) // 2 + own - sum(need.claims_bytes for need in moving if need)
        else:
            room = most - self._copied_bytes(victim.member.name)
        return 1 if own <= room else 2

    def _copied_bytes(self, but: str) -> int:
        """Return the memory of its host that weights of other deployments take, or may take. but: a deployment."""
        host = host_of(but)
        return sum(
            _copy_bytes(model, member)
            for model in self._models.values()
            for member in model.members
            if member.host == host and member.name != but and (member.is_copied or member.name in self._keeping)
        )

    def _started_entry(self, model: ManagedModel, need: Need, name: str) -> ModelEntry:
        """Return the entry to start. It keeps copies on the host after wakes if there is room for those of all."""
        entry, most = model.entry, self._serve.memory.host_bytes
        keeps = entry.set.get("sleep_copies")
        if keeps is None and most is not None and entry.sleepable:
            keeps = need.claims_bytes <= most - self._copied_bytes(name)
            if keeps:
                entry = msgspec.structs.replace(entry, set={**entry.set, "sleep_copies": True})
        self._keeping.discard(name)
        if keeps:
            self._keeping.add(name)
        return entry

    async def _let_go(self, member: Member) -> None:
        """End a deployment of a removed model."""
        try:
            await self._end(member)
        except MstarError as error:
            log.warning("%s is not ended: %s", member.name, error)

    async def _end(self, member: Member) -> None:
        await self._hosts.end(member.name)
        self._keeping.discard(member.name)
        member.state, member.replica, member.head = ModelState.ABSENT, None, None
        member.is_own = False

    # -- waiting --------------------------------------------------------------------------------------------------

    def _notify(self) -> None:
        """Wake everything that waits for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._clock.wait(self._changed, SCAN_S)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _copy_bytes(model: ManagedModel, member: Member) -> int:
    """Return the host memory that the weights of a deployment take: as planned, else as the deployment reports."""
    need, head = model.needs.get(member.host), member.head
    return need.claims_bytes if need is not None else 0 if head is None else head.weights_bytes


def _managed(serve: ServeFile) -> list[ModelEntry]:
    """Return the entries that are started here, each with its own value of `sleepable` and `hosts`."""
    ours = [entry for entry in serve.models.values() if entry.url is None]
    return [
        msgspec.structs.replace(
            entry,
            hosts=hosts_of(entry, serve),
            sleepable=None if "sleepable" in entry.set else with_default(entry, serve),
        )
        for entry in ours
    ]
