"""A deployment of fake children, in this loop or under a supervisor process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from mstar_core.cluster.placer import Placer
from mstar_core.config.deployment import DeploymentSpec
from mstar_core.errors import ExitCode
from mstar_core.host.run_dir import RunDirectory
from mstar_core.messages.wire import WireCodec
from mstar_core.supervisor.child import ChildKind, Pace
from mstar_core.supervisor.hosts.hosts import RemoteLink
from mstar_core.supervisor.main import remote_access
from mstar_core.supervisor.supervisor import Supervisor
from mstar_core.transport import Courier, Mailbox, mailbox_endpoint
from mstarctl.client.log_dirs import new_log_dir
from mstarctl.start.launch import Started, launch
from tests.fakes.child import SCRIPTS, fake_kinds
from tests.fakes.one_rank import one_rank_spec
from tests.fakes.ports import free_port

MakeSpec = Callable[..., DeploymentSpec]
Launch = Callable[..., Started]
LIMIT_S = 90.0
QUICK = Pace(watch_s=0.1, backoff_s=(0.01,), stop_s=3.0, stacks_s=0.2)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a short folder for run directories. A test's own path is too long for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="mst-"))
    monkeypatch.setenv("MSTAR_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that scripts failures: `play(worker_0={"phase": "kv", "how": "exit"})`."""

    def set_scripts(**scripts: dict[str, Any]) -> None:
        named = {name.replace("_", "-"): script for name, script in scripts.items()}
        monkeypatch.setenv(SCRIPTS, json.dumps(named))

    set_scripts()
    return set_scripts


@pytest.fixture
def make_spec(runtime: Path) -> MakeSpec:
    """Return a spec with one rank on the CPU; keywords replace fields."""

    def make(name: str = "fake", **fields: Any) -> DeploymentSpec:
        return one_rank_spec(name, free_port(), **fields)

    return make


@pytest.fixture
def logged_spec(make_spec: MakeSpec) -> MakeSpec:
    """Return make_spec's result after creating the folders, as `up` does."""

    def make(name: str = "fake", **fields: Any) -> DeploymentSpec:
        spec = make_spec(name, **fields)
        RunDirectory.of(name).create()
        return msgspec.structs.replace(spec, log_dir=str(new_log_dir(name)))

    return make


@pytest.fixture
def start(make_spec: MakeSpec, play: Callable[..., None]) -> Iterator[Launch]:
    """Start a supervisor process with fake children. Its remaining processes are killed at the end."""
    running: list[Started] = []

    def begin(name: str = "fake", **fields: Any) -> Started:
        spec = make_spec(name, **fields)
        running.append(launch(spec, RunDirectory(Path(spec.run_dir)), "tests.fakes.supervisor"))
        return running[-1]

    yield begin
    for started in running:
        if not started.has_ended:
            os.kill(started.process.pid, signal.SIGKILL)
        started.process.wait(60)


@asynccontextmanager
async def running(
    spec: DeploymentSpec, pace: Pace = QUICK, standby: ChildKind | None = None, placer: Placer | None = None
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[ExitCode]]]:
    """Run the supervisor of `spec` until the end of the block. placer: if the plan has other hosts."""
    run, codec = RunDirectory.of(spec.name), WireCodec("supervisor", 0)
    run.spec.write_bytes(spec.encode())
    endpoint, loop = mailbox_endpoint(run.ipc, "supervisor", 0), asyncio.get_running_loop()
    access = remote_access(spec, run)
    with (
        zmq.Context() as context,
        Courier(context, codec, keys=access.keys if access else None) as courier,
        Mailbox(context, endpoint, codec, remote=access) as box,
    ):
        remote = None
        if access is not None and placer is not None:
            remote = RemoteLink(endpoint=box.remote_endpoint, keys=access.keys, placer=placer)
        supervisor = Supervisor(spec, run, courier, endpoint, fake_kinds, pace, standby=standby, remote=remote)
        box.on_break = supervisor.on_break
        box.attach(loop, supervisor.on_batch)
        task = asyncio.create_task(supervisor.run())
        try:
            yield supervisor, task
        finally:
            supervisor.stop(now=True)
            await asyncio.wait_for(task, LIMIT_S)
            box.detach()


async def event(supervisor: Supervisor, kind: str, count: int = 1, **facts: Any) -> dict[str, Any]:
    """Return the count-th event with this type and facts. Fails if it does not arrive."""

    async def wait() -> dict[str, Any]:
        while True:
            of_kind = (item for item in supervisor.events.ring if item["type"] == kind)
            found = [item for item in of_kind if facts.items() <= item.items()]
            if len(found) >= count:
                return found[count - 1]
            await supervisor.events.wait()

    return await asyncio.wait_for(wait(), LIMIT_S)
