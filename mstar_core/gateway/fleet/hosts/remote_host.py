"""Deployments of another host: an agent there, reached through ssh, starts and watches them.

The agent reports every second. A host whose agent is silent is lost, and reached again once it answers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec

from mstar_core.errors import MstarError, Unreachable
from mstar_core.gateway.fleet.head import DeploymentHead
from mstar_core.gateway.fleet.hosting import Need
from mstar_core.gateway.fleet.hosts.forward import ReplicaForward
from mstar_core.gateway.fleet.hosts.messages import AgentAnswer, AgentCall, DeploymentReport, HostReport, Verb
from mstar_core.gateway.fleet.hosts.names import admin_socket_of, forwards_folder, make_forwards_folder, qualified
from mstar_core.gateway.parts import Replica
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.host.gpu_locks import Holder
from mstar_core.host.other_hosts.contexts import Contexts
from mstar_core.host.other_hosts.ssh import AGAIN, ALIVE, SOON, ssh
from mstar_core.version import __version__

log = logging.getLogger("mstar.gateway")

AGENT: Final = ("mstarctl", "serve", "agent")
SILENCE_S: Final = 15.0
"""Time without a report after which a host is lost, as long as ssh itself waits for a silent host."""

CONNECT_S: Final = 60.0
"""Longest time from the start of ssh to the first report."""

BACK_OFF_S: Final = (0.5, 1.0, 2.0, 5.0)
"""Delays before further attempts to connect; the last one repeats."""

SHOWN_S: Final = 5.0
"""Time in which a reading of the heads waits for a new connection to a deployment."""

LINE_LIMIT: Final = 1 << 24
END_S: Final = 5.0
EMPTY: Final = HostReport(deployments=(), holders={}, memory_bytes=0)


class RemoteStart:
    """A start on another host. number: of the launch."""

    def __init__(self, host: RemoteHost, name: str, number: int) -> None:
        self._host = host
        self._name = name
        self._number = number

    async def until_placed(self) -> None:
        """Return when the deployment holds its memory. Raises StartError, or Unreachable for a lost host."""
        await self._host.call("placed", start=self._number)

    async def until_ready(self) -> None:
        """Return when the deployment serves and can be reached. Raises StartError, or Unreachable for a lost host."""
        await self._host.call("ready", start=self._number)
        await self._host.heads([self._name])


class RemoteHost:
    """One other host. Owned by the fleet. name: of its context. destination: for ssh."""

    def __init__(self, name: str, destination: str) -> None:
        self._name = name
        self._destination = destination
        self._fault: MstarError | None = None
        self._report = EMPTY
        self._keys: dict[str, None] = {}
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[AgentAnswer]] = {}
        self._child: asyncio.subprocess.Process | None = None
        self._settled = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._forwards: dict[str, ReplicaForward] = {}
        self._openings: dict[str, asyncio.Task[None]] = {}

    @property
    def fault(self) -> MstarError | None:
        """Why the host cannot be used now; None if it can."""
        return self._fault

    # -- connection -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, and return when the host has reported or cannot be reached."""
        make_forwards_folder()
        self._keeper = asyncio.create_task(self._keep(), name=f"host {self._name}")
        await self._settled.wait()

    async def close(self) -> None:
        """End the connections. Deployments of the host go on."""
        tasks = [task for task in (self._keeper, *self._openings.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(forward.close() for forward in self._forwards.values()))
        self._forwards.clear()
        with suppress(OSError):  # others of this process use it
            forwards_folder().rmdir()

    async def _keep(self) -> None:
        """Connect again after every loss, until cancelled."""
        failures = 0
        while True:
            try:
                await self._follow()
            except (MstarError, OSError) as error:
                failures = failures + 1 if self._fault is not None else 1
                await self._lose(error if isinstance(error, MstarError) else self._unreachable(str(error)))
            await asyncio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S)) - 1])

    async def _follow(self) -> None:
        """Read the reports of one connection. Raises Unreachable at its end."""
        child = self._child = await asyncio.create_subprocess_exec(
            ssh(),
            *("-T", *SOON, *ALIVE, *AGAIN, "--", self._destination, " ".join(AGENT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT,
            start_new_session=True,  # a signal to the gateway's group must not end it before the gateway's drain
        )
        said = asyncio.create_task(_last_lines(child.stderr), name=f"ssh to {self._name}")
        assert child.stdout is not None
        limit_s, looked = CONNECT_S, None
        try:
            while True:
                try:
                    async with asyncio.timeout(limit_s):
                        line = await child.stdout.readline()
                except TimeoutError as error:
                    raise self._unreachable(f"no report within {limit_s:g} s") from error
                if not line:
                    raise self._unreachable(await _within(said) or "the connection has ended")
                self._take(line)
                limit_s = SILENCE_S
                if looked is None:
                    looked = asyncio.create_task(self._look(), name=f"look at {self._name}")
        finally:
            self._child = None
            if looked is not None:
                looked.cancel()
            await _end(child)
            said.cancel()

    async def _look(self) -> None:
        """Get a report with the holders of all known devices. Only then is the host used."""
        with suppress(MstarError):
            await self._send("look")
            if self._fault is not None:
                log.info("host %s is reached again", self._name)
            self._fault = None
            self._settled.set()

    def _take(self, line: bytes) -> None:
        """Take over one message of the agent. Raises Unreachable for an agent of another version."""
        try:
            version = msgspec.json.decode(line, type=_Versioned).version
        except msgspec.DecodeError:
            raise self._unreachable(f"its agent prints {line[:200].decode('utf-8', 'replace').strip()!r}") from None
        if version != __version__:
            raise Unreachable(
                f"host {self._name!r} has another version",
                f"mstarctl {version} there, {__version__} here",
                "install the same version on both",
                code="version_mismatch",
            )
        answer = msgspec.json.decode(line, type=AgentAnswer)
        self._report = answer.report
        future = self._calls.pop(answer.number, None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _lose(self, error: MstarError) -> None:
        """Note that the host cannot be used, and end what waits for it."""
        if self._fault is None or str(self._fault) != str(error):
            log.warning("%s", error)
        self._fault, self._report = error, EMPTY
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()
        for task in self._openings.values():
            task.cancel()
        forwards, self._forwards = self._forwards, {}
        await asyncio.gather(*(forward.close() for forward in forwards.values()))
        self._settled.set()

    def _unreachable(self, detail: str) -> Unreachable:
        hint = f"ssh {self._destination} mstarctl ps, which shows the cause"
        return Unreachable(f"host {self._name!r} cannot be reached", detail, hint, code="host_unreachable")

    # -- calls ----------------------------------------------------------------------------------------------------

    async def call(self, verb: Verb, **fields: Any) -> AgentAnswer:
        """Return the agent's answer. Raises its error with the name of the host, Unreachable if the host is lost."""
        await self._settled.wait()
        if self._fault is not None:
            raise self._fault
        return await self._send(verb, **fields)

    async def _send(self, verb: Verb, **fields: Any) -> AgentAnswer:
        child, number = self._child, next(self._numbers)
        if child is None or child.stdin is None:
            raise self._fault or self._unreachable("the connection has ended")
        call = AgentCall(number=number, verb=verb, keys=tuple(self._keys), **fields)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        with suppress(OSError):  # the reader notices the end
            child.stdin.write(msgspec.json.encode(call) + b"\n")
            await child.stdin.drain()
        try:
            answer: AgentAnswer = await future
        finally:
            self._calls.pop(number, None)
        if answer.fault is not None:
            raise answer.fault.error(self._name)
        return answer

    async def survey(self, entry: ModelEntry) -> Need:
        """Return the memory of one deployment as the host itself plans it."""
        need = (await self.call("survey", entry=entry)).need
        assert need is not None
        self._keys.update(dict.fromkeys(need.claims))
        return need

    async def launch(
        self, entry: ModelEntry, name: str, need: Need, owner: str, *, is_replacement: bool = False
    ) -> RemoteStart:
        """Start a deployment on the host's loopback address."""
        self._keys.update(dict.fromkeys(need.claims))
        answer = await self.call(
            "launch", entry=entry, name=name, need=need, owner=owner, is_replacement=is_replacement
        )
        return RemoteStart(self, name, answer.number)

    async def sleep(self, name: str, level: int) -> None:
        """Let a deployment sleep."""
        await self.call("sleep", name=name, level=level)

    async def wake(self, name: str) -> None:
        """Wake a deployment."""
        await self.call("wake", name=name)

    async def end(self, name: str) -> None:
        """End a deployment."""
        await self.call("end", name=name)

    def host_memory(self) -> int:
        """Return the free memory of the host as of the last report."""
        return self._report.memory_bytes

    def holders(self, key: str) -> Sequence[Holder]:
        """Return the holders of a device as of the last report."""
        return self._report.holders.get(key, ())

    # -- deployments ----------------------------------------------------------------------------------------------

    async def heads(self, names: Sequence[str]) -> Mapping[str, tuple[Replica, DeploymentHead | None]]:
        """Return those of the deployments that run, as of the last report; connect to them first.

        One to which no connection could be made yet is shown as one that starts.
        """
        if self._fault is not None:
            return {}
        reports = {each.name: each for each in self._report.deployments if each.name in names}
        for name in [name for name in self._forwards if name in names and name not in reports]:
            await self._forwards.pop(name).close()
        new = [self._opening(each) for each in reports.values() if not self._is_reached(each)]
        if new:
            await asyncio.wait(new, timeout=SHOWN_S)
        return {name: self._shown(each) for name, each in reports.items()}

    def _shown(self, there: DeploymentReport) -> tuple[Replica, DeploymentHead | None]:
        is_reached = self._is_reached(there)
        url = self._forwards[there.name].url if is_reached else ""
        replica = Replica(model=there.name, deployment=there.name, url=url, key=there.key)
        if is_reached or there.head is not None and there.head.is_coming:
            return replica, there.head
        head = there.head or DeploymentHead(state="starting")
        if head.state == "sleeping":
            return replica, head
        return replica, replace(head, state="starting", phase=f"connects to {self._name}", done=0, total=0)

    def _is_reached(self, there: DeploymentReport) -> bool:
        forward = self._forwards.get(there.name)
        return forward is not None and forward.is_open and forward.source == (there.url, there.socket)

    def _opening(self, there: DeploymentReport) -> asyncio.Task[None]:
        task = self._openings.get(there.name)
        if task is None:
            task = self._openings[there.name] = asyncio.create_task(self._open(there), name=f"connect to {there.name}")
            task.add_done_callback(lambda _: self._openings.pop(there.name, None))
        return task

    async def _open(self, there: DeploymentReport) -> None:
        old = self._forwards.pop(there.name, None)
        if old is not None:
            await old.close()
        forward = ReplicaForward(self._destination, there, admin_socket_of(qualified(self._name, there.name)))
        try:
            await forward.open()
        except BaseException as error:
            await forward.close()
            if not isinstance(error, MstarError):
                raise
            log.warning("%s of host %s: %s", there.name, self._name, error)
            await asyncio.sleep(BACK_OFF_S[-1])
            return
        self._forwards[there.name] = forward


class _Versioned(msgspec.Struct):
    version: str


async def _last_lines(stream: asyncio.StreamReader | None) -> str:
    """Return the last lines that ssh prints until its end."""
    lines: list[str] = []
    while stream is not None and (line := await stream.readline()):
        lines = [*lines[-3:], line.decode("utf-8", "replace").rstrip()]
    return "\n".join(lines)


async def _within(said: asyncio.Task[str]) -> str:
    """Return what ssh has printed, once it has ended."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            return await asyncio.shield(said)
    return ""


async def _end(child: asyncio.subprocess.Process) -> None:
    """End ssh, and with it the agent."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            child.terminate()
        try:
            async with asyncio.timeout(END_S):
                await child.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def remote_host(name: str) -> RemoteHost:
    """Return the host of a context. Raises NotFound, and ConfigError for a damaged file of contexts."""
    context = Contexts.load().get(name)
    return RemoteHost(name, context.ssh or "localhost")
