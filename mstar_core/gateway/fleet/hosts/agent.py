"""Agent of gateways of other hosts: starts and watches deployments of this host, as they call for it over ssh.

Run by `mstarctl serve agent`. Deployments are those of `mstarctl up` on this host, and go on when the agent ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from mstar_core.errors import MstarError
from mstar_core.gateway.fleet.hosting import DeploymentStart, Need
from mstar_core.gateway.fleet.hosts.messages import AgentAnswer, AgentCall, AgentFault, DeploymentReport, HostReport
from mstar_core.gateway.fleet.local_host import LocalHost
from mstar_core.gateway.serve_file import ModelEntry
from mstar_core.version import __version__

log = logging.getLogger("mstar.gateway")

REPORT_S = 1.0
"""Time between two reports without a call."""


class HostAgent:
    """One connection of a gateway. Owned by its process. write: sends bytes to the gateway."""

    def __init__(self, host: LocalHost, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._host = host
        self._write = write
        self._keys: tuple[str, ...] = ()
        self._starts: dict[int, DeploymentStart] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer calls until the gateway closes the connection."""
        self._spawn(self._report())
        try:
            while line := await reader.readline():
                self._spawn(self._answer(msgspec.json.decode(line, type=AgentCall)))
        except msgspec.DecodeError as error:
            log.error("the gateway has another version: %s", error)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _report(self) -> None:
        while True:
            await self._send()
            await asyncio.sleep(REPORT_S)

    async def _answer(self, call: AgentCall) -> None:
        self._keys = tuple(dict.fromkeys([*call.keys, *self._keys]))
        try:
            need = await self._done(call)
        except MstarError as error:
            await self._send(number=call.number, fault=AgentFault.of(error))
        except Exception as error:  # isolation boundary: one call must not end the agent
            log.exception("%s failed", call.verb)
            fault = AgentFault.of(MstarError(f"{call.verb} failed", f"{type(error).__name__}: {error}"))
            await self._send(number=call.number, fault=fault)
        else:
            await self._send(number=call.number, need=need)

    async def _done(self, call: AgentCall) -> Need | None:
        """Do what a call asks for. Returns the answer of a survey."""
        match call.verb:
            case "look":
                return None
            case "survey":
                need = await self._host.survey(_entry(call))
                self._keys = tuple(dict.fromkeys([*need.claims, *self._keys]))
                return need
            case "launch":
                self._starts[call.number] = await self._host.launch(
                    _entry(call), call.name, call.need or Need(), call.owner, is_replacement=call.is_replacement
                )
            case "placed":
                await self._starts[call.start].until_placed()
            case "ready":
                await self._starts.pop(call.start).until_ready()
            case "sleep":
                await self._host.sleep(call.name, call.level)
            case "wake":
                await self._host.wake(call.name)
            case "end":
                await self._host.end(call.name)
        return None

    async def _send(self, *, number: int = 0, need: Need | None = None, fault: AgentFault | None = None) -> None:
        """Send an answer with a report that was read after it. One at a time, so that no report is older than one sent
        before it."""
        async with self._sending:
            report = await self._read()
            answer = AgentAnswer(version=__version__, number=number, need=need, fault=fault, report=report)
            await self._write(msgspec.json.encode(answer) + b"\n")

    async def _read(self) -> HostReport:
        found = await self._host.running()
        return HostReport(
            deployments=tuple(
                DeploymentReport(
                    name=name,
                    url=each.replica.url,
                    key=each.replica.key,
                    socket=str(each.socket),
                    head=each.head,
                )
                for name, each in found.items()
            ),
            holders={key: tuple(self._host.holders(key)) for key in self._keys},
            memory_bytes=self._host.host_memory(),
        )

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _entry(call: AgentCall) -> ModelEntry:
    if call.entry is None:
        raise MstarError(f"a {call.verb} needs an entry")
    return call.entry
