"""All other hosts of a deployment: their agents are started, introduced, watched, replaced and ended here."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from mstar_core.cluster.placer import AgentOrder, Placer, StartedAgent
from mstar_core.config.deployment import DeploymentSpec, HostPlan
from mstar_core.errors import MstarError, StartError
from mstar_core.host.network import free_ports
from mstar_core.messages.hosts import HostReading, HostSpec, Welcome
from mstar_core.messages.life import Ping, Stop
from mstar_core.messages.names import agent_name, process_rank
from mstar_core.messages.wire import WIRE_VERSION, Envelope
from mstar_core.observe.frames import LOCAL, GpuStatus, HostStatus
from mstar_core.supervisor.child import Child, Pace
from mstar_core.supervisor.events import Events
from mstar_core.supervisor.hosts.agent_link import AgentLink
from mstar_core.supervisor.hosts.devices import bundle_of, with_reserved
from mstar_core.supervisor.log_file import LogFile
from mstar_core.ticks import sleep_to_tick
from mstar_core.transport import Courier, CurveKeys, LinkBreak
from mstar_core.version import __version__

KNOWN_S: Final = 30.0
"""Time for an agent to reach the supervisor after its welcome."""

FENCE_S: Final = 5.0
"""Time for the word to an agent that has been replaced to leave, and before it is sent again."""

PORTS: Final = 2
"""Ports at which a tensor-parallel group on several hosts meets."""

LEAVE_S: Final = 0.5
"""Time for a message to an agent that has not answered yet to leave this host."""

VERSIONS: Final[Mapping[str, str]] = {"mstarctl": __version__, "wire": str(WIRE_VERSION)}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteLink:
    """Means to reach other hosts. endpoint: of the supervisor's mailbox there. keys: of the deployment."""

    endpoint: str
    keys: CurveKeys
    placer: Placer


class HostedDeployment(Protocol):
    """The parts of the supervisor that other hosts concern."""

    spec: DeploymentSpec
    events: Events
    logs: dict[str, LogFile]

    def respecify(self, spec: DeploymentSpec) -> None:
        """Replace the spec and make the processes read it that can."""

    async def prepare_host(self, host: str) -> None:
        """Prepare a host for its ranks: its weights. Raises StartError."""


class OtherHosts:
    """The other hosts. Owned by the supervisor. Empty for a deployment on one host.

    start: runs a coroutine as a task of the supervisor.
    """

    def __init__(
        self,
        deployment: HostedDeployment,
        courier: Courier,
        pace: Pace,
        remote: RemoteLink | None,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.links: dict[str, AgentLink] = {}
        self._deployment = deployment
        self._courier = courier
        self._pace = pace
        self._remote = remote
        self._start = start
        self._keys = itertools.count(1)
        self._folder = deployment.spec.folder  # as configured; each host finds its own
        self._past: dict[tuple[str, int], StartedAgent] = {}
        self._fences = itertools.count(1)
        self._fenced_at: dict[tuple[str, int], float] = {}
        self._meetings: dict[int, tuple[int, str]] = {}  # epoch and place of each group, by its leader
        self._is_ending = False
        self._replacing: set[asyncio.Task[None]] = set()
        self._is_unused = asyncio.Event()
        self._releasing: asyncio.Future[None] | None = None
        self._order: AgentOrder | None = None
        if remote is not None:
            self._order = AgentOrder(
                deployment=deployment.spec.name,
                owner_key=remote.keys.public,
                ports=deployment.spec.ray.port_range,
            )

    # -- start ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Reserve room, start all agents and wait until they are known. Raises StartError that names the host."""
        if self._remote is not None:
            await self._open(self._deployment.spec.hosts)

    async def open(self) -> None:
        """Do the same for hosts that the plan names and that the deployment does not have yet, and prepare them."""
        spec = self._deployment.spec
        names = {rank.host: None for rank in spec.plan.ranks if rank.host and rank.host not in self.links}
        if self._remote is None or not names:
            return
        hosts = tuple(HostPlan(name=name, address="") for name in names)
        self._deployment.respecify(msgspec.structs.replace(spec, hosts=(*spec.hosts, *hosts)))
        await self._open(hosts)
        for name in names:
            await self._deployment.prepare_host(name)
            self.make_ready(name)

    async def close(self) -> None:
        """End the agents of hosts that have no rank any more, and give their room back."""
        spec = self._deployment.spec
        used = {rank.host for rank in spec.plan.ranks}
        unused = [link for name, link in self.links.items() if name not in used]
        if self._remote is None or not unused:
            return
        for link in unused:
            link.is_leaving = True
        await self._end(unused, "its ranks were removed")
        for link in unused:
            del self.links[link.name]
        await self._remote.placer.release(tuple(link.name for link in unused))
        hosts = tuple(host for host in spec.hosts if host.name in used or not host.name)
        self._deployment.respecify(msgspec.structs.replace(self._deployment.spec, hosts=hosts))

    async def _open(self, hosts: tuple[HostPlan, ...]) -> None:
        remote, order, deployment = self._remote, self._order, self._deployment
        assert remote is not None and order is not None
        for host in hosts:
            if host.name:
                deployment.events.add("host.starting", host=host.name, address=host.address)
                self._add(host)
        agents = await remote.placer.start(tuple(bundle_of(deployment.spec, host) for host in hosts), order)
        links = {self.links[agent.host]: agent for agent in agents if agent.host}
        for link, agent in links.items():
            link.begin(agent)
        for link, agent in links.items():
            self._check_versions(link, agent)
        self._adopt_plans(plan=with_reserved(deployment.spec, {agent.host: agent.gpus for agent in agents}))
        for result in await asyncio.gather(*map(self._welcome, links), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def _add(self, host: HostPlan) -> AgentLink:
        remote, deployment = self._remote, self._deployment
        assert remote is not None
        name, spec = agent_name(host.name), deployment.spec
        deployment.logs[name] = LogFile(Path(spec.log_dir) / f"{name}.log", spec.logs)
        link = AgentLink(
            host,
            bundle_of(spec, host),
            self._courier,
            self._keys,
            remote.endpoint,
            write_log=deployment.logs[name].write,
        )
        self.links[host.name] = link
        return link

    @staticmethod
    def _check_versions(link: AgentLink, agent: StartedAgent) -> None:
        """Raise StartError if the host has another version of mstarctl or of the wire format."""
        for what, own in VERSIONS.items():
            other = agent.versions.get(what, own)
            if other != own:
                name = "mstarctl" if what == "mstarctl" else "the wire format of mstarctl"
                raise StartError(
                    f"host {link.title} has another version of {name}",
                    f"{other} there, {own} here",
                    f"install mstarctl {__version__} on every host",
                    phase="plan",
                )

    def _adopt_plans(self, **changes: Any) -> None:
        """Put the current hosts, and other changes, into the spec."""
        spec = self._deployment.spec
        hosts = tuple(self.links[host.name].plan if host.name in self.links else host for host in spec.hosts)
        self._deployment.respecify(msgspec.structs.replace(spec, hosts=hosts, **changes))

    async def _welcome(self, link: AgentLink) -> None:
        """Introduce the deployment to a new agent, and wait until it is known. Raises StartError."""
        remote = self._remote
        assert remote is not None and link.started is not None
        link.send(
            Welcome(
                host=link.name,
                incarnation=link.incarnation,
                supervisor=remote.endpoint,
                public_key=remote.keys.public,
                secret_key=remote.keys.secret,
                spec=self.spec_of(link).encode(),
            )
        )
        if not await link.until(lambda: link.is_known or link.state == "lost", KNOWN_S) or not link.is_known:
            raise StartError(
                f"the agent of host {link.title} does not answer",
                f"{link.started.endpoint} from here, or {remote.endpoint} from there, cannot be reached",
                "let TCP pass between the hosts; ray.ports limits the ports, ray.network chooses the network",
                phase="plan",
                code="host_unreachable",
            )

    def make_ready(self, name: str) -> None:
        """Note that processes may start on a host: its weights are there."""
        link = self.links[name]
        link.set_state("ready")
        self._deployment.events.add("host.ready", host=name, address=link.plan.address, incarnation=link.incarnation)

    def spec_of(self, link: AgentLink) -> DeploymentSpec:
        """Return the spec for a host: without keys of clients. The agent puts in the paths of its host."""
        spec = self._deployment.spec
        api = msgspec.structs.replace(spec.api, api_keys=(), metrics_keys=(), ice_secrets=())
        return msgspec.structs.replace(spec, on_host=link.name, folder=self._folder, api=api)

    # -- while it serves --------------------------------------------------------------------------------------

    async def available(self, hosts: Collection[str]) -> None:
        """Wait until processes can start on these hosts."""
        for name in hosts:
            if (link := self.links.get(name)) is not None:
                while not link.is_ready:
                    await link.changed.wait()

    def respecify(self) -> None:
        """Send the changed spec to all agents."""
        for link in self.links.values():
            if link.is_known:
                link.send(HostSpec(spec=self.spec_of(link).encode()))

    def ping(self, message: Ping) -> None:
        """Send a heartbeat to all agents."""
        for link in self.links.values():
            if link.is_known:
                link.ping(message)

    def on(self, envelope: Envelope) -> bool:
        """Handle a message, if it comes from an agent. Returns whether it does."""
        link = next((each for each in self.links.values() if agent_name(each.name) == envelope.sender), None)
        if link is None:
            return False
        is_current = envelope.incarnation == link.incarnation and link.state not in ("lost", "waiting")
        if is_current:
            link.on(envelope.body)
            if link.ended.is_set() and link.is_known and not (self._is_ending or link.is_leaving):
                self._lose(link, "its agent has ended")
        else:
            self._fence(link.name, envelope.incarnation)
        return True

    def on_break(self, lost: LinkBreak) -> bool:
        """Give up the agent whose messages were lost, if it is one. Returns whether it is."""
        link = next((each for each in self.links.values() if agent_name(each.name) == lost.sender), None)
        if link is None:
            return False
        is_current = lost.incarnation == link.incarnation and link.state not in ("lost", "waiting")
        if is_current and not (self._is_ending or link.is_leaving):
            self._lose(link, f"{lost.lost} messages of its agent were lost with a connection")
        self._fence(link.name, lost.incarnation)
        return True

    def _fence(self, host: str, incarnation: int) -> None:
        """Tell an agent that was given up to end, with its processes: others have taken their place."""
        key, now = (host, incarnation), time.monotonic()
        agent = self._past.get(key)
        if agent is None or now < self._fenced_at.get(key, 0.0) + FENCE_S:
            return
        self._fenced_at[key] = now
        name, number = f"{agent_name(host)}.{incarnation}", next(self._fences)
        self._deployment.events.add("host.fenced", host=host, incarnation=incarnation)
        self._courier.connect(name, agent.endpoint, number, server_key=agent.key)
        self._courier.send(name, Stop(reason="the supervisor has given it up"))
        asyncio.get_running_loop().call_later(FENCE_S, self._courier.disconnect, name, number)

    async def watch(self) -> None:
        """Give up agents that are silent, forever."""
        checked = time.monotonic()
        while True:
            await sleep_to_tick(self._pace.watch_s)
            now = time.monotonic()
            late_s = now - checked - self._pace.watch_s
            for link in list(self.links.values()):
                if late_s > self._pace.watch_s:  # messages of the time in which this process did not run are unread
                    link.seen += late_s
                if link.is_known and not link.is_leaving and now - link.seen > self._pace.host_silence_s:
                    self._lose(link, f"its agent has been silent for {now - link.seen:.0f} s")
            checked = time.monotonic()

    def _lose(self, link: AgentLink, why: str) -> None:
        """Give up a host and its processes, and look for another one unless that is done already."""
        assert link.started is not None
        was_ready = link.is_ready
        self._past[link.name, link.incarnation] = link.started
        self._deployment.events.add("host.lost", host=link.name, address=link.plan.address, why=why)
        link.lose(why)
        if was_ready and not self._is_ending:
            task = self._start(self._replace(link))
            self._replacing.add(task)
            task.add_done_callback(self._replacing.discard)

    async def _replace(self, link: AgentLink) -> None:
        """Start another agent in place of a lost one, as often as necessary."""
        events, attempts = self._deployment.events, 0
        why = "room for its processes"
        while True:
            link.set_state("waiting", why)
            events.add("host.waiting", host=link.name, why=why)
            if attempts:
                await asyncio.sleep(self._pace.host_retry_s[min(attempts, len(self._pace.host_retry_s)) - 1])
            attempts += 1
            try:
                await self._start_again(link)
            except MstarError as error:
                self._give_up(link)
                why = "; ".join(part for part in (error.title, error.detail) if part)
                continue
            events.add("host.replaced", host=link.name, address=link.plan.address, incarnation=link.incarnation)
            self.make_ready(link.name)
            return

    async def _start_again(self, link: AgentLink) -> None:
        remote, order, deployment = self._remote, self._order, self._deployment
        assert remote is not None and order is not None
        link.bundle = bundle_of(deployment.spec, link.plan)
        agent = await remote.placer.replace(link.bundle, order)
        plan = with_reserved(deployment.spec, {link.name: agent.gpus})
        link.set_state("starting")
        link.begin(agent)
        self._check_versions(link, agent)
        self._adopt_plans(plan=plan)
        await self._welcome(link)
        await deployment.prepare_host(link.name)

    def _give_up(self, link: AgentLink) -> None:
        """End an agent that was started in vain."""
        if link.state == "starting" and link.started is not None:
            self._past[link.name, link.incarnation] = link.started
            link.lose("it could not be used")
            self._fence(link.name, link.incarnation)

    async def meeting(self, child: Child) -> tuple[str, ...]:
        """Return the argument that tells a member of a tensor-parallel group on several hosts where all meet.

        The place is new for each start of the group: two ports of the leader's host. Raises StartError without them.
        """
        spec, rank = self._deployment.spec, process_rank(child.name)
        group = None if rank is None else spec.plan.group_of(rank)
        if group is None or len({spec.host_of(each) for each in group.ranks}) < 2:
            return ()
        epoch = child.incarnation + 1
        if self._meetings.get(group.leader, (0, ""))[0] != epoch:
            name = spec.host_of(group.leader)
            address = next(host.address for host in spec.hosts if host.name == name)
            find = self.links[name].find_ports(PORTS) if name else self._own_ports(address)
            self._meetings[group.leader] = epoch, ":".join((address, *map(str, await find)))
        return ("--meet", self._meetings[group.leader][1])

    async def _own_ports(self, address: str) -> list[int]:
        return free_ports(address, PORTS, None if self._order is None else self._order.ports)

    # -- end --------------------------------------------------------------------------------------------------

    def end_soon(self) -> None:
        """Replace no lost host any more, and prepare to give the room back: the deployment ends."""
        self._is_ending = True
        if self._remote is not None and self._releasing is None:
            self._releasing = asyncio.ensure_future(self._remote.placer.release(when=self._is_unused))
        for task in self._replacing:
            task.cancel()

    async def stop(self, reason: str) -> None:
        """End all agents, and give their room back."""
        if self._remote is None:
            return
        self.end_soon()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        await self._end(list(self.links.values()), reason)
        self._is_unused.set()
        if self._releasing is not None:
            await self._releasing

    async def _end(self, links: Sequence[AgentLink], reason: str) -> None:
        """End agents and wait until they have ended, as far as they answer."""
        for link in links:
            link.send(Stop(reason=reason))
        if not all(link.is_known for link in links):
            await asyncio.sleep(LEAVE_S)
        known = [link for link in links if link.is_known]
        await asyncio.gather(*(link.until(link.ended.is_set, self._pace.stop_s) for link in known))
        for link in links:
            self._courier.disconnect(agent_name(link.name), link.incarnation)
            self._deployment.logs[agent_name(link.name)].close()

    # -- as they are shown ------------------------------------------------------------------------------------

    def reading(self, host: str) -> HostReading | None:
        """Return the last reading of another host."""
        link = self.links.get(host)
        return None if link is None else link.reading

    def statuses(self, local: HostStatus) -> dict[str, HostStatus]:
        """Return all hosts by key. local: loads of the supervisor's."""
        if not self.links:
            return {LOCAL: local}
        own = next((host for host in self._deployment.spec.hosts if not host.name), None)
        if own is not None:
            local = msgspec.structs.replace(
                local, title=own.title, address=own.address, node=own.node, state="ready", versions=dict(VERSIONS)
            )
        return {LOCAL: local, **{name: link.status() for name, link in self.links.items()}}

    def gpus(self) -> dict[str, GpuStatus]:
        """Return the GPUs of the other hosts by key, `HOST/INDEX`."""
        return {f"{name}/{gpu.index}": gpu for name, link in self.links.items() for gpu in link.gpus()}
