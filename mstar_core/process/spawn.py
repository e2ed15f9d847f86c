"""Start and end of child processes on this host. Used by the supervisor, and by agents on other hosts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from mstar_core.config.deployment import DeploymentSpec
from mstar_core.host.cache_dir import TRITON_CACHE, bytecode_environment, triton_cache
from mstar_core.host.leftovers import ENTRY
from mstar_core.host.readings.processes import is_suspended, main_thread_s
from mstar_core.process.failures import read_fatal

LINE_LIMIT: Final = 1 << 20
"""Bytes of output that are kept as one line."""

DRAIN_LOG_S: Final = 1.0
"""Time to read the rest of a dead child's output."""

PARENT_PATH: Final = os.pathsep.join(p for p in sys.path if p)


class ChildProtocol(asyncio.subprocess.SubprocessStreamProtocol):
    """Reports the exit at once. asyncio's own wait also waits for other processes that hold the output pipe open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=LINE_LIMIT, loop=loop)
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class LocalProcess:
    """A child of this process. exited: set at its end. was_standby: it was started as a standby process.

    fatal_path: file to which it writes the record of a fatal error, None if it writes none.
    """

    def __init__(self, process: asyncio.subprocess.Process, exited: asyncio.Event) -> None:
        self.exited = exited
        self.was_standby = False
        self.fatal_path: Path | None = None
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal, None while it runs."""
        return self._process.returncode

    @property
    def output(self) -> asyncio.StreamReader:
        """Its standard output and error."""
        assert self._process.stdout is not None
        return self._process.stdout

    async def watch(self, write: Callable[[bytes], None]) -> int:
        """Pass its output on by lines; return the exit status once the process and its group have ended."""
        pumping = asyncio.ensure_future(pump(self.output, write))
        try:
            await self.exited.wait()
            self.signal(signal.SIGKILL)  # grandchildren are useless without it, and hold the pipe open
            await asyncio.wait((pumping,), timeout=DRAIN_LOG_S)
        finally:
            pumping.cancel()
        return self.returncode or 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, if it still exists."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def fatal(self) -> dict[str, Any] | None:
        """Return the record of the error that ended it, if it wrote one."""
        return None if self.fatal_path is None else read_fatal(self.fatal_path, self.pid)

    def computed_s(self) -> float | None:
        """Return the CPU seconds of its main thread, None if they are unknown."""
        return main_thread_s(self.pid)

    def is_suspended(self) -> bool:
        """Return whether it is stopped by a signal or a debugger."""
        return is_suspended(self.pid)


async def start_process(
    spec: DeploymentSpec,
    module: str,
    arguments: Sequence[str],
    stdin: int = asyncio.subprocess.DEVNULL,
    inherited: tuple[int, ...] = (),
) -> LocalProcess:
    """Start a module as a child of this process, in a group of its own. Raises OSError if no process can be created."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: ChildProtocol(loop),
        *(sys.executable, "-m", ENTRY, str(os.getpid()), module, *arguments),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        pass_fds=inherited,
        env=child_environment(spec),
        cwd="/",
    )
    return LocalProcess(asyncio.subprocess.Process(transport, protocol, loop), protocol.exited)


def child_environment(spec: DeploymentSpec) -> dict[str, str]:
    """Return the environment of children: one compute thread each, our modules on the path, unbuffered output.

    Triton caches compiled kernels in the deployment's cache folder, unless TRITON_CACHE_DIR names another, and so does
    Python its bytecode, if it keeps none elsewhere.
    """
    on_cpu = all(r.device == "cpu" for r in spec.plan.ranks if r.host == spec.on_host)
    kernels = {} if on_cpu else {TRITON_CACHE: str(triton_cache(spec.cache_dir))}
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # further threads spin between the small copies of a GPU worker, on up to 11 cores
        "MKL_NUM_THREADS": "1",
        **kernels,
        **bytecode_environment(spec.cache_dir),
        "PYTHONPATH": PARENT_PATH,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


async def pump(reader: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
    """Pass a child's output on by lines until the child ends. Lines over the limit are split."""
    while True:
        try:
            line = await reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as end:
            if end.partial:
                write(end.partial)
            return
        except asyncio.LimitOverrunError as long:
            line = await reader.readexactly(min(long.consumed or LINE_LIMIT, LINE_LIMIT))
        write(line)
