"""An admin server on the test's loop, with a real hub and state publisher and a fake deployment that records calls."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from mstar_core.admin.access import bind_admin
from mstar_core.admin.server import AdminServer
from mstar_core.admin.streams import NdjsonStreams
from mstar_core.config.deployment import DeploymentSpec, NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import ApiConfig, IceServer
from mstar_core.config.scaling import FreeDevice
from mstar_core.errors import NotFound, StateConflict
from mstar_core.host.readings.gpus import GpuReader
from mstar_core.host.run_dir import RunDirectory
from mstar_core.messages.life import Telemetry
from mstar_core.messages.telemetry import RequestNews, Span
from mstar_core.observe.hub import TelemetryHub
from mstar_core.supervisor.child import DEFAULT_PACE
from mstar_core.supervisor.events import Events
from mstar_core.supervisor.hosts.hosts import OtherHosts
from mstar_core.supervisor.operations.operation import Operation
from mstar_core.supervisor.operations.sleep import RankAsleep, Sleeping, busy_error
from mstar_core.supervisor.standby import Standby
from mstar_core.supervisor.telemetry.state_publisher import StatePublisher
from tests.fakes.tls import NO_AUTHORITIES


class FakeLog:
    """A log that the test writes."""

    def __init__(self) -> None:
        self.tail: deque[str] = deque(maxlen=200)
        self.lines = 0
        self.listeners: set[Any] = set()

    def say(self, text: str) -> None:
        self.tail.append(text)
        self.lines += 1
        for listener in self.listeners:
            listener.set()


@dataclass
class FakeCordons:
    """Cordoned ranks, all without requests."""

    idle: frozenset[int] = frozenset()


class FakeOperations:
    """Cordons and one rolling restart. Rank 0 is the only one."""

    def __init__(self) -> None:
        self.cordons = FakeCordons()
        self.latest: Operation | None = None

    def cordon(self, rank: int) -> dict[str, list[int]]:
        if rank:
            raise NotFound(f"no rank {rank}")
        self.cordons.idle |= {rank}
        return {"ranks": [rank], "cordoned": sorted(self.cordons.idle)}

    def uncordon(self, rank: int) -> dict[str, list[int]]:
        self.cordons.idle -= {rank}
        return {"ranks": [rank], "cordoned": sorted(self.cordons.idle)}

    def scale(self, replicas: int, free: list[FreeDevice]) -> dict[str, Any]:
        self.latest = Operation(number=1, kind="change of scale", step=f"{replicas} on {[each.name for each in free]}")
        return self.latest.facts()

    def set_values(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"values": {key: {"value": value, "before": None} for key, value in values.items()}}

    def restart(self) -> dict[str, Any]:
        if self.latest is not None:
            raise StateConflict("a rolling restart is in progress")
        self.latest = Operation(number=1, kind="rolling restart", total=3)
        return self.latest.facts()


class FakeAdapters:
    """Names of loaded LoRA adapters by their folder."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        return {"items": [{"name": name, "folder": folder} for name, folder in self.folders.items()], "room": 2}

    def load(self, name: str, folder: str, rank: int = 0, base: str = "") -> dict[str, Any]:
        self.folders[name] = folder
        return Operation(number=1, kind=f"load of adapter {name}", step=f"rank {rank} of {base}").facts()

    def unload(self, name: str) -> dict[str, Any]:
        if name not in self.folders:
            raise NotFound(f"no adapter {name!r} is loaded")
        del self.folders[name]
        return Operation(number=2, kind=f"unload of adapter {name}").facts()


class FakeSleeping(Sleeping):
    """The sleep of rank 0, which begins and ends at once. A request that runs refuses it."""

    is_busy = False

    def sleep(self, level: int = 1, nodes: Sequence[str] = (), *, is_waiting: bool = False) -> dict[str, Any]:
        self.is_busy = bool(self._deployment.running_requests()) and not is_waiting
        self.is_whole, self.level = not nodes, level
        self.ranks["worker-0"] = RankAsleep(dict.fromkeys(nodes or ("LLM",), level), freed=300, kept=200)
        return Operation(number=1, kind="sleep").facts()

    def wake(self, nodes: Sequence[str] = ()) -> dict[str, Any]:
        self.check_nodes(nodes)
        self.ranks.clear()
        self.is_whole = False
        return Operation(number=2, kind="wake").facts()

    async def refused(self, operation: Mapping[str, Any]) -> None:
        if self.is_busy:
            raise busy_error(self._deployment.running_requests())


class FakeDeployment:
    """A fake supervisor for the admin server. acts: the recorded calls."""

    def __init__(self, folder: Path) -> None:
        self.spec = DeploymentSpec(
            name="fake",
            model="orpheus",
            plugin="orpheus",
            run_dir=str(folder),
            log_dir=str(folder),
            plan=Plan(
                ranks=(RankPlan(rank=0, device="cpu", nodes=("LLM",)),),
                placements=(NodePlacement(node="LLM", replicas=((0,),)),),
            ),
            api=ApiConfig(
                host="127.0.0.1",
                port=1,
                api_keys=("secret-key",),
                realtime_ice_servers=(IceServer(urls=("turn:turn.example.org",), secret_file="/turn"),),
                ice_secrets=("turn-secret",),
            ),
            argv=("up", "orpheus", "--api-key", "secret-key"),
            provenance={"max_queue": "file.yaml:3"},
        )
        self.state, self.reason = "ready", ""
        self.started, self.started_at = time.monotonic(), time.time()
        self.ready_s: float | None = 1.5
        self.restarts = 0
        self.operations = FakeOperations()
        self.adapters = FakeAdapters()
        self.sleep = FakeSleeping(cast("Any", self), cast("Any", self.operations), lambda child, message: None)
        self.running: list[str] = []
        self.phases_s = {"spawn": 0.5}
        self.cause: dict[str, Any] | None = None
        self.failures: list[dict[str, Any]] = []
        self.values: dict[str, float] = {"worker-0.LLM.pages_total": 64.0, "worker-0.LLM.pages_used": 3.0}
        self.is_drained = False
        self.acts: list[Any] = []
        self.children: dict[str, Any] = {name: _child(name) for name in ("conductor", "worker-0", "api")}
        self.logs: dict[str, Any] = {name: child.log for name, child in self.children.items()}
        self.logs["supervisor"] = FakeLog()
        self.hub = TelemetryHub("boot-1", "fake")
        self.publisher = StatePublisher(self, self.hub, GpuReader(None))
        self.events = Events(None, self.publisher.event)
        self.hosts = OtherHosts(self, cast("Any", None), DEFAULT_PACE, None, start=lambda work: None)
        self.standby = Standby(None, RunDirectory(folder), self.events, DEFAULT_PACE, self.logs)

    def running_requests(self) -> list[str]:
        return self.running

    @property
    def cordoned(self) -> frozenset[int]:
        return self.operations.cordons.idle

    def respecify(self, spec: DeploymentSpec) -> None:
        self.spec = spec

    async def prepare_host(self, host: str) -> None:
        self.acts.append(("prepare", host))

    def stop(self, *, now: bool = False, reason: str = "", grace_s: float | None = None) -> None:
        self.acts.append(("stop", now, grace_s))

    def drain(self, reason: str = "") -> None:
        self.acts.append("drain")
        self.state = "draining"

    def resume(self) -> None:
        self.acts.append("resume")

    def ask_restart(self) -> None:
        self.acts.append("restart")

    def cancel(self, handle: int) -> None:
        self.acts.append(("cancel", handle))

    def log_level(self, level: str, names: Iterable[str] = ()) -> list[str]:
        self.acts.append(("log_level", level, list(names)))
        return list(names)

    def tell(self, child: str, news: Iterable[RequestNews] = (), spans: Iterable[Span] = ()) -> None:
        """Deliver one telemetry batch of a child."""
        self.publisher.take(child, Telemetry(name=child, incarnation=1, requests=list(news), spans=list(spans)))
        self.publisher.refresh(now_all=True)

    def request(self, handle: int, **fields: Any) -> None:
        """Deliver the api's report of a running request."""
        given = {
            "id": f"r-{handle}",
            "route": "/generate",
            "state": "run",
            "started": self.hub.now(),
            "inputs": ["text"],
            "outputs": ["audio"],
            **fields,
        }
        self.tell("api", [RequestNews(handle=handle, **given)])


def _child(name: str) -> Any:
    return SimpleNamespace(
        name=name,
        state="ready",
        pid=None,
        host="",
        incarnation=1,
        phase="ready",
        phase_done=0,
        phase_total=0,
        detail="",
        facts={},
        phases_s={"spawn": 0.5},
        is_running=True,
        log=FakeLog(),
    )


class Admin:
    """The server under test. client: HTTP to it. path: of its socket."""

    def __init__(self, deployment: FakeDeployment, client: httpx.AsyncClient, path: Path) -> None:
        self.deployment = deployment
        self.client = client
        self.path = path

    async def get(self, path: str, status: int = 200) -> Any:
        answer = await self.client.get(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def post(self, path: str, status: int = 202, **more: Any) -> Any:
        answer = await self.client.post(path, **more)
        assert answer.status_code == status, answer.text
        return answer.json()


Serving = Callable[..., AbstractAsyncContextManager[Admin]]


@asynccontextmanager
async def serving(*, blocked_s: float = 30.0, gid: int | None = None) -> AsyncIterator[Admin]:
    """Run a server on its own socket until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="mst-admin-"))
    path = folder / "admin.sock"
    deployment = FakeDeployment(folder)
    server = AdminServer(deployment, bind_admin(path, gid), gid, NdjsonStreams(blocked_s))
    await server.start()
    try:
        transport = httpx.AsyncHTTPTransport(uds=str(path), verify=NO_AUTHORITIES)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", timeout=60) as client:
            yield Admin(deployment, client, path)
    finally:
        await server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def started() -> Serving:
    """Return a factory of admin servers."""
    return serving


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    """Run an admin server."""
    async with serving() as made:
        yield made


@pytest.fixture
def runtime_folder() -> Any:
    """Make a folder with a short path for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="mst-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
