"""Link to the agent of one other host: messages, the processes there, readings, silence."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from mstar_core.cluster.placer import Bundle, StartedAgent
from mstar_core.config.deployment import HostPlan
from mstar_core.errors import MstarError, StartError
from mstar_core.messages.hosts import (
    ChildExited,
    ChildSpawned,
    FindPorts,
    HostReading,
    LogLines,
    PortsFound,
    SignalChild,
    SpawnChild,
)
from mstar_core.messages.life import Beat, Hello, PeerUp, Ping
from mstar_core.messages.names import agent_name
from mstar_core.messages.wire import Message
from mstar_core.observe.frames import GpuStatus, HostStatus
from mstar_core.supervisor.hosts.remote_process import HOST_LOST, RemoteProcess
from mstar_core.transport import Courier

SPAWN_S: Final = 20.0
"""Time for an agent to report that a process exists."""

PINGS: Final = 64
"""Latest pings whose times are kept, to measure the round trip."""

log = logging.getLogger(__name__)


class AgentLink:
    """One other host. Owned by `OtherHosts`. A `Spawner` for the children of that host.

    plan: its name and address. state: starting, ready, lost or waiting; reason: why it is lost, or what it waits for.
    started: its current agent. is_known: that has answered. is_leaving: it is being ended for good. seen: time of its
    last message. heard: of its last reading. ended: its agent has ended in order.
    endpoint: of the supervisor's mailbox for other hosts.
    """

    def __init__(
        self,
        plan: HostPlan,
        bundle: Bundle,
        courier: Courier,
        keys: Iterator[int],
        endpoint: str,
        write_log: Callable[[bytes], None],
    ) -> None:
        """keys: numbers of processes, of all hosts. write_log: takes a line of the agent's own log."""
        self.plan = plan
        self.bundle = bundle
        self.endpoint = endpoint
        self.state = "starting"
        self.reason = ""
        self.started: StartedAgent | None = None
        self.incarnation = 0
        self.seen = 0.0
        self.heard: float | None = None
        self.is_known = self.is_leaving = False
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.processes: dict[int, RemoteProcess] = {}
        self.reading: HostReading | None = None
        self.round_trip_s: float | None = None
        self._courier = courier
        self._keys = keys
        self._write_log = write_log
        self._pings: dict[int, float] = {}
        self._numbers = itertools.count(1)
        self._ports: dict[int, asyncio.Future[list[int]]] = {}

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def title(self) -> str:
        """Name of the host for people."""
        return self.plan.title or self.plan.name

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    # -- life -------------------------------------------------------------------------------------------------

    def begin(self, agent: StartedAgent) -> None:
        """Connect to a new agent of this host. Raises TransportError for an endpoint that cannot be used."""
        self.incarnation = max(agent.incarnation, self.incarnation + 1)
        self.started, self.reading, self.round_trip_s = agent, None, None
        self.is_known = False
        self.ended = asyncio.Event()
        self.seen = time.monotonic()
        self.plan = msgspec.structs.replace(
            self.plan, address=agent.address, node=agent.node or self.plan.node, title=agent.title or self.plan.title
        )
        self._pings.clear()
        self._courier.connect(agent_name(self.name), agent.endpoint, self.incarnation, server_key=agent.key)

    def set_state(self, state: str, reason: str = "") -> None:
        """Enter a state."""
        self.state, self.reason = state, reason
        self._notify()

    async def until(self, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Wait for a condition of this link, at most `limit_s`. Returns whether it holds."""
        try:
            async with asyncio.timeout(limit_s):
                while not is_true():
                    await self.changed.wait()
        except TimeoutError:
            return is_true()
        return True

    def lose(self, why: str) -> None:
        """Drop the agent and all processes of its host."""
        self._courier.disconnect(agent_name(self.name), self.incarnation)
        self.is_known = False
        self.set_state("lost", why)
        for process in list(self.processes.values()):
            process.lose(f"host {self.title} was lost", why)
        self.processes.clear()
        for waiting in self._ports.values():
            waiting.cancel()
        self._ports.clear()

    def send(self, message: Message) -> None:
        """Send to the agent. A failure is logged: the silence of the agent, or of its child, shows it."""
        try:
            self._courier.send(agent_name(self.name), message)
        except MstarError as error:
            log.warning("a message to the agent of host %s was not sent: %s", self.title, error)

    def ping(self, message: Ping) -> None:
        """Send a heartbeat, and note when."""
        self._pings[message.seq] = time.monotonic()
        while len(self._pings) > PINGS:
            del self._pings[next(iter(self._pings))]
        self.send(message)

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    # -- processes --------------------------------------------------------------------------------------------

    async def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        inherited: tuple[int, ...] = (),
        takes_standby: bool = False,
    ) -> RemoteProcess:
        """See `Spawner.start`."""
        assert not inherited, "descriptors do not leave a host"
        if not self.is_known:
            raise StartError(f"{name} cannot be started", f"host {self.title} is {self.state}", code=HOST_LOST)
        process = RemoteProcess(next(self._keys), name, self.name, self._signal)
        self.processes[process.key] = process
        self.send(SpawnChild(key=process.key, name=name, module=module, arguments=list(arguments)))
        try:
            async with asyncio.timeout(SPAWN_S):
                await process.spawned.wait()
        except TimeoutError:
            process.refuse(StartError(f"{name} cannot be started", f"the agent of host {self.title} does not answer"))
        process.check()
        return process

    def _signal(self, key: int, number: signal.Signals) -> None:
        self.send(SignalChild(key=key, number=int(number)))

    async def find_ports(self, count: int) -> list[int]:
        """Return TCP ports that are free on this host. Raises StartError if its agent does not answer."""
        number = next(self._numbers)
        future: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._ports[number] = future
        self.send(FindPorts(number=number, count=count))
        try:
            return await asyncio.wait_for(future, SPAWN_S)
        except (TimeoutError, asyncio.CancelledError):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise StartError(f"host {self.title} names no free ports", code=HOST_LOST) from None
        finally:
            self._ports.pop(number, None)

    # -- messages ---------------------------------------------------------------------------------------------

    def on(self, message: Message) -> None:
        """Handle a message of the current agent."""
        self.seen = time.monotonic()
        match message:
            case Hello():
                self.is_known = True
                self.send(PeerUp(name=message.name, incarnation=message.incarnation, endpoint=message.endpoint))
                self._notify()
            case Beat():
                pass
            case ChildSpawned():
                if (process := self.processes.get(message.key)) is not None:
                    process.take_spawned(message)
            case LogLines(key=0):
                for line in message.lines:
                    self._write_log(line + b"\n")
            case LogLines():
                if (process := self.processes.get(message.key)) is not None:
                    process.take_lines(message)
            case ChildExited(key=0):
                self.ended.set()
                self._notify()
            case ChildExited():
                if (process := self.processes.pop(message.key, None)) is not None:
                    process.take_exit(message)
            case PortsFound():
                if (waiting := self._ports.get(message.number)) is not None and not waiting.done():
                    waiting.set_result(message.ports)
            case HostReading():
                self._read(message)
            case _:
                log.warning("the agent of host %s sent an unexpected %s", self.title, type(message).__name__)

    def _read(self, reading: HostReading) -> None:
        self.reading, self.heard = reading, self.seen
        if (sent := self._pings.get(reading.ping)) is not None:
            self.round_trip_s = max(0.0, self.seen - sent - reading.ping_age_s)
        running = frozenset(reading.running)
        for key, process in list(self.processes.items()):
            process.cpu_s = reading.computed_s.get(process.name)
            process.suspended = process.name in reading.suspended
            if key <= reading.newest and key not in running:  # the message of its end was lost with a connection
                del self.processes[key]
                process.take_exit(ChildExited(key=key, status=-int(signal.SIGKILL)))

    # -- as it is shown ---------------------------------------------------------------------------------------

    def status(self) -> HostStatus:
        """Return the host as it is shown."""
        loads = {} if self.reading is None else self.reading.host
        agent = self.started
        return msgspec.convert(
            {
                **loads,
                "title": self.title,
                "address": self.plan.address,
                "node": self.plan.node,
                "state": self.state,
                "reason": self.reason,
                "pid": None if agent is None else agent.pid,
                "incarnation": self.incarnation,
                "heard": self.heard,
                "round_trip_ms": None if self.round_trip_s is None else round(self.round_trip_s * 1000, 2),
                "versions": {} if agent is None else agent.versions,
            },
            type=HostStatus,
        )

    def gpus(self) -> list[GpuStatus]:
        """Return the last readings of its GPUs."""
        plain = [] if self.reading is None else self.reading.gpus
        return [msgspec.structs.replace(msgspec.convert(gpu, GpuStatus), host=self.name) for gpu in plain]
