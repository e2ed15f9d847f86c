"""Deployment of real processes for tests: started, observed by files and sockets, stopped, checked for leaks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx

from mstar_core.config.deployment import DeploymentSpec, NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import ApiConfig, KVCacheConfig
from mstar_core.host.run_dir import RunDirectory
from tests.fakes.commands import output_of
from tests.fakes.ports import free_port
from tests.fakes.tls import NO_AUTHORITIES

REPO: Final = Path(__file__).resolve().parents[2]
START_S: Final = 90.0
END_S: Final = 60.0
"""Time limits of waits. They are generous, because a busy machine may be slow."""

PATIENT_S: Final = 120.0
"""hang_s of deployments whose processes a test suspends."""

RECONCILE_S: Final = 0.5
"""Interval in which processes compare their requests; any that one of them had to close counts as a leak."""

TURN_S: Final = 0.01
STANDBY: Final = "standby"
LLM, SNAC = "LLM", "snac_decoder"
LEAK_VALUES: Final = (
    ".pages_used",
    ".slots_used",
    ".requests",
    ".shm_live",
    ".shm_bytes",
    ".peer_live",
    ".ready",
    ".waiting",
    ".in_flight",
    ".leftovers",
)
"""Suffixes of telemetry values that are zero without requests."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model and its test settings. nodes: all nodes, for one rank. settings: fields of DeploymentSpec.

    package: the end of its package's name, by default that of the plugin.
    """

    model: str
    plugin: str
    nodes: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""

    @property
    def source(self) -> Path:
        """Return the folder of the plugin's package."""
        return REPO / "plugins" / f"mstar-{self.package or self.plugin}" / "src"

    @property
    def one_rank(self) -> Plan:
        """Every node on one rank of the CPU."""
        return plan({0: self.nodes})


ORPHEUS: Final = Served(
    model="orpheus",
    plugin="orpheus",
    nodes=(LLM, SNAC),
    settings={"max_seq_len": 2048, "kv_cache": KVCacheConfig(pages=1024)},
)


def until(ask: Callable[[], T | None], what: str, limit_s: float = START_S) -> T:
    """Return the first true result of `ask`. Fails the test after `limit_s`."""
    end = time.monotonic() + limit_s
    while True:
        found = ask()
        if found:
            return found
        assert time.monotonic() < end, f"{what} did not come within {limit_s:g} s"
        time.sleep(TURN_S)


def one_rank() -> Plan:
    """Plan both nodes of the speech model on one rank."""
    return ORPHEUS.one_rank


def plan(ranks: dict[int, Sequence[str]]) -> Plan:
    """Plan nodes by rank; a node on several ranks has a replica on each."""
    nodes = dict.fromkeys(node for names in ranks.values() for node in names)
    return Plan(
        ranks=tuple(RankPlan(rank=rank, device="cpu", nodes=tuple(names)) for rank, names in ranks.items()),
        placements=tuple(
            NodePlacement(node=node, replicas=tuple((rank,) for rank, names in ranks.items() if node in names))
            for node in nodes
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of a deployment, from /proc."""

    pid: int
    command: str
    state: str
    parent: int


class Deployment:
    """A deployment with a separate runtime folder. Entering starts it and waits for ready, leaving stops everything.

    served: the model with its default settings. folder: a checkpoint; None is the miniature. name: by default the
    model's. changes: fields of DeploymentSpec; api: fields of ApiConfig.
    """

    def __init__(
        self,
        *,
        served: Served = ORPHEUS,
        name: str | None = None,
        folder: Path | None = None,
        where: Plan | None = None,
        root: Path | None = None,
        api: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.served = served
        self.name = name or served.model
        self.port = free_port()
        self.root = root or Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))
        self.process: subprocess.Popen[bytes] | None = None
        self.log_dir = self.root / ".state"
        self.started_s = 0.0
        self.ready_s = 0.0
        self.at_ready: dict[str, Any] = {}
        self._owns_root = root is None
        self._folder = folder
        self._plan = where or served.one_rank
        self._changes = changes
        self._api = {"host": "127.0.0.1", "port": self.port, **(api or {})}
        self.port = int(self._api["port"])

    # -- life ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.root / self.name)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *, makes_directory: bool = True, entry: Sequence[str] = ("-m", "mstar_core.supervisor")) -> None:
        """Write the spec and start the supervisor without waiting. entry: Python's arguments before the spec."""
        self.log_dir = self.root / ".state" / self.name / f"{time.time_ns()}"
        self.log_dir.mkdir(parents=True)
        if makes_directory:
            self.run.create()
        path = self.log_dir / "spec.json"
        path.write_bytes(self.spec().encode())
        self.started_s = time.monotonic()
        with (self.log_dir / "supervisor.err").open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *entry, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                cwd="/",
                env=self.environment(),
            )

    def spec(self) -> DeploymentSpec:
        """Return the spec for the supervisor."""
        settings: dict[str, Any] = {
            **self.served.settings,
            "model": self.served.model,
            "plugin": self.served.plugin,
            "weights_source": "folder" if self._folder is not None else "tiny",
            "cache_dir": str(cache_dir()),
            "reconcile_s": RECONCILE_S,
        }
        return DeploymentSpec(
            **{
                **settings,
                "name": self.name,
                "run_dir": str(self.run.path),
                "log_dir": str(self.log_dir),
                "plan": self._plan,
                "folder": str(self._folder) if self._folder is not None else None,
                "api": ApiConfig(**self._api),
                **self._changes,
            }
        )

    def environment(self) -> dict[str, str]:
        """Return the supervisor's environment. Its runtime folder marks every process of this deployment.

        Packages that this process found by PYTHONPATH are found there too.
        """
        dropped = ("MSTAR", "XDG", "PYTEST", "COV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        paths = os.pathsep.join(filter(None, (str(REPO), str(self.served.source), os.environ.get("PYTHONPATH"))))
        return {**kept, "MSTAR_RUNTIME_DIR": str(self.root), "PYTHONPATH": paths}

    def wait_ready(self, limit_s: float = START_S) -> None:
        """Wait until every process is ready. Fails with the cause if the start fails."""
        until(lambda: self.has_ended or self.has_event("deployment.ready"), "ready", limit_s)
        assert not self.has_ended, f"the start failed: {self.outcome().get('cause') or self.last_words()}"
        self.ready_s = time.monotonic() - self.started_s
        self.at_ready = self.snapshot()

    def wait_again_ready(self, restarts: int, limit_s: float = START_S) -> dict[str, Any]:
        """Wait for `restarts` restarts and for every process to be ready again, and return the snapshot."""

        def look() -> dict[str, Any] | None:
            head = self.admin("/v1")
            return head if head["restarts"] >= restarts and head["state"] == "ready" else None

        until(look, f"ready after {restarts} restarts", limit_s)
        return self.snapshot()

    def stop(self, limit_s: float = END_S) -> int:
        """Send SIGTERM and return the exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait_ended(limit_s)

    def wait_ended(self, limit_s: float = END_S) -> int:
        """Wait for the supervisor's end and return its exit status."""
        assert self.process is not None
        return self.process.wait(limit_s)

    def end(self) -> None:
        """Kill the remaining processes and remove the files. May be called at any time and repeatedly."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        for process in self.processes():
            self.kill(process.pid)
        if self._owns_root:
            shutil.rmtree(self.root, ignore_errors=True)

    # -- what it tells ------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def admin(self, path: str, method: str = "GET", body: Mapping[str, Any] | None = None) -> Any:
        """Return a response of the admin socket."""
        return self._asked(path, method, body).json()

    def admin_text(self, path: str) -> str:
        """Return a response of the admin socket as text."""
        return self._asked(path, "GET").text

    def _asked(self, path: str, method: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        # Without `verify`, each client would read the certificates of all authorities: 17 ms, and tests poll.
        transport = httpx.HTTPTransport(uds=str(self.run.admin_socket), verify=NO_AUTHORITIES)
        with httpx.Client(transport=transport, timeout=END_S) as client:
            answer = client.request(method, f"http://admin{path}", json=body)
            answer.raise_for_status()
            return answer

    def snapshot(self) -> dict[str, Any]:
        """Return the supervisor's snapshot."""
        found: dict[str, Any] = self.admin("/v1/snapshot")
        return found

    def value(self, name: str) -> float:
        """Return one telemetry value; 0 if no process has sent it."""
        return float(self.snapshot()["values"].get(name, 0.0))

    def shown(self, *words: str) -> str:
        """Return what a command of mstarctl prints. If it fails, its errors and those of all starts' logs are shown."""
        try:
            return output_of([sys.executable, "-m", "mstarctl", *words], env=self.environment())
        except AssertionError as error:
            for complaint in self.all_complaints():
                error.add_note(complaint)
            raise

    def pids(self) -> dict[str, int]:
        """Return the process ids of the supervisor and its running children, by name."""
        assert self.process is not None
        children = {child["name"]: child["pid"] for child in self.admin("/v1/children") if child["state"] != "ended"}
        return {"supervisor": self.process.pid, **children}

    def events(self) -> list[dict[str, Any]]:
        """Return the life-cycle events so far; also possible after the end."""
        try:
            text = (self.log_dir / "events.ndjson").read_text()
        except FileNotFoundError:
            return []
        *lines, _ = text.split("\n")  # behind the last line's end may stand one that is being written
        return [json.loads(line) for line in lines]

    def has_event(self, kind: str, **facts: Any) -> bool:
        """Return whether an event of this type with these facts has been written."""
        return any(
            event["type"] == kind and all(event.get(name) == value for name, value in facts.items())
            for event in self.events()
        )

    def wait_event(self, kind: str, limit_s: float = START_S, **facts: Any) -> None:
        """Wait for an event of this type with these facts."""
        until(lambda: self.has_event(kind, **facts), f"event {kind} {facts}", limit_s)

    def outcome(self) -> dict[str, Any]:
        """Return the outcome as `ps` shows it; empty before the end."""
        try:
            found: dict[str, Any] = json.loads((self.log_dir / "outcome.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def last_words(self) -> str:
        """Return the supervisor's standard error; empty if all went well."""
        return (self.log_dir / "supervisor.err").read_text()[-2000:]

    def complaints(self) -> list[str]:
        """Return the log lines with an error, and all text in logs that is not a log line."""
        return [line for path in self.log_dir.glob("*.log") for line in complaints_of(path)]

    def all_complaints(self) -> list[str]:
        """Return the complaints of every start in the runtime folder, also of deployments that replaced this one."""
        paths = sorted(path for suffix in ("log", "err") for path in self.root.glob(f".state/*/*/*.{suffix}"))
        return [f"{path.name}: {line}" for path in paths for line in complaints_of(path)]

    def processes(self) -> list[Process]:
        """Return every live process that this deployment started, orphans included."""
        mark = f"MSTAR_RUNTIME_DIR={self.root}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                process = read_process(int(entry.name), mark)
                if process is not None:
                    found.append(process)
        return found

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Suspend a process during the block. hang_s must be longer than the block."""
        pid = self.pids()[name]
        self.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            self.kill(pid, signal.SIGCONT)

    @staticmethod
    def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process, which may have ended."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return

    # -- the probe ----------------------------------------------------------------------------------------------

    def leaks(self) -> dict[str, float]:
        """Return the resources still held without requests, by name; empty if all were freed."""
        values: dict[str, float] = self.snapshot()["values"]
        held = {name: value for name, value in values.items() if name.endswith(LEAK_VALUES) and value}
        held |= {name: value for name, value in values.items() if name.startswith("conductor.load.") and value}
        held |= {f"upload {path.name}": 1.0 for path in self.run.uploads.iterdir()}
        held |= {f"/dev/shm/{path.name}": 1.0 for path in Path("/dev/shm").glob(f"*{self.root.name}*")}
        return held

    def strangers(self) -> list[Process]:
        """Return the processes that are neither the supervisor, nor its children, nor their children."""
        known = set(self.pids().values())
        return [each for each in self.processes() if each.pid not in known and each.parent not in known]

    def assert_clean(self, limit_s: float = END_S) -> None:
        """Check that no resource is held and no extra process runs, after waiting for the children's last telemetry.

        The standby process may run or not: it starts seconds after the deployment is ready.
        """
        end = time.monotonic() + limit_s
        expected, held, strangers = set(self.at_ready["children"]) - {STANDBY}, {}, list[Process]()
        while time.monotonic() < end:
            held, strangers = self.leaks(), self.strangers()
            if not held and not strangers and self.pids().keys() - {STANDBY} == expected:
                break
            time.sleep(TURN_S * 5)  # telemetry is sent ten times a second
        assert (held, strangers) == ({}, [])
        assert self.pids().keys() - {STANDBY} == expected

    def assert_gone(self) -> None:
        """Check after the end that no process and no run directory are left."""
        until(lambda: not self.processes(), "the end of every process", END_S)
        assert not self.run.path.exists()
        assert [p.name for p in self.root.iterdir() if p.name.startswith(f".{self.name}.ended")] == []


def complaints_of(path: Path) -> list[str]:
    """Return the lines of a log with an error, and all text that is not a log line."""
    lines = path.read_text(errors="replace").splitlines()
    return [line for line in lines if not line.startswith("{") or '"level":"ERROR"' in line.replace('": "', '":"')]


def read_process(pid: int, mark: bytes) -> Process | None:
    """Return the process if it is alive and has the mark in its environment."""
    base = Path("/proc") / str(pid)
    try:
        if mark not in (base / "environ").read_bytes().split(b"\0"):
            return None
        state, parent = (base / "stat").read_text().rpartition(")")[2].split()[:2]
        command = (base / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else Process(pid=pid, command=command, state=state, parent=int(parent))


def cache_dir() -> Path:
    """Return the folder of the miniature checkpoint, which is kept between tests."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mstar"
