"""Agent: starts, watches and ends the children of a deployment on its host, as the supervisor asks."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from mstar_core.agent.gpus import CUDA, GpuHolder
from mstar_core.agent.log_lines import FLUSH_S, LogBuffer
from mstar_core.agent.readings import HostReader
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import MstarError, StartError
from mstar_core.host.network import free_ports
from mstar_core.host.private_files import write_private
from mstar_core.host.run_dir import RunDirectory
from mstar_core.messages.hosts import (
    ChildExited,
    ChildSpawned,
    FindPorts,
    HostSpec,
    LogLines,
    PortsFound,
    SignalChild,
    SpawnChild,
)
from mstar_core.messages.life import PeerUp, Ping
from mstar_core.messages.names import SUPERVISOR
from mstar_core.messages.wire import Envelope, Message
from mstar_core.process.failures import fatal_path
from mstar_core.process.life import ChildLife
from mstar_core.process.spawn import LocalProcess, start_process
from mstar_core.ticks import sleep_to_tick
from mstar_core.transport import Courier, LinkBreak, Malformed

STOP_S: Final = 8.0
"""Time for children to end by themselves."""

READING_S: Final = 2.0
ITSELF: Final = 0
"""Key of the agent in messages about processes."""

LEFT: Final = ("weights.folder", "weights.fingerprint")
"""Files of the run directory whose contents go to the supervisor with the exit of the process that wrote them."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class HostedChild:
    """A process of this host. process: None until it exists. early: signals that came before."""

    key: int
    name: str
    lines: LogBuffer
    process: LocalProcess | None = None
    early: list[signal.Signals] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group, now or once it exists."""
        if self.process is None:
            self.early.append(number)
        else:
            self.process.signal(number)


class Agent:
    """The children of one host. Owned by main of the agent's process.

    spec: of the deployment, with the paths of this host. life: link to the supervisor.
    """

    def __init__(
        self,
        spec: DeploymentSpec,
        run: RunDirectory,
        courier: Courier,
        life: Callable[[DeploymentSpec], ChildLife],
        *,
        ports: tuple[int, int] | None = None,
    ) -> None:
        """spec: as the supervisor sent it. ports: that groups may use; None: any."""
        self._folder: str | None = None
        self._run = run
        self.spec = self._of_this_host(spec)
        self.life = life(self.spec)
        self._courier = courier
        self._ports = ports
        self._children: dict[int, HostedChild] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._lines = {ITSELF: self._buffer(ITSELF)}
        self._gpus = GpuHolder(spec.on_host)
        self._readings = HostReader()
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()
        self._newest = 0
        self._ping = 0
        self._ping_at = 0.0

    # -- life -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the supervisor stops this agent or is lost; then end all children."""
        self._loop = asyncio.get_running_loop()
        self._write_spec()
        reading = asyncio.ensure_future(self._read_forever())
        while self.life.stop_reason is None:
            now = time.monotonic()
            self.life.beat(now)
            self._woken.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), max(0.01, self.life.wait_s(now)))
            if reading.done():
                reading.result()  # raises its error
        log.info("the agent ends: %s", self.life.stop_reason)
        reading.cancel()
        await self._end_children()
        self._readings.stop()
        self._gpus.release()
        while any([buffer.flush() for buffer in self._lines.values()]):
            pass
        self._send(ChildExited(key=ITSELF, status=0))

    def stop(self, reason: str) -> None:
        """End soon."""
        self.life.stop_reason = self.life.stop_reason or reason
        self._woken.set()

    def link_broken(self, lost: LinkBreak) -> None:
        """End if orders of the supervisor were lost: it has another idea of the processes here."""
        if lost.sender == SUPERVISOR:
            self.stop(f"{lost.lost} messages of the supervisor were lost with a connection")

    def write(self, text: str) -> int:
        """Take a line of this process's own log: the agent is the stream of its logging handler."""
        print(text, end="", flush=True)
        if text.strip():
            self._lines[ITSELF].add(text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Do nothing: lines leave with the next batch."""

    async def _end_children(self) -> None:
        for child in self._children.values():
            child.signal(signal.SIGTERM)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=STOP_S)
            for child in self._children.values():
                child.signal(signal.SIGKILL)
            if late:
                await asyncio.wait(late, timeout=STOP_S)

    # -- messages ---------------------------------------------------------------------------------------------

    def on_batch(self, batch: Iterable[Envelope | Malformed]) -> None:
        """Handle messages of the supervisor. A bad one does not affect the others."""
        for item in batch:
            if isinstance(item, Malformed):
                log.warning("a message could not be read: %s", item.error)
                continue
            try:
                if item.sender == SUPERVISOR:
                    self._receive(item)
            except Exception:  # isolation boundary: one message
                log.exception("message %s failed", type(item.body).__name__)
        if self.life.stop_reason is not None:
            self._woken.set()

    def _receive(self, envelope: Envelope) -> None:
        if isinstance(envelope.body, Ping):
            self._ping, self._ping_at = envelope.body.seq, time.monotonic()
        for message in self.life.receive(envelope):
            self._on(message)

    def _on(self, message: Message) -> None:
        match message:
            case SpawnChild():
                self._newest = max(self._newest, message.key)
                child = HostedChild(message.key, message.name, self._buffer(message.key))
                self._children[message.key] = child
                self._lines[message.key] = child.lines
                task = asyncio.ensure_future(self._serve(child, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case SignalChild():
                if (known := self._children.get(message.key)) is not None:
                    known.signal(signal.Signals(message.number))
            case HostSpec():
                self.spec = self._of_this_host(msgspec.json.decode(message.spec, type=DeploymentSpec))
                self._write_spec()
            case FindPorts():
                ports = free_ports(self.spec.address, message.count, self._ports)
                self._send(PortsFound(number=message.number, ports=ports))
            case PeerUp():
                pass  # introductions of children are not for agents
            case _:
                log.warning("the supervisor sent an unexpected %s", type(message).__name__)

    def _send(self, message: Message) -> None:
        try:
            self._courier.send(SUPERVISOR, message)
        except MstarError as error:
            log.warning("%s was not sent: %s", type(message).__name__, error)

    def _send_lines(self, lines: LogLines) -> None:
        self._courier.send(SUPERVISOR, lines)

    # -- children ---------------------------------------------------------------------------------------------

    async def _serve(self, child: HostedChild, order: SpawnChild) -> None:
        """Start a process, and report its start, output and end."""
        try:
            await self._start(child, order)
        except (MstarError, OSError) as error:
            self._refuse(child, error)
            return
        process = child.process
        assert process is not None
        self._send(ChildSpawned(key=child.key, pid=process.pid))
        for number in child.early:
            process.signal(number)
        status = await process.watch(child.lines.add)
        while child.lines.flush():
            pass
        left = self._left()
        if status == 0 and LEFT[0] in left:
            self._folder = left[LEFT[0]]
            self.spec = self._of_this_host(self.spec)
            self._write_spec()
        self._send(ChildExited(key=child.key, status=status, fatal=aged(process.fatal()), left=left))
        self._forget(child)

    async def _start(self, child: HostedChild, order: SpawnChild) -> None:
        self._gpus.hold(self.spec)
        if any(rank.device.startswith(CUDA) for rank in self.spec.plan.ranks if rank.host == self.spec.on_host):
            self._readings.watch_gpus()
        path = fatal_path(self._run.path, child.name)
        path.unlink(missing_ok=True)
        child.process = await start_process(self.spec, order.module, (str(self._run.spec), *order.arguments))
        child.process.fatal_path = path

    def _refuse(self, child: HostedChild, error: MstarError | OSError) -> None:
        if isinstance(error, OSError):
            error = StartError(f"{child.name} cannot be started", str(error))
        refusal = ChildSpawned(key=child.key, error=error.title, detail=error.detail, hint=error.hint, code=error.code)
        self._send(refusal)
        self._forget(child)

    def _forget(self, child: HostedChild) -> None:
        del self._children[child.key], self._lines[child.key]

    def _left(self) -> dict[str, str]:
        """Return the contents of the files that were left for the supervisor, and remove them."""
        left = {}
        for name in LEFT:
            path = self._run.path / name
            with suppress(OSError, UnicodeDecodeError):
                left[name] = path.read_text()
                path.unlink()
        return left

    # -- spec, readings, logs ---------------------------------------------------------------------------------

    def _of_this_host(self, spec: DeploymentSpec) -> DeploymentSpec:
        """Return a spec with the paths of this host."""
        return msgspec.structs.replace(
            spec,
            run_dir=str(self._run.path),
            log_dir=str(self._run.path / "logs"),
            folder=self._folder or spec.folder,
            upload_dir=None,
        )

    def _write_spec(self) -> None:
        Path(self.spec.log_dir).mkdir(mode=0o700, exist_ok=True)
        write_private(self._run.spec, self.spec.encode())

    def _buffer(self, key: int) -> LogBuffer:
        return LogBuffer(key, self._send_lines, self._has_lines)

    def _has_lines(self) -> None:
        """Have the lines of a buffer sent soon, from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._flush_later)

    def _flush_later(self) -> None:
        if self._flush is None and self._loop is not None:
            self._flush = self._loop.call_later(FLUSH_S, self._flush_lines)

    def _flush_lines(self) -> None:
        """Send a batch of each buffer, and another one later for those that are left."""
        self._flush = None
        for buffer in self._lines.values():
            buffer.flush()
        if not all(buffer.is_empty for buffer in self._lines.values()):
            self._flush_later()

    async def _read_forever(self) -> None:
        while True:
            children = {child.name: child for child in self._children.values()}
            processes = {name: child.process for name, child in children.items() if child.process is not None}
            if self.life.known:
                reading = self._readings.read(
                    {name: process for name, process in processes.items() if process.returncode is None},
                    running=sorted(self._children),
                    newest=self._newest,
                    ping=self._ping,
                    ping_age_s=round(time.monotonic() - self._ping_at, 6) if self._ping else 0.0,
                )
                self._send(reading)
            await sleep_to_tick(READING_S)


def aged(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a fatal record with its age in seconds in place of times of this host's clock."""
    if record is None:
        return None
    age_s = max(0.0, time.monotonic() - float(record.get("monotonic", time.monotonic())))
    return {name: value for name, value in {**record, "age_s": age_s}.items() if name != "monotonic"}
