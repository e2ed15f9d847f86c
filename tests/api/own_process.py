"""An api in a separate process, so that its CPU time is separate from that of clients and peers."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from mstar_core.api.main import ApiProcess, busy_poll_loop
from mstar_core.config.deployment import DeploymentSpec, Plan
from mstar_core.config.resolved import ApiConfig
from mstar_core.host.wait_spin import wait_spin_s
from mstar_core.plugin.spec import ModelSpec
from mstar_core.transport import Spin
from mstar_core.transport.fd_store import FdStore

PROBE_S: Final = 0.05
START_S: Final = 200
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


def spec_in(folder: str, model: ModelSpec, *, api: dict[str, Any] | None = None, **changes: Any) -> DeploymentSpec:
    """Return the spec of a deployment whose other processes are fakes."""
    spec = DeploymentSpec(
        name="fake",
        model=model.name,
        plugin="fake",
        run_dir=folder,
        log_dir=folder,
        plan=Plan(ranks=(), placements=()),
        api=ApiConfig(**{"host": "127.0.0.1", "port": 0, **(api or {})}),
        **changes,
    )
    spec.ipc_dir.mkdir(mode=0o700, exist_ok=True)
    spec.uploads.mkdir(mode=0o700, exist_ok=True)
    return spec


class OwnApi:
    """The process. It ends with the block of `own_api`."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.pid = int(process.pid)
        self.port = int(self._got(pipe))
        self._pipe = pipe

    @staticmethod
    def _got(pipe: Connection) -> Any:
        assert pipe.poll(START_S), "the api's process did not answer"
        return pipe.recv()

    def ask(self) -> dict[str, Any]:
        """Return what it holds, and the loop delays since the last call: seconds, without waits for a core."""
        self._pipe.send("ask")
        found: dict[str, Any] = self._got(self._pipe)
        return found

    async def ready(self) -> None:
        """Wait until the deployment is ready for the api."""
        assert await asyncio.to_thread(self._got, self._pipe) == "ready"

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds so far, all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * PAGE

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def _spec_path(spec: DeploymentSpec) -> Path:
    return Path(spec.run_dir) / "spec.json"


@asynccontextmanager
async def own_api(
    spec: DeploymentSpec, supervisor: str, module: str = "tests.fakes.speech_model", *, records: bool = False
) -> AsyncIterator[OwnApi]:
    """Run an api during the block, with the `SPEC` of a module. Its peers may start later.

    records: it records its responses, as beside a real supervisor, so that another api could go on with them.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    _spec_path(spec).write_bytes(spec.encode())
    store = FdStore()
    offered = socket.socket(fileno=store.offer()) if records else None
    process = context.Process(target=_run, args=(str(_spec_path(spec)), supervisor, module, theirs, offered))
    process.start()
    theirs.close()
    if offered is not None:
        offered.close()
    try:
        yield await asyncio.to_thread(OwnApi, process, ours)
        ours.send("stop")
        await asyncio.to_thread(process.join, 100)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        store.close()


def _run(path: str, supervisor: str, module: str, pipe: Connection, store: socket.socket | None) -> None:
    model: ModelSpec = importlib.import_module(module).SPEC
    spec = DeploymentSpec.load(Path(path))
    spin = Spin(wait_spin_s(spec))
    with asyncio.Runner(loop_factory=partial(busy_poll_loop, spin)) as runner:
        runner.run(_serve(ApiProcess(spec, 0, supervisor, model, spin=spin, store=store), pipe))


async def _serve(process: ApiProcess, pipe: Connection) -> None:
    lags: list[float] = []
    stopped = asyncio.Event()

    def asked() -> None:
        if pipe.recv() == "stop":
            stopped.set()
            return
        held = {
            "requests": len(process.registry),
            "output_queues": len(process.link.output_queues),
            "loans": process.link.loans,
        }
        uploads = len(os.listdir(process.spec.uploads))
        pipe.send({**held, "uploads": uploads, "tasks": len(asyncio.all_tasks()), "lags_s": list(lags)})
        lags.clear()

    process.link.on_ready = lambda: pipe.send("ready")
    await process.start()
    probe = asyncio.create_task(_probe(lags))
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked)
    pipe.send(process.port)
    await stopped.wait()
    probe.cancel()
    asyncio.get_running_loop().remove_reader(pipe.fileno())
    await process.close()


async def _probe(lags: list[float]) -> None:
    """Measure how late a sleeping task resumes, minus the time in which the thread waited for a core."""
    while True:
        before, waited = time.monotonic(), run_delay_s()
        await asyncio.sleep(PROBE_S)
        lags.append(max(0.0, time.monotonic() - before - PROBE_S - (run_delay_s() - waited)))


def run_delay_s() -> float:
    """Return the seconds this thread was runnable without a core, since its start. Source: Linux, schedstat."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
