"""Spawners: how the supervisor starts children, on its own host or through the agent of another one."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.host.run_dir import RunDirectory
from mstar_core.process.failures import fatal_path
from mstar_core.process.spawn import LocalProcess, start_process


class ChildProcess(Protocol):
    """The process of a child, on any host.

    pid: on its host. exited: set at its end. returncode: exit status, negative for a signal, None while it runs.
    was_standby: it was started as a standby process.
    """

    was_standby: bool
    exited: asyncio.Event

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def watch(self, write: Callable[[bytes], None]) -> int:
        """Pass its output on by lines; return the exit status once the process and its group have ended."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, if it still exists."""

    def fatal(self) -> dict[str, Any] | None:
        """Return the record of the error that ended it, if there is one."""

    def computed_s(self) -> float | None:
        """Return the CPU seconds of its main thread, None if they are unknown."""

    def is_suspended(self) -> bool:
        """Return whether it is stopped by a signal or a debugger."""


class Spawner(Protocol):
    """Starts children on one host. endpoint: of the supervisor's mailbox, for processes of that host."""

    @property
    def endpoint(self) -> str: ...

    async def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        inherited: tuple[int, ...] = (),
        takes_standby: bool = False,
    ) -> ChildProcess:
        """Start a module as the child `name`. arguments: behind the path of the spec.

        inherited: descriptors, on the supervisor's host only. Raises OSError or MstarError if there is no process.
        """


class TakesStandby(Protocol):
    """The standby process, as spawners see it."""

    async def take(self, spec: DeploymentSpec, module: str, arguments: Sequence[str]) -> LocalProcess | None:
        """Have the standby process become a child. Returns None if a new process must be started."""


class LocalSpawner:
    """Starts children on the supervisor's host. spec: returns the current one."""

    def __init__(
        self, spec: Callable[[], DeploymentSpec], run: RunDirectory, endpoint: str, standby: TakesStandby
    ) -> None:
        self.endpoint = endpoint
        self._spec = spec
        self._run = run
        self._standby = standby

    async def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        inherited: tuple[int, ...] = (),
        takes_standby: bool = False,
    ) -> LocalProcess:
        """See `Spawner.start`."""
        spec, path = self._spec(), fatal_path(self._run.path, name)
        path.unlink(missing_ok=True)
        words = (str(self._run.spec), *arguments)
        process = await self._standby.take(spec, module, words) if takes_standby else None
        if process is None:
            process = await start_process(spec, module, words, inherited=inherited)
        process.fatal_path = path
        return process
