"""Measured deployment: started with `mstarctl up`, observed through its admin socket and /proc, then stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from bench.serving.figures import ROOT, smi

NAME: Final = "bench"
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
HELD: Final = (".pages_used", ".slots_used", ".requests", ".shm_live", ".shm_bytes", ".ready", ".waiting", ".in_flight")
"""Suffixes of telemetry values that are zero without requests. Pages of the prefix cache are counted separately."""

CAPTURES: Final = (".graphs_captured",)
PLANNED: Final = ".graphs_planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Deployment to start. settings: KEY=VALUE as for `mstarctl up --set`; the last value of a key wins.

    model: `orpheus` with a checkpoint folder, or `orpheus:tiny`. root: an empty folder for run directory and logs.
    tree: the sources to run; they come first on the path of every process. shares_gpu: another deployment may use the
    same GPU, despite the GPU locks. config: a deployment file; by default the model's own. environment: variables of
    the commands, beside those of this process. name: of the deployment. ray: address of the cluster whose hosts run the
    ranks, instead of a device. inside: words before each command, which select where it runs.
    """

    model: str
    device: str
    port: int
    root: Path
    weights: Path | None = None
    settings: tuple[str, ...] = ()
    tree: Path = ROOT
    shares_gpu: bool = False
    config: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = NAME
    ray: str = ""
    inside: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Return the command line that starts the deployment and returns when it is ready."""
        weights = ["--weights", str(self.weights)] if self.weights is not None else []
        settings = [word for setting in self.settings for word in ("--set", setting)]
        if self.config is not None:
            settings = ["--config", str(self.config), *settings]
        return [
            *self.inside,
            sys.executable,
            "-m",
            "mstarctl",
            "up",
            self.model,
            *weights,
            "--name",
            self.name,
            *(("--ray", self.ray) if self.ray else ("--device", self.device)),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            *settings,
            "-d",
        ]


@dataclass(slots=True)
class Served:
    """A running deployment. Entering starts it, leaving stops it. ready_s: seconds of `up` by the caller's clock."""

    plan: Plan
    ready_s: float = 0.0
    pids: dict[str, int] = field(default_factory=dict)
    _client: httpx.Client | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # A terminated measurement stops its deployment, which would otherwise keep the device.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        start = time.monotonic()
        code = subprocess.run(self.plan.command(), env=self.environment(), cwd=self.plan.tree, check=False).returncode
        self.ready_s = time.monotonic() - start
        if code != 0:
            self.end()
            raise RuntimeError(f"the deployment did not start: exit {code}\n{self.last_words()}")
        socket = self.plan.root / self.plan.name / "admin.sock"
        self._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(socket), verify=False), timeout=60)
        head = self.snapshot()
        self.pids = {name: child["pid"] for name, child in head["children"].items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            print(self.last_words(), file=sys.stderr, flush=True)
        self.end()

    def end(self) -> None:
        """Stop the deployment and its running requests."""
        if self._client is not None:
            self._client.close()
        down = [*self.plan.inside, sys.executable, "-m", "mstarctl", "down", "--all", "--now"]
        subprocess.run(
            down, env=self.environment(), cwd=self.plan.tree, check=False, timeout=120, stdout=subprocess.DEVNULL
        )

    def environment(self) -> dict[str, str]:
        """Return the environment of its commands: this run's folder, and the sources first on the path."""
        found = {**os.environ, **self.plan.environment, "MSTAR_RUNTIME_DIR": str(self.plan.root)}
        if self.plan.shares_gpu:
            found["MSTAR_GPU_LOCK_DIR"] = str(self.plan.root / "locks")
        if (tree := self.plan.tree) != ROOT:
            paths = [tree, *sorted(tree.glob("plugins/*/src"))]
            found["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
        return found

    def last_words(self, size: int = 2500) -> str:
        """Return the end of every log, for error reports."""
        logs = sorted((self.plan.root / ".state").rglob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-size:]}" for path in logs)

    @contextmanager
    def telling(self, size: int = 8000) -> Iterator[None]:
        """Add the end of every log to errors of the block. The logs are removed after the run."""
        try:
            yield
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}\n{self.last_words(size)}") from error

    def snapshot(self) -> dict[str, Any]:
        """Return the supervisor's snapshot."""
        found: dict[str, Any] = self.admin("/v1/snapshot")
        return found

    def admin(self, path: str) -> Any:
        """Return a response of the admin socket."""
        assert self._client is not None
        return self._client.get(f"http://admin{path}").raise_for_status().json()

    def mstarctl(self, *words: str, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run a command about this run's deployments and return how it ended, with its output."""
        command = [*self.plan.inside, sys.executable, "-m", "mstarctl", *words]
        return subprocess.run(
            command,
            env=self.environment(),
            cwd=self.plan.tree,
            check=False,
            timeout=limit_s,
            capture_output=True,
            text=True,
        )

    def last_trace(self, sort: str = "-ended") -> list[str]:
        """Return where the time of the newest ended request went: a line for each place, node, walk and kind.

        sort: `ended` takes the oldest request that is kept.
        """
        assert self._client is not None
        newest = self._client.get(f"http://admin/v1/requests?limit=1&sort={sort}").json()["items"][0]
        answer = self._client.get(f"http://admin/v1/requests/{newest['id']}/trace?handle={newest['handle']}")
        times = f"TTFT {newest['ttft_ms']}, TTFA {newest['ttfa_ms']}, whole {1000 * newest['age_s']:.1f}"
        return [times] + [
            f"{each['process']} {each['node']} {each['walk']} {each['kind']}: {each['start_ms']:.1f} to "
            f"{each['end_ms']:.1f}, busy {each['busy_ms']:.1f} in {each['count']}"
            for each in answer.json()["sums"]
        ]

    def first_tokens_ms(self, count: int) -> list[float]:
        """Return the times to the first token of the requests that ended last, in ascending order."""
        assert self._client is not None
        rows = self._client.get(f"http://admin/v1/requests?limit={count}&sort=-ended").raise_for_status().json()
        return sorted(float(row["ttft_ms"]) for row in rows["items"] if row["ttft_ms"] is not None)

    def values(self) -> dict[str, float]:
        """Return the telemetry of each process's last report, at most a tenth of a second old."""
        return {name: float(value) for name, value in self.snapshot()["values"].items()}

    def fresh_values(self, limit_s: float = 10.0) -> dict[str, float]:
        """Return the telemetry right after a worker's report. An idle worker reports once a second, so sums may lag."""
        before, end = _of_workers(self.values()), time.monotonic() + limit_s
        while _of_workers(now := self.values()) == before and time.monotonic() < end:
            time.sleep(0.02)
        return now

    def traces(self, count: int) -> list[dict[str, Any]]:
        """Return the time breakdown of the newest finished requests, at most `count`."""
        assert self._client is not None
        rows = self._client.get("http://admin/v1/requests").raise_for_status().json()["items"]
        ended = sorted((row for row in rows if row["state"] == "finished"), key=lambda row: row["ended"])
        found = []
        for row in ended[-count:]:
            answer = self._client.get(f"http://admin/v1/requests/{row['id']}/trace")
            answer.raise_for_status()
            found.append(answer.json())
        return found

    def metrics(self) -> dict[str, float]:
        """Return the api's counters, by series with labels."""
        text = httpx.get(f"http://127.0.0.1:{self.plan.port}/metrics", timeout=60).text
        lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds so far by process; child processes count as `NAME children`."""
        found = {name: process_cpu_s(pid) for name, pid in self.pids.items()}
        owners = {pid: name for name, pid in self.pids.items()}
        for pid, parent in parents().items():
            if parent in owners and pid not in owners:
                name = f"{owners[parent]} children"
                found[name] = found.get(name, 0.0) + process_cpu_s(pid)
        return found

    def resident_bytes(self) -> dict[str, float]:
        """Return the resident bytes by process, and the high-water mark of each."""
        found: dict[str, float] = {}
        for name, pid in self.pids.items():
            found[name] = _status_bytes(pid, "VmRSS")
            found[f"{name} most"] = _status_bytes(pid, "VmHWM")
        return found

    def held(self) -> dict[str, float]:
        """Return resources still held when no request runs; empty if all were freed."""
        values = self.values()
        found = {name: value for name, value in values.items() if value and name.endswith(HELD)}
        return found | {name: value for name, value in values.items() if value and name.startswith("conductor.load.")}

    def wait_clean(self, limit_s: float = 30.0) -> dict[str, float]:
        """Wait until no resource is held. Returns those still held after the limit."""
        end = time.monotonic() + limit_s
        while (found := self.held()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def wait_captured(self, quiet_s: float = 2.5, limit_s: float = 120.0) -> dict[str, float]:
        """Wait until no step is planned, or none has been captured for a while. Returns the counts of captured ones."""
        values = self.fresh_values()
        counts = {name: value for name, value in values.items() if name.endswith(CAPTURES)}
        planned = [value for name, value in values.items() if name.endswith(PLANNED)]
        if planned and not any(planned):
            return counts
        since, end = time.monotonic(), time.monotonic() + limit_s
        while counts and time.monotonic() - since < quiet_s and time.monotonic() < end:
            time.sleep(0.25)
            if (now := self.captures()) != counts:
                counts, since = now, time.monotonic()
        return counts

    def captures_left(self) -> dict[str, int]:
        """Return the number of planned steps that are not captured, by node with any."""
        values = self.values()
        return {name: int(value) for name, value in values.items() if name.endswith(PLANNED) and value}

    def load_test(self, *words: str, limit_s: float = 300.0) -> dict[str, Any]:
        """Run `mstarctl bench run` against this deployment. Returns its result."""
        address = ("--url", f"http://127.0.0.1:{self.plan.port}")
        folder = self.plan.root / f"load-test-{time.monotonic_ns()}"
        ended = self.mstarctl("bench", "run", *address, *words, "--out", str(folder), "-o", "json", limit_s=limit_s)
        if not ended.stdout.strip():
            raise RuntimeError(f"bench run ended with {ended.returncode}: {ended.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(ended.stdout)
        return {**found, "exit": ended.returncode}

    def captures(self) -> dict[str, float]:
        """Return the number of captured steps by node; empty if the deployment does not count them."""
        return {name: value for name, value in self.values().items() if name.endswith(CAPTURES)}


def _of_workers(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("worker-")}


def gpu_state() -> dict[str, float]:
    """Return memory in bytes, clocks in MHz and power in watts of the first GPU; empty without one."""
    found = smi("memory.used", "clocks.sm", "clocks.mem", "power.draw")
    if not found:
        return {}
    names = ("memory_bytes", "sm_mhz", "memory_mhz", "power_w")
    values = dict(zip(names, (_number(value) for value in found), strict=True))
    return {**values, "memory_bytes": values["memory_bytes"] * 2**20}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A] if the driver does not report it
        return float("nan")


def process_cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:13])) * TICK_S


def parents() -> dict[int, int]:
    """Return the parent of each process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended
    return found


def _status_bytes(pid: int, key: str) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0.0
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0.0)
