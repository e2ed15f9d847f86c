"""One deployment under measurement: started with `mstarctl up`, watched by its admin socket and by /proc, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
"""Endings of the telemetry values that are zero when nothing runs; pages of the prefix cache count apart."""

CAPTURES: Final = (".graphs_captured",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Deployment to start. settings: KEY=VALUE as for `mstarctl up --set`; the last value of a key wins.

    model: `orpheus` with a checkpoint folder, or `orpheus:tiny`. root: an empty folder for run directory and logs.
    tree: the sources that run; another tree than this one is put first on the path of every process. shares_gpu:
    another deployment may be on its GPU, which the locks there would refuse.
    """

    model: str
    device: str
    port: int
    root: Path
    weights: Path | None = None
    settings: tuple[str, ...] = ()
    tree: Path = ROOT
    shares_gpu: bool = False

    def command(self) -> list[str]:
        """The command line that starts it and returns when it is ready."""
        weights = ["--weights", str(self.weights)] if self.weights is not None else []
        settings = [word for setting in self.settings for word in ("--set", setting)]
        return [
            sys.executable, "-m", "mstarctl", "up", self.model, *weights, "--name", NAME, "--device", self.device,
            "--host", "127.0.0.1", "--port", str(self.port), *settings, "-d",
        ]  # fmt: skip


@dataclass(slots=True)
class Served:
    """A running deployment. Entering starts it, leaving stops it. ready_s: seconds of `up` by the caller's clock."""

    plan: Plan
    ready_s: float = 0.0
    pids: dict[str, int] = field(default_factory=dict)
    _client: httpx.Client | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # A measurement that is ended from outside ends what it started: else that keeps the device.
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        start = time.monotonic()
        code = subprocess.run(self.plan.command(), env=self.environment(), cwd=self.plan.tree, check=False).returncode
        self.ready_s = time.monotonic() - start
        if code != 0:
            self.end()
            raise RuntimeError(f"the deployment did not start: exit {code}\n{self.last_words()}")
        socket = self.plan.root / NAME / "admin.sock"
        self._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=60)
        head = self.snapshot()
        self.pids = {name: child["pid"] for name, child in head["children"].items()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            print(self.last_words(), file=sys.stderr, flush=True)
        self.end()

    def end(self) -> None:
        """Stop it, with whatever still runs."""
        if self._client is not None:
            self._client.close()
        down = [sys.executable, "-m", "mstarctl", "down", "--all", "--now"]
        subprocess.run(
            down, env=self.environment(), cwd=self.plan.tree, check=False, timeout=120, stdout=subprocess.DEVNULL
        )

    def environment(self) -> dict[str, str]:
        """The environment of its commands: this run's folder, and the working tree first on the path."""
        found = {**os.environ, "MSTAR_RUNTIME_DIR": str(self.plan.root)}
        if self.plan.shares_gpu:
            found["MSTAR_GPU_LOCK_DIR"] = str(self.plan.root / "locks")
        if (tree := self.plan.tree) != ROOT:
            paths = [tree, *sorted(tree.glob("plugins/*/src"))]
            found["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
        return found

    def last_words(self, size: int = 2500) -> str:
        """The end of every log, for an error that has to be understood from afar."""
        logs = sorted((self.plan.root / ".state").rglob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-size:]}" for path in logs)

    @contextmanager
    def telling(self, size: int = 8000) -> Iterator[None]:
        """Around requests: what they raise carries the end of every log, which is gone when the run is over."""
        try:
            yield
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}\n{self.last_words(size)}") from error

    def snapshot(self) -> dict[str, Any]:
        """Everything that the supervisor knows."""
        assert self._client is not None
        answer = self._client.get("http://admin/v1/snapshot")
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def values(self) -> dict[str, float]:
        """Telemetry as of the last report of each process; at most a tenth of a second old."""
        return {name: float(value) for name, value in self.snapshot()["values"].items()}

    def fresh_values(self, limit_s: float = 10.0) -> dict[str, float]:
        """Telemetry right after a worker's report. A worker that idles reports once a second: sums lag by that much."""
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
        """The api's own counters, by series with labels."""
        text = httpx.get(f"http://127.0.0.1:{self.plan.port}/metrics", timeout=60).text
        lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far by process; what a process started counts as `NAME children`."""
        found = {name: _cpu_s(pid) for name, pid in self.pids.items()}
        owners = {pid: name for name, pid in self.pids.items()}
        for pid, parent in _parents().items():
            if parent in owners and pid not in owners:
                name = f"{owners[parent]} children"
                found[name] = found.get(name, 0.0) + _cpu_s(pid)
        return found

    def resident_bytes(self) -> dict[str, float]:
        """Resident bytes by process, and the most that each has had."""
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
        """Wait until nothing is held. Returns what still is at the end of the limit."""
        end = time.monotonic() + limit_s
        while (found := self.held()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def wait_captured(self, quiet_s: float = 2.5, limit_s: float = 120.0) -> dict[str, float]:
        """Wait until no step has been captured for a while: none may be in a measurement. Returns the counts."""
        counts, since, end = self.captures(), time.monotonic(), time.monotonic() + limit_s
        while counts and time.monotonic() - since < quiet_s and time.monotonic() < end:
            time.sleep(0.25)
            if (now := self.captures()) != counts:
                counts, since = now, time.monotonic()
        return counts

    def captures(self) -> dict[str, float]:
        """Return the number of captured steps by node; empty if the deployment does not count them."""
        return {name: value for name, value in self.values().items() if name.endswith(CAPTURES)}


def _of_workers(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("worker-")}


def gpu_state() -> dict[str, float]:
    """Memory in bytes, clocks in MHz and power in watts of the first GPU; empty without one."""
    found = smi("memory.used", "clocks.sm", "clocks.mem", "power.draw")
    if not found:
        return {}
    names = ("memory_bytes", "sm_mhz", "memory_mhz", "power_w")
    values = dict(zip(names, (_number(value) for value in found), strict=True))
    return {**values, "memory_bytes": values["memory_bytes"] * 2**20}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A] where the driver does not tell
        return float("nan")


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(map(int, fields[11:13])) * TICK_S


def _parents() -> dict[int, int]:
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
