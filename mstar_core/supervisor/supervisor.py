"""Supervisor of a deployment: starts, introduces, watches, restarts, drains and stops its child processes.

It runs on one asyncio loop and receives messages of children in its mailbox.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import ExitCode, MstarError, StartError, StateConflict, Unavailable
from mstar_core.host.api_keys import with_keys
from mstar_core.host.readings.gpus import GpuReader, library
from mstar_core.host.run_dir import RunDirectory
from mstar_core.host.tls.certificates import load_certificate
from mstar_core.messages.adapters import AdapterDone
from mstar_core.messages.life import (
    Beat,
    Cordoned,
    Drained,
    Hello,
    LinkBroken,
    LogLevel,
    Phase,
    Ping,
    Reload,
    ServiceState,
    Stop,
    Telemetry,
)
from mstar_core.messages.names import API, CONDUCTOR, SUPERVISOR, process_rank, rank_of, weights_name
from mstar_core.messages.requests import CancelRequest
from mstar_core.messages.sleep import SleepDone, SleepProgress, WakeWanted
from mstar_core.messages.telemetry import MetricSample
from mstar_core.messages.wire import Envelope, Message
from mstar_core.observe.frames import LOCAL, HostStatus, RankStatus
from mstar_core.observe.hub import TelemetryHub
from mstar_core.process.logs import hide_secrets
from mstar_core.process.peers import Peers
from mstar_core.process.silences import SILENT_S
from mstar_core.supervisor.child import (
    DEFAULT_PACE,
    Child,
    ChildKind,
    Kinds,
    Pace,
    child_kinds,
    group_members,
    host_fact,
    plan_facts,
    write_spec,
)
from mstar_core.supervisor.deaths import (
    cause_sentence,
    death_record,
    exit_code_of,
    failure_summary,
    in_order,
    outcome,
    public_sentence,
    start_record,
)
from mstar_core.supervisor.events import Events, EventThrottle
from mstar_core.supervisor.health import Watchdog, can_serve
from mstar_core.supervisor.hosts.hosts import OtherHosts, RemoteLink
from mstar_core.supervisor.hosts.remote_process import HOST_LOST
from mstar_core.supervisor.hosts.weights import PreparedWeights
from mstar_core.supervisor.listener import PortListener
from mstar_core.supervisor.log_file import LogFile
from mstar_core.supervisor.operations.adapters import Adapters
from mstar_core.supervisor.operations.changes import Changes
from mstar_core.supervisor.operations.operations import Operations
from mstar_core.supervisor.operations.sleep import ASLEEP, Sleeping
from mstar_core.supervisor.outbound import REACHABLE, Outbound
from mstar_core.supervisor.spawner import LocalSpawner, Spawner
from mstar_core.supervisor.standby import Standby
from mstar_core.supervisor.telemetry.state_publisher import StatePublisher
from mstar_core.ticks import next_tick, sleep_to_tick
from mstar_core.transport import Courier, LinkBreak, Malformed
from mstar_core.transport.fd_store import FdStore

log = logging.getLogger(__name__)

SHARE_PINGS = 2
"""Pings between metric samples for the api."""

FAILURES = 16
"""Failures that are shown after they are over, so that a reader that looks once in a while misses none."""

ACCEPTS_LATER = "it accepts requests when it is ready again"


class TakesOver(Protocol):
    """The takeover of another deployment, as the supervisor of the new one sees it."""

    async def before_start(self, deployment: Supervisor) -> None:
        """Wait until processes may start."""

    async def when_ready(self, deployment: Supervisor) -> None:
        """Wait until the deployment is ready, and let the other one end."""


class Supervisor:
    """The life of a deployment. Owned by `main.py`; read by the admin socket.

    state: starting, ready, degraded, sleeping, draining, stopping, failed or unhealthy. reason: why, for operators;
    public_reason: the same for clients. cause: record of the failure that the deployment suffers from now, None once it
    is ready again or stopped on purpose. failures: facts of the newest ones with their times, oldest first. logs: of
    the supervisor and of every process that was started. connections: of clients, kept for the next api. values: flat
    readings of all processes.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        run: RunDirectory,
        courier: Courier,
        endpoint: str,
        kinds: Kinds = child_kinds,
        pace: Pace = DEFAULT_PACE,
        listener: PortListener | None = None,
        standby: ChildKind | None = None,
        remote: RemoteLink | None = None,
    ) -> None:
        """endpoint: of its mailbox. remote: means to reach other hosts, None for a deployment on one."""
        self.spec = spec
        self.listener = listener or PortListener(spec.api.host, spec.api.port)
        self.run_dir = run
        self.connections = FdStore()
        self.state = "starting"
        self.reason = ""
        self.public_reason = ""
        self.started = time.monotonic()
        self.started_at = time.time()
        self.ready_s: float | None = None
        self.deaths: list[dict[str, Any]] = []
        self.cause: dict[str, Any] | None = None
        self.failures: list[dict[str, Any]] = []
        self.values: dict[str, float] = {}
        self.children: dict[str, Child] = {}
        self.logs: dict[str, LogFile] = {}
        self.hub = TelemetryHub(secrets.token_hex(6), spec.name)
        self.gpus = GpuReader(library() if any(r.device != "cpu" for r in spec.plan.ranks) else None)
        self.publisher = StatePublisher(self, self.hub, self.gpus)
        self.events = Events(Path(spec.log_dir) / "events.ndjson", self.publisher.event)
        self.standby = Standby(standby, run, self.events, pace, self.logs)
        self.hosts = OtherHosts(self, courier, pace, remote, self._task)
        self._throttle = EventThrottle(self.publisher.requests.name_of)
        self.exit_code = ExitCode.DONE
        self.restarts = 0
        self.fetch_s = 0.0
        self._kinds = kinds
        self._pace = pace
        self._stop_asked = False
        self._outbound = Outbound(courier, self.children)
        self.changes = Changes()
        self.operations = Operations(
            self,
            tell=lambda cordon: self._outbound.send(CONDUCTOR, cordon),
            start=self._task,
            show=partial(self._set_state, "degraded"),
            ended=self._operation_ended,
        )
        self.adapters = Adapters(self, self.operations, self._outbound.send)
        self.sleep = Sleeping(self, self.operations, self._outbound.send)
        self._shared_samples: list[MetricSample] = []
        self._weights: PreparedWeights | None = None
        self._spawner = LocalSpawner(lambda: self.spec, run, endpoint, self.standby)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._drain = self._pause = self._handover = 0  # number of the one in progress
        self._levels = 0  # number of all drains, pauses and handovers so far
        self._ended_level = 0
        self._drained = asyncio.Event()
        self._is_restarting = False
        self._peers = Peers()
        self._spawns: dict[str, asyncio.Task[None]] = {}  # latest scheduled spawn, by first name of its group
        self._spawning = asyncio.Lock()
        self._pings = 0
        self._began = self.started  # start time of the current start or restart
        self._watchdog = Watchdog(
            children=self.children,
            events=self.events,
            pace=pace,
            stall_s=spec.stall_s,
            hang_s=spec.hang_s,
            step_limit_s=spec.step_limit_s,
            is_cpu_rank=lambda rank: any(each.rank == rank and each.device == "cpu" for each in self.spec.plan.ranks),
            is_starting=lambda: self.state == "starting",
            fail=self._fail,
            group_of=self._group,
        )

    # -- life -------------------------------------------------------------------------------------------------

    async def run(self, takeover: TakesOver | None = None) -> ExitCode:
        """Start all processes, serve until stopped or failed, and end them. Returns the exit code.

        takeover: of another deployment that this one replaces.
        """
        self.events.add("deployment.starting", ranks=len(self.spec.plan.ranks), model=self.spec.model)
        self.events.add("phase", child="supervisor", phase="plan", **plan_facts(self.spec))
        self._task(self._ping_forever())
        self._task(self._watchdog.watch())
        self._task(self._publish_forever())
        self._task(self.hosts.watch())
        self._task(self.standby.keep(lambda: self.spec, lambda: self.state == "ready"))
        self.gpus.start()
        if takeover is not None:
            await self._before_start(takeover.before_start(self))
            self._task(takeover.when_ready(self))
        if not self._ended.is_set():
            await self._start_hosts()
        fetch, *kinds = self._kinds(self.spec)
        if not self._ended.is_set():
            await self._fetch_weights(fetch)
        if not self._ended.is_set():
            for kind in kinds:
                child = self._adopt(kind)
                await self._spawn(child)
        await self._ended.wait()
        self.hosts.end_soon()
        self.standby.end()
        await self._end_children()
        await self.hosts.stop(self.reason)
        self.events.add("deployment.stopped", reason=self.reason)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.connections.close()
        self.gpus.stop()
        await self.standby.close()
        for child in self.children.values():
            child.log.close()
        return self.exit_code

    async def _before_start(self, work: Coroutine[Any, Any, None]) -> None:
        """Do what precedes the start of processes, unless the deployment is stopped."""
        doing, ended = self._task(work), asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((doing, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        self._began = time.monotonic()

    async def _start_hosts(self) -> None:
        """Start the agents of other hosts, unless the deployment is stopped meanwhile. A failure ends the start."""
        starting, ended = asyncio.ensure_future(self.hosts.start()), asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((starting, ended), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
        except MstarError as error:
            self._fail(start_record("hosts", error))
        finally:
            ended.cancel()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    def leave(self, reason: str, cut: str = "") -> None:
        """End now that requests go to another deployment. cut: why those in flight do not finish, if any are left."""
        if cut:
            self.events.add("deployment.cut", requests=self._in_flight(), why=cut)
        self._end(ExitCode.DONE, reason)

    def stop(self, *, now: bool = False, reason: str = "asked to stop", grace_s: float | None = None) -> None:
        """Drain, then end; with `now`, or at the second call, end at once. grace_s: limit of the drain."""
        if self._stop_asked or now or self.state in ("failed", "starting", "unhealthy", ASLEEP):
            if (left := self._in_flight()) and not self._ended.is_set():
                self.events.add("deployment.cut", requests=left, why=reason)
            self._end(ExitCode.DONE if self.state != "failed" else self.exit_code, reason)
            return
        self._stop_asked = True
        self.drain(reason)
        self._task(self._stop_when_drained(reason, self.spec.drain_timeout_s if grace_s is None else grace_s))

    def drain(self, reason: str = "asked to drain") -> None:
        """Refuse new requests; requests in flight continue. Raises StateConflict if the deployment sleeps."""
        if self.state == ASLEEP:
            self.sleep.check_awake()
        if self.state in ("ready", "degraded"):
            self._drained.clear()
            self._drain = self._next_level()
            self._set_state("draining", reason)
            api = self.children.get(API)
            if api is None or not api.is_running:
                self._drained.set()

    def resume(self) -> None:
        """Accept requests again after a drain. Raises StateConflict if the drain precedes a restart or the end."""
        if self._stop_asked or self._ended.is_set():
            raise StateConflict(
                "the deployment is about to end", hint="start it again with mstarctl up", code="stopping"
            )
        if self._is_restarting:
            raise StateConflict("the deployment is restarting", hint=ACCEPTS_LATER, code="restarting")
        if self.state == "draining":
            self._drain = 0
            is_whole = all(child.is_ready for child in self.children.values())
            if is_whole:
                self._set_state("ready")
            else:
                self._set_degraded(self.cause)

    def cancel(self, handle: int) -> None:
        """Cancel one request. The api reports its end."""
        self._outbound.send(API, CancelRequest(handle=handle, why="by_operator"))

    def log_level(self, level: str, names: Iterable[str] = ()) -> list[str]:
        """Set the log level of these children (none named: all). Returns the children that were reached."""
        chosen = set(names)
        reached = [n for n, c in self.children.items() if c.state in REACHABLE and (n in chosen or not chosen)]
        for name in reached:
            self._outbound.send(name, LogLevel(level=level))
        self.events.add("log.level", level=level, children=reached)
        return reached

    def reload(self) -> dict[str, Any]:
        """Read the files of keys and the certificate again. Raises ConfigError or StartError; then nothing changes."""
        api = with_keys(self.spec.api)
        load_certificate(api.tls_cert, api.tls_key)
        hide_secrets(api.secrets)
        self.respecify(msgspec.structs.replace(self.spec, api=api))
        read = {"api_keys": len(api.api_keys), "metrics_keys": len(api.metrics_keys)}
        self.events.add("config.reloaded", **read)
        return {**read, "certificate": api.tls_cert}

    def respecify(self, spec: DeploymentSpec) -> None:
        """Replace the spec, for processes that start later and for those that read changes of it."""
        self.spec = spec
        write_spec(self.run_dir, spec)
        self.hosts.respecify()
        for name in (CONDUCTOR, API):
            if (child := self.children.get(name)) is not None and child.state in REACHABLE:
                self._outbound.send(name, Reload())

    @property
    def cordoned(self) -> frozenset[int]:
        """Ranks whose replicas get no new requests."""
        return self.operations.cordons.ranks

    @property
    def is_restarting(self) -> bool:
        """Whether a restart of all processes is in progress."""
        return self._is_restarting

    @property
    def is_drained(self) -> bool:
        """Whether the api has reported since the last drain that no request is left."""
        return self._drained.is_set()

    def ask_restart(self) -> None:
        """Drain, then restart every process.

        Raises StateConflict during a restart, Unavailable if the deployment is starting, draining or ending.
        """
        if self._is_restarting:
            raise StateConflict("the deployment is already restarting", hint=ACCEPTS_LATER, code="restarting")
        self.operations.check_idle()
        self.check_awake()
        if self.state not in ("ready", "degraded", "unhealthy"):
            raise Unavailable(f"the deployment is {self.state}", hint="wait, or mstarctl down", code="not_ready")
        self._is_restarting = True
        self._task(self._restart_all())

    async def _restart_all(self) -> None:
        if self.state != "unhealthy":
            self.drain("restarting")
            await self._wait_drained(self.spec.drain_timeout_s)
        if self._ended.is_set() or self._stop_asked:
            return
        self.restarts += 1
        self._drain, self.cause = 0, None
        self._set_state("degraded", "restarting")
        self._began, self.ready_s, self.fetch_s = time.monotonic(), None, 0.0
        for group in self.units():
            self.renew(group)

    def renew(self, group: list[Child], delay_s: float = 0.0) -> None:
        """Stop the processes of a group, and start them again once they have ended and a delay has passed."""
        self.standby.end()  # a restart on purpose imports everything again
        for child in group:
            child.restarts.clear()
            if child.attending is None or child.attending.done():
                continue
            child.renewing = True
            if child.is_running:
                self._outbound.send(child.name, Stop(reason="restarting"))
                child.signal(signal.SIGTERM)
        self._schedule_spawn(group, delay_s)

    def ranks(self) -> dict[str, RankStatus]:
        """Return the ranks as they are shown, by number."""
        return {key: rank for key, rank in self.hub.store.ranks.items() if isinstance(rank, RankStatus)}

    def host_free(self, host: str) -> int | None:
        """Return the free memory of a host in bytes, None if unknown. host: empty for the supervisor's."""
        status = self.hub.store.hosts.get(host or LOCAL)
        if not isinstance(status, HostStatus) or not status.memory_total:
            return None
        return status.memory_total - status.memory_used

    async def open_hosts(self) -> None:
        """Reserve room on hosts that only the plan names, and start their agents. Raises StartError."""
        await self.hosts.open()

    async def close_hosts(self) -> None:
        """Give back the room on hosts that the plan does not name any more."""
        await self.hosts.close()

    async def enlist(self) -> None:
        """Start the processes of the plan that have not been started."""
        _, *kinds = self._kinds(self.spec)
        for kind in kinds:
            if kind.name not in self.children:
                await self._spawn(self._adopt(kind))

    async def retire(self, names: Sequence[str]) -> None:
        """End processes for good."""
        group = [self.children[name] for name in names if name in self.children]
        for child in group:
            child.ending = True
            if (spawn := self._spawns.pop(child.name, None)) is not None:
                spawn.cancel()
            if child.is_running:
                self._outbound.send(child.name, Stop(reason="its replica was removed"))
                child.signal(signal.SIGTERM)
        await self._wait_ends(group)
        for child in group:
            self._part(child, "its replica was removed", "its replica was removed", is_excused=True)
            child.log.close()
            del self.children[child.name]

    # -- sleep ------------------------------------------------------------------------------------------------

    def check_awake(self) -> None:
        """Raise StateConflict if the deployment, or a node of it, sleeps."""
        self.sleep.check_awake()

    def running_requests(self) -> Sequence[str]:
        """Return the client ids of requests that have not ended."""
        return [record.api.id or str(record.handle) for record in self.publisher.requests.all() if not record.has_ended]

    def fall_asleep(self, reason: str) -> None:
        """Enter the state `sleeping`."""
        self._set_state(ASLEEP, reason, public="it gives its memory to others")

    def wake_up(self) -> None:
        """Leave the state `sleeping`: ready, or degraded until all processes are ready."""
        if all(child.is_ready for child in self.children.values()):
            self._set_state("ready")
        else:
            self._set_degraded(self.cause)

    def respawn(self, names: Collection[str]) -> None:
        """Start processes that have died while the deployment slept."""
        for group in self.units():
            if any(child.name in names for child in group):
                self._schedule_spawn(group, 0.0)

    # -- levels of the api ------------------------------------------------------------------------------------

    def pause(self) -> Callable[[], bool]:
        """Make new requests wait in the api. Returns a function that tells whether none runs any more."""
        self._pause = self._next_level()
        self._send_state()
        return partial(self._has_ended, self._pause)

    def unpause(self) -> None:
        """Let waiting requests go on."""
        self._pause = 0
        self._send_state()

    def hand_over(self) -> Callable[[], bool]:
        """Make the api accept no more connections. Returns a function that tells whether all requests have ended."""
        self._handover = self._next_level()
        self._send_state()
        return partial(self._has_ended, self._handover)

    def take_back(self) -> None:
        """Let the api accept connections again, if it still runs."""
        if self._handover:
            self._handover = 0
            self._send_state()

    def _next_level(self) -> int:
        self._levels += 1
        return self._levels

    def _has_ended(self, level: int) -> bool:
        """Whether the api has reported the end of a pause or handover, or has ended itself with its requests."""
        api = self.children.get(API)
        return self._ended_level >= level or api is None or not api.is_running

    async def _wait_drained(self, limit_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), limit_s)
        if not self._drained.is_set():
            self.events.add("deployment.cut", requests=self._in_flight(), why=f"drain took longer than {limit_s:g} s")

    async def _stop_when_drained(self, reason: str, limit_s: float) -> None:
        await self._wait_drained(limit_s)
        self._end(ExitCode.DONE, reason)

    def _end(self, code: ExitCode, reason: str) -> None:
        if not self._ended.is_set():
            self.exit_code = code
            if self.state != "failed":
                self.cause = None
                self._set_state("stopping", reason)
            self._ended.set()

    def record(self) -> dict[str, Any]:
        """Return the outcome, which the supervisor writes to the log folder at its end."""
        deaths = self.deaths if self.exit_code is not ExitCode.DONE else []
        return outcome(deaths, self.exit_code, self.reason)

    # -- children ---------------------------------------------------------------------------------------------

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds of each start-up phase, of the process that took longest in it; `fetch` is that of the weights."""
        longest = {"fetch": self.fetch_s} if self.fetch_s else {}
        for child in self.children.values():
            for name, seconds in child.phases_s.items():
                longest[name] = max(longest.get(name, 0.0), seconds)
        return {name: round(seconds, 3) for name, seconds in longest.items()}

    def _in_flight(self) -> int:
        """Return the requests in flight that the conductor reported last."""
        return int(self.values.get("conductor.in_flight", 0))

    def _adopt(self, kind: ChildKind) -> Child:
        child = Child(kind, LogFile(Path(self.spec.log_dir) / f"{kind.name}.log", self.spec.logs))
        self.children[kind.name] = child
        self.logs[kind.name] = child.log
        return child

    async def _fetch_weights(self, kind: ChildKind) -> None:
        """Prepare the checkpoint on all hosts, and write its folder on this one into the spec."""
        began, names = time.monotonic(), ("", *self.hosts.links)
        fetches = await asyncio.gather(*(self._fetch_on(host, kind) for host in names))
        ready = {host: fetched for host, fetched in zip(names, fetches, strict=True) if fetched is not None}
        if len(ready) < len(names) or self._ended.is_set():
            return
        self._weights = ready[""]
        try:
            for host in self.hosts.links:
                self._weights.check_same(ready[host], self.hosts.links[host].title)
        except MstarError as error:
            self._fail(start_record(kind.name, error))
            return
        self.respecify(msgspec.structs.replace(self.spec, folder=self._weights.folder))
        for host in self.hosts.links:
            self.hosts.make_ready(host)
        self.fetch_s = time.monotonic() - began

    async def prepare_host(self, host: str) -> None:
        """Prepare the checkpoint on a host that replaces a lost one. Raises StartError."""
        fetched = await self._fetch_on(host, self._kinds(self.spec)[0], must=False)
        if fetched is None:
            raise StartError(f"the weights on host {host} could not be prepared", f"see {weights_name(host)}.log")
        if self._weights is not None:
            self._weights.check_same(fetched, self.hosts.links[host].title)

    async def _fetch_on(self, host: str, kind: ChildKind, *, must: bool = True) -> PreparedWeights | None:
        """Run the child that finds, makes or downloads the checkpoint on a host. must: its failure ends the start."""
        child = self._adopt(replace(kind, name=weights_name(host), host=host) if host else kind)
        try:
            await child.spawn(self._spawner_of(child))
        except MstarError as error:
            if must:
                self._fail(start_record(child.name, error))
            child.log.close()
            del self.children[child.name]
            return None
        self.events.add(
            "child.spawned", child=child.name, pid=child.pid, incarnation=child.incarnation, **host_fact(child)
        )
        watching = asyncio.ensure_future(child.watch())
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((watching, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not watching.done():
            child.signal(signal.SIGKILL)
        status = await watching
        child.state = "ended"
        if child.ending:  # it stalled: SIGUSR1 for its stacks ends a child that has no handler yet
            await self._ended.wait()
        if must and self._ended.is_set():
            return None
        if must and status != 0:
            self._fail(death_record(child, self.run_dir, status, self.publisher.circumstances(child.name)))
            return None
        child.log.close()
        del self.children[child.name]
        return None if status != 0 else PreparedWeights.of(child, self.run_dir)

    def _spawner_of(self, child: Child) -> Spawner:
        return self.hosts.links[child.host] if child.host else self._spawner

    async def _spawn(self, child: Child, *, takes_standby: bool = False) -> None:
        try:
            with self._inherited(child) as descriptors:
                meeting = await self.hosts.meeting(child)
                await child.spawn(self._spawner_of(child), descriptors, meeting, takes_standby=takes_standby)
        except (MstarError, OSError) as error:
            self._not_spawned(child, start_record(child.name, error))
            return
        self._peers.appeared(child.name, child.incarnation)
        facts: dict[str, Any] = {**host_fact(child)}
        if child.process is not None and child.process.was_standby:
            facts["standby"] = True
        self.events.add("child.spawned", child=child.name, pid=child.pid, incarnation=child.incarnation, **facts)
        child.attending = self._task(self._attend(child))
        if self._ended.is_set():  # the end began while the process was being created
            child.ending = True
            child.signal(signal.SIGKILL)

    def _not_spawned(self, child: Child, record: dict[str, Any]) -> None:
        """Handle a process that could not be created. On another host it is tried again, as after its death."""
        if not child.host or self.state == "starting":
            self._fail(record)
            return
        child.state = "ended"
        self._note_failure(record)
        self.events.add("child.died", child=child.name, cause=record["message"], phase="spawn")
        group = self._group(child) or [child]
        for member in group:
            if member is not child and member.is_running:
                member.ends_with_group = True
                member.signal(signal.SIGKILL)
        self._back_off(group, record, self._delay_s(group[0], time.monotonic(), was_ready=False))

    @contextmanager
    def _inherited(self, child: Child) -> Iterator[Mapping[str, int]]:
        """Provide the descriptors that a child inherits, by option. Raises StartError."""
        if child.name != API:
            yield {}
            return
        listener, store = self.listener.open(), self.connections.offer()
        try:
            yield {"listener": listener, "store": store}
        finally:
            os.close(store)

    async def _attend(self, child: Child) -> None:
        """Wait for the end of a process, and record it. Its next incarnation is a scheduled spawn."""
        status = await child.watch()
        was = child.state
        child.state = "ended"
        if self._ended.is_set() or child.ending:
            return
        if child.renewing:
            self._part(child, "it is being restarted", "the deployment is restarting", is_excused=True)
            return
        if child.ends_with_group:
            return
        record = death_record(child, self.run_dir, status, self.publisher.circumstances(child.name))
        group = self._group(child) or [child]
        record = await self._end_group(child, group, record)
        self._note_failure(record)
        self.events.add(
            "child.died",
            child=record["name"],
            status=record["status"],
            cause=record["message"],
            phase=child.phase,
            **host_fact(child),
        )
        is_excused = record.get("code") == HOST_LOST
        for member in group:
            self._part(member, cause_sentence(record), public_sentence(record), is_excused=is_excused)
        if self.state == "starting" and was != "ready":
            # Others may die of the same cause a moment earlier or later: the oldest record is the root cause.
            await asyncio.sleep(self._pace.cause_s)
            self._fail(record)
        elif not child.renewing:  # a restart that began meanwhile has scheduled its spawn
            self._is_restarting = False
            self._back_off(group, record, self._delay_s(group[0], child.started, was_ready=was == "ready"))

    def _note_failure(self, record: dict[str, Any]) -> None:
        self.deaths.append(record)
        self.cause = record
        self._keep_failure(record)

    def _keep_failure(self, record: dict[str, Any]) -> None:
        """Make a failure the last one of those that are kept."""
        summary = failure_summary(record)
        self.failures = [*(each for each in self.failures if each != summary), summary][-FAILURES:]

    def units(self) -> list[list[Child]]:
        """Return all children: tensor-parallel groups, the leader first, and the others alone."""
        groups = {(group := self._group(child) or [child])[0].name: group for child in self.children.values()}
        return list(groups.values())

    def _group(self, child: Child) -> list[Child]:
        """Return the tensor-parallel group of a child, the leader first; empty without one."""
        return [self.children[name] for name in group_members(self.spec.plan, child.name) if name in self.children]

    async def _end_group(self, child: Child, group: list[Child], record: dict[str, Any]) -> dict[str, Any]:
        """Kill the other members of a tensor-parallel group, and return the record of the one that died first.

        A member that reports the loss of another one has not caused the end: that one's record may come a moment later.
        """
        others = [member for member in group if member is not child]
        for member in others:
            member.ends_with_group = True
        if others and record.get("code") == "worker_lost":
            exits = [asyncio.ensure_future(member.wait_exit()) for member in others]
            _, late = await asyncio.wait(exits, timeout=self._pace.cause_s, return_when=asyncio.FIRST_COMPLETED)
            for waiting in late:
                waiting.cancel()
        for member in others:
            if member.process is not None and member.process.returncode is not None:
                known = self.publisher.circumstances(member.name)
                death = death_record(member, self.run_dir, member.process.returncode, known)
                if record.get("code") == "worker_lost" != death.get("code"):
                    record = death
            member.signal(signal.SIGKILL)
        return record

    def _part(self, child: Child, cause: str, public: str, *, is_excused: bool = False) -> None:
        self._peers.ended(child.name, child.incarnation)
        self._outbound.part(child, cause, public, is_excused=is_excused)
        self.publisher.part(child.name)
        self.changes.notify()
        # Readings of a dead process would show requests and pages that no longer exist.
        self.values = {name: value for name, value in self.values.items() if not name.startswith(f"{child.name}.")}
        if child.name == API:
            self._handover = 0
            self._drained.set()  # its requests have ended with it; a restarted api begins with none

    def _delay_s(self, first: Child, started: float, *, was_ready: bool) -> float:
        """Return the delay before a restart. first: of the group, whose recent restarts count.

        A child that has served, and the api, restarts at once the first time; one that has served for long always does.
        """
        now, pace = time.monotonic(), self._pace
        first.restarts = [t for t in first.restarts if now - t < pace.window_s]
        if was_ready and now - started >= pace.lived_s:
            return 0.0
        delays = (0.0, *pace.backoff_s) if was_ready or first.name == API else pace.backoff_s
        return delays[min(len(first.restarts), len(delays) - 1)]

    def _back_off(self, group: list[Child], record: dict[str, Any], delay_s: float) -> None:
        """Schedule the next start of a dead child, or of its group, whose first member counts."""
        pace, child = self._pace, group[0]
        if self.sleep.died([member.name for member in group]):
            self.restarts += 1
            return
        if record.get("code") == HOST_LOST:  # no fault of the child: it waits for its host, and does not count
            self.restarts += 1
            self._set_degraded(record)
            self._schedule_spawn(group, 0.0)
            return
        if len(child.restarts) >= pace.restarts_max:
            if child.name == API:
                self.listener.close()  # connections are refused rather than left without an answer
                self.connections.close()
            deaths = f"died {pace.restarts_max + 1} times in {pace.window_s / 60:g} minutes"
            self._set_state("unhealthy", f"{child.name} {deaths}", public="its processes die repeatedly")
            return
        child.restarts.append(time.monotonic())
        self.restarts += 1
        if self.state in ("ready", "degraded", "starting"):
            self._set_degraded(record)
        self._schedule_spawn(group, delay_s)

    def _set_degraded(self, cause: dict[str, Any] | None) -> None:
        if cause is None:
            self._set_state("degraded", "processes are starting")
        else:
            self._set_state("degraded", cause_sentence(cause), public=public_sentence(cause))

    def _schedule_spawn(self, group: list[Child], delay_s: float) -> None:
        """Start a child or a group after a delay, once all its processes have ended. Replaces its earlier schedule."""
        self._spawns[group[0].name] = self._task(self._spawn_later(group, delay_s))

    async def _spawn_later(self, group: list[Child], delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        await self._wait_ends(group)
        await self.hosts.available({child.host for child in group})
        async with self._spawning:
            epoch = max(child.incarnation for child in group)
            for child in group:
                is_replaced = self._spawns[group[0].name] is not asyncio.current_task()
                if self._ended.is_set() or is_replaced or child.is_running:
                    return
                if not child.renewing:
                    self.events.add("child.restarting", child=child.name, after_s=delay_s)
                takes = child.kind.has_standby and not child.renewing
                child.renewing = child.ends_with_group = False
                child.incarnation = epoch  # of all members, also after one that could not be started
                await self._spawn(child, takes_standby=takes)

    async def _wait_ends(self, group: list[Child]) -> None:
        """Wait until all processes of a group have ended and were noted. One that does not end is killed."""
        ending = [child.attending for child in group if child.attending is not None and not child.attending.done()]
        if not ending:
            return
        _, late = await asyncio.wait(ending, timeout=self._pace.stop_s)
        if late:
            for child in group:
                child.signal(signal.SIGKILL)
            await asyncio.wait(late)

    def _fail(self, record: dict[str, Any]) -> None:
        if self.state == "failed":
            return
        if record not in self.deaths:
            self.deaths.append(record)
        first = in_order(self.deaths)[0]
        self.cause = first
        self._keep_failure(first)
        self._set_state("failed", cause_sentence(first), public=public_sentence(first))
        self._end(exit_code_of(first), cause_sentence(first))

    async def _end_children(self) -> None:
        self.listener.close()
        for spawn in self._spawns.values():  # a process that is being created would not be among those that end here
            spawn.cancel()
        await asyncio.gather(*self._spawns.values(), return_exceptions=True)
        running = [child for child in self.children.values() if child.is_running]
        for child in running:
            child.ending = True
            self._outbound.send(child.name, Stop(reason=self.reason))
            child.signal(signal.SIGTERM)
        waits = [asyncio.create_task(child.wait_exit()) for child in running]
        if waits:
            _, late = await asyncio.wait(waits, timeout=self._pace.stop_s)
            for child in running:
                if child.is_running:
                    self.events.add("child.killed", child=child.name, why=f"did not end within {self._pace.stop_s:g} s")
                # The group may contain grandchildren (the preprocessing pool) even when the child itself has ended.
                child.signal(signal.SIGKILL)
            if late:
                await asyncio.wait(late, timeout=self._pace.stop_s)

    # -- messages of children ---------------------------------------------------------------------------------

    def on_batch(self, batch: Iterable[Envelope | Malformed]) -> None:
        """Handle messages of the mailbox. A bad message does not affect the others."""
        for item in batch:
            if isinstance(item, Malformed):
                log.warning("a message could not be read: %s", item.error)
                continue
            child = self.children.get(item.sender)
            if child is None and self.hosts.on(item):
                continue
            if child is None or item.incarnation != child.incarnation or not self._peers.accepts(item):
                continue
            try:
                self._on(child, item.body)
            except Exception:
                log.exception("message %s of %s failed", type(item.body).__name__, item.sender)

    def on_break(self, lost: LinkBreak) -> None:
        """Handle the loss of messages of another host that this process has noticed in its mailbox."""
        if not self.hosts.on_break(lost):
            self._link_broken(lost, None)

    def _link_broken(self, lost: LinkBreak, receiver: Child | None, silent_s: float = 0.0) -> None:
        """Restart the process of another host at a link that has lost messages, or brings none.

        receiver: None for this process. silent_s: time in which nothing came although the sender ran, 0 if messages
        were lost. Requests go on as after its death, which ends all that the two ends knew of each other. Each further
        restart within `window_s` waits longer.
        """
        sender = self.children.get(lost.sender)
        if silent_s and (sender is None or not sender.has_beaten(time.monotonic(), SILENT_S)):
            return  # it computes, starts or has ended: this explains the silence
        if sender is not None and sender.incarnation != lost.incarnation:
            return  # it has ended, and its messages with it
        culprit = sender if sender is not None and sender.host else receiver
        if culprit is None or not culprit.host or process_rank(culprit.name) is None:
            log.error("%d messages of %s were lost with a connection", lost.lost, lost.sender)
            return
        if not culprit.is_running or culprit.ending or culprit.renewing:
            return
        ends = {"sender": sender, "receiver": receiver}
        names = {end: SUPERVISOR if child is None else child.name for end, child in ends.items()}
        hosts = {f"{end}_host": "" if child is None else child.host for end, child in ends.items()}
        delay_s = self._link_delay_s(culprit)
        facts: dict[str, Any] = {"silent_s": silent_s} if silent_s else {}
        self.events.add("link.broken", child=culprit.name, lost=lost.lost, **names, **hosts, **facts, after_s=delay_s)
        self.restarts += 1
        if self.state == "ready":
            what = "do not arrive" if silent_s else "were lost"
            self._set_state("degraded", f"messages between {names['sender']} and {names['receiver']} {what}")
        self.renew(self._group(culprit) or [culprit], delay_s)

    def _link_delay_s(self, culprit: Child) -> float:
        """Return the delay before a restart for a broken link, which grows with the number of recent ones."""
        now, delays = time.monotonic(), (0.0, *self._pace.host_retry_s)
        recent = [t for t in culprit.breaks if now - t < self._pace.window_s]
        culprit.breaks = [*recent, now]
        return delays[min(len(recent), len(delays) - 1)]

    def _on(self, child: Child, message: Message) -> None:
        now = time.monotonic()
        child.last_beat = now
        match message:
            case Hello():
                self._introduce(child, message)
            case Phase():
                self._phase(child, message, now)
            case Beat():
                child.beat(now)
                if message.steps != child.last_steps or not message.work_ready:
                    child.last_steps, child.last_step_change = message.steps, now
                is_stepping = rank_of(child.name) is not None  # other processes take no steps
                child.stuck_s = now - child.last_step_change if is_stepping else 0.0
            case Telemetry():
                if child.host:
                    message = child.clock.shifted(message, now)
                self.values.update(message.values)
                self.publisher.take(child.name, message)
                for kind, facts in message.events:
                    self.events.add(kind, **facts)
            case Drained():
                if message.drain == self._drain:
                    self._drained.set()
                self._ended_level = max(self._ended_level, message.drain)
                self.changes.notify()
            case LinkBroken():
                self._link_broken(LinkBreak(message.peer, message.incarnation, message.lost), child, message.silent_s)
            case AdapterDone():
                self.adapters.take(child.name, message)
            case SleepDone() | SleepProgress():
                self.sleep.take(child.name, message)
            case WakeWanted():
                self.sleep.wanted(message.nodes)
            case Cordoned():
                self.operations.cordons.take(message)
            case _:
                log.warning("%s sent an unexpected %s", child.name, type(message).__name__)

    def _introduce(self, child: Child, hello: Hello) -> None:
        first = self._outbound.introduce(child, hello)
        if child.name == API:
            self._send_state()
        if child.name == CONDUCTOR:
            self.operations.cordons.tell()
        if first and child.phase == "ready":
            self._became_ready(child)

    def _phase(self, child: Child, phase: Phase, now: float) -> None:
        before, new = child.phase, phase.phase != child.phase
        if before == "ready" and new:  # a late message: ready is the last phase
            return
        took = child.advance(phase, now)
        if new:
            self.events.add(
                "phase",
                child=child.name,
                phase=phase.phase,
                total=phase.total,
                detail=phase.detail,
                after=before,
                after_s=round(took, 3),
            )
        child.facts = {**child.facts, **self.publisher.phase(child.name, phase)}
        if phase.phase == "ready":
            if child.endpoint:  # otherwise its hello, which is still to come, makes it ready
                self._became_ready(child)
        elif self.state == "starting" and new:
            self._send_state()

    def _became_ready(self, child: Child) -> None:
        child.state = "ready"
        child.last_step_change = time.monotonic()  # the time of the start does not count as a hang
        self._outbound.announce_ready(child)
        self._maybe_ready()
        self.changes.notify()

    def _operation_ended(self) -> None:
        self._maybe_ready()
        self.sleep.operation_ended()

    def _maybe_ready(self) -> None:
        if self.state not in ("starting", "degraded") or any(c.state != "ready" for c in self.children.values()):
            return
        if self.operations.is_running:
            return
        facts: dict[str, Any] = {}
        if self.ready_s is None:
            self.ready_s = time.monotonic() - self._began
            facts = {"ready_s": round(self.ready_s, 2), "phases_s": self.phases_s}
        self._is_restarting = False
        self.cause = None
        self._set_state("ready", **facts)

    # -- publishing -------------------------------------------------------------------------------------------

    async def _ping_forever(self) -> None:
        while True:
            self._pings += 1
            ping = Ping(seq=self._pings)
            self._outbound.broadcast(ping)
            self.hosts.ping(ping)
            if self._pings % SHARE_PINGS == 0:
                self._share_samples()
            await sleep_to_tick(self._pace.ping_s)

    async def _publish_forever(self) -> None:
        while True:
            self.publisher.refresh()
            for kind, facts in self._throttle.due(self.values, self.publisher.refused, self.hub.now()):
                self.events.add(kind, **facts)
            if self.hub.watchers:
                await sleep_to_tick(self._pace.publish_s)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(next_tick(time.monotonic(), self._pace.unwatched_s)):
                        await self.hub.watched.wait()

    def _share_samples(self) -> None:
        samples = self.publisher.shared_samples()
        if samples != self._shared_samples and API in self.children:
            self._shared_samples = samples
            self._outbound.send(API, Telemetry(name="supervisor", incarnation=0, samples=samples))

    def _set_state(self, state: str, reason: str = "", *, public: str | None = None, **facts: Any) -> None:
        """Enter a state. reason: for operators; public: the same for clients, if it differs."""
        if (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason, self.public_reason = state, reason, reason if public is None else public
        self.events.add(f"deployment.{state}", reason=reason, **facts)
        self._send_state()
        self.changes.notify()

    def _send_state(self) -> None:
        partly = "ready" if can_serve(self.spec.plan, self.children.values()) else "starting"
        states = {"degraded": partly, "failed": "unhealthy", "stopping": "draining"}
        state = states.get(self.state, self.state)
        phase = next((f"{c.name}: {c.phase}" for c in self.children.values() if c.state != "ready"), "")
        if self.sleep.is_waking:
            phase = "wake"
        told = ServiceState(
            state=state,
            phase=phase,
            reason=self.public_reason,
            drain=self._drain,
            pause=self._pause,
            handover=self._handover,
        )
        self._outbound.send(API, told)

    def _task(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the supervisor failed", exc_info=task.exception())
            self._end(ExitCode.INTERNAL, "the supervisor failed; see its log")
