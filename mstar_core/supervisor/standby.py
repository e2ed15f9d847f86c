"""Standby process of a deployment: takes the place of a worker that dies, without the seconds of its imports.

The supervisor starts it once the deployment has been ready for a while, and hands it the arguments of the dead child's
next incarnation. Without a standby process that is ready, the child is started as usual.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.host.run_dir import RunDirectory
from mstar_core.process.spawn import LocalProcess, child_environment, pump, start_process
from mstar_core.process.standby import Answer, Identity, Preloaded, Taken, encode
from mstar_core.supervisor.child import ChildKind, Pace
from mstar_core.supervisor.events import Events
from mstar_core.supervisor.log_file import LogFile
from mstar_core.ticks import sleep_to_tick

MOST_FAILURES: Final = 3
"""Standby processes in a row that ended before they were ready, after which no other one is started."""


class Standby:
    """The standby process. Owned by the supervisor.

    kind: None: the deployment has none. is_ready: it has imported everything.
    """

    def __init__(
        self, kind: ChildKind | None, run: RunDirectory, events: Events, pace: Pace, logs: dict[str, LogFile]
    ) -> None:
        """logs: by process; its own is added with its first start, and keeps its output until it becomes a child."""
        self.kind = kind
        self.is_ready = False
        self._logs = logs
        self._run = run
        self._events = events
        self._pace = pace
        self._process: LocalProcess | None = None
        self._environment: dict[str, str] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._killed: list[LocalProcess] = []
        self._failures = 0

    @property
    def pid(self) -> int | None:
        """Its pid while it runs."""
        return self._process.pid if self._process is not None and self._is_running else None

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def keep(self, spec: Callable[[], DeploymentSpec], is_calm: Callable[[], bool]) -> NoReturn:
        """Keep a standby process while the deployment is calm: ready, so that no child competes for the CPU.

        spec: the current one.
        """
        calm_since, not_before = time.monotonic(), 0.0
        while True:
            await sleep_to_tick(self._pace.watch_s)
            now = time.monotonic()
            if not is_calm():
                calm_since = now
            if self._process is not None and not self._is_running:
                self._note_end()
                not_before = now + self._pace.standby_retry_s
            is_due = now >= max(not_before, calm_since + self._pace.standby_s) and self._failures < MOST_FAILURES
            if self.kind is not None and self._process is None and is_due and is_calm():
                await self._start(self.kind, spec())

    async def take(self, spec: DeploymentSpec, module: str, arguments: Sequence[str]) -> LocalProcess | None:
        """Have the standby process become a child. Returns it, or None if a new process must be started.

        A process that still imports is ended: it would compete with the child. So is one with another environment,
        part of which takes effect at the start of a process only.
        """
        if self._process is None:
            return None
        if not (self.is_ready and self._is_running and child_environment(spec) == self._environment):
            self.end()
            return None
        process, reader, writer = self._process, self._reader, self._writer
        assert reader is not None and writer is not None
        self._release()  # at once: another child may die while this one waits for the answer
        try:
            writer.write(encode(Identity(module=module, arguments=tuple(arguments))))
            async with asyncio.timeout(self._pace.standby_answer_s):
                answer = _decode(await reader.readline())
            process.was_standby = isinstance(answer, Taken)
        except (OSError, TimeoutError, msgspec.DecodeError):
            pass
        finally:
            writer.close()
            if not process.was_standby:  # also if the deployment ends meanwhile
                self._kill(process)
        if process.was_standby:
            return process
        self._events.add("standby.ended", pid=process.pid, why="it did not take the place of a child")
        return None

    def end(self) -> None:
        """End the standby process, if there is one."""
        if self._process is None:
            return
        process, writer = self._process, self._writer
        self._release()
        self._kill(process)
        if writer is not None:
            writer.close()

    async def close(self) -> None:
        """End the standby process, wait until it has ended, and close its log. Called after the end of `keep`."""
        self.end()
        for killed in self._killed:
            await killed.exited.wait()
        if self.kind is not None and (log := self._logs.get(self.kind.name)) is not None:
            log.close()

    async def _start(self, kind: ChildKind, spec: DeploymentSpec) -> None:
        if kind.name not in self._logs:
            self._logs[kind.name] = LogFile(Path(spec.log_dir) / f"{kind.name}.log", spec.logs)
        ours, theirs = socket.socketpair()
        self._environment = child_environment(spec)
        try:
            with theirs:
                arguments = (str(self._run.spec), *kind.arguments)
                process = await start_process(spec, kind.module, arguments, stdin=theirs.fileno())
        except OSError:
            ours.close()
            self._failures += 1
            return
        self._process = process
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._tasks = [
            asyncio.ensure_future(pump(process.output, self._logs[kind.name].write)),
            asyncio.ensure_future(self._await_ready(process, self._reader)),
        ]
        self._events.add("standby.spawned", pid=process.pid)

    async def _await_ready(self, process: LocalProcess, reader: asyncio.StreamReader) -> None:
        began = time.monotonic()
        with suppress(OSError, msgspec.DecodeError):
            if isinstance(_decode(await reader.readline()), Preloaded) and self._process is process:
                self.is_ready, self._failures = True, 0
                after_s = round(time.monotonic() - began, 2)
                self._events.add("standby.ready", pid=process.pid, after_s=after_s)

    def _note_end(self) -> None:
        assert self._process is not None
        self._failures += not self.is_ready
        process, writer = self._process, self._writer
        self._events.add("standby.ended", pid=process.pid, why=f"exit status {process.returncode}; its log has more")
        self._release()
        if writer is not None:
            writer.close()

    def _release(self) -> None:
        """Forget the process. What it has written and was not read yet goes to its next reader."""
        for task in self._tasks:
            task.cancel()
        self._process, self._reader, self._writer, self._tasks = None, None, None, []
        self.is_ready = False

    def _kill(self, process: LocalProcess) -> None:
        self._killed = [*(each for each in self._killed if not each.exited.is_set()), process]
        process.signal(signal.SIGKILL)


def _decode(line: bytes) -> Answer:
    answer: Answer = msgspec.json.decode(line, type=Answer)
    return answer
