"""Benchmark of the runtime with the miniature speech model: start, latency, streams, memory, idle. Prints JSON.

Run from the repository root: `python bench/runtime_figures.py [--save] [--quick]`. The model computes little, so the
figures show the runtime's cost. Times are from the client's monotonic clock, CPU times from /proc. Clients share the
machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from bench.serving.figures import command
from tests.runtime.client import Heard, new_client, request, speak
from tests.runtime.deployment import REPO, Deployment

RESULTS: Final = REPO / "bench" / "results"
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
IDS: Final = 200
"""Ids of a stream: 25 chunks, 2.1 s of audio."""

ROUNDS: Final = {1: 20, 8: 4, 32: 3}
"""Concurrent streams -> repetitions."""

IDLE_S: Final = 10.0
WORKER: Final = "worker-0"


@dataclass(slots=True)
class Figures:
    """Samples by metric. Reports contain the percentiles that their number allows."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, values: Iterable[float], unit: str = "s") -> None:
        self.samples.setdefault(name, []).extend(values)
        self.units[name] = unit

    def summary(self) -> dict[str, dict[str, Any]]:
        return {name: summary(values, self.units[name]) for name, values in self.samples.items()}


def summary(values: list[float], unit: str) -> dict[str, Any]:
    """Return median, p95 (from 100 samples on), extremes and count."""
    ordered = sorted(values)
    found: dict[str, Any] = {"p50": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    if len(ordered) >= 100:
        found["p95"] = ordered[int(0.95 * len(ordered))]
    return {**{name: float(f"{value:.6g}") for name, value in found.items()}, "n": len(ordered), "unit": unit}


def main() -> None:
    """Measure, print, and save with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"also write it to {RESULTS.relative_to(REPO)}/")
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples, to test the benchmark")
    options = parser.parse_args()
    figures = Figures()
    report = measure(figures, 0.1 if options.quick else 1.0)
    print(json.dumps(report, indent=1))
    if options.save:
        RESULTS.mkdir(exist_ok=True)  # the docs' table is made from the newest file in it
        stem = f"{report['when'][:19].replace(':', '-')}-runtime_figures"
        (RESULTS / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
        raw = {name: [float(f"{v:.6g}") for v in values] for name, values in figures.samples.items()}
        (RESULTS / f"{stem}.samples.json").write_text(json.dumps(raw) + "\n")


def measure(figures: Figures, share: float) -> dict[str, Any]:
    """Run all measurements in order. share: fraction of the full number of samples."""
    load = os.getloadavg()[0]
    help_times(figures, times(10, share))
    for _ in range(times(2, share)):
        with Deployment() as warm:
            figures.add("ready_s", [warm.ready_s])
    with Deployment(max_concurrent_requests=32) as deployment:
        figures.add("ready_s", [deployment.ready_s])
        phases = deployment.admin("/v1")["phases_s"]
        at_ready = resident(deployment)
        errors = asyncio.run(requests(figures, deployment, share))
        memory = resident(deployment)
        idle(figures, deployment, IDLE_S * max(share, 0.2))
    return {
        "schema": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        **source(),
        "command": command(sys.argv),
        "env": environment(load),
        "model": "orpheus:tiny",
        "dims": "the embedded default checkpoint",
        "placement": "LLM and snac_decoder on one rank",
        "config": {"device": "cpu", "max_concurrent_requests": 32, "max_seq_len": 2048, "kv_pages": 1024},
        "workload": f"closed loop, {IDS} ids a stream, default sampling, /generate as lines of JSON",
        "warmup": "3 streams",
        "n": sum(len(values) for name, values in figures.samples.items() if name.startswith("first_audio")),
        "metrics": figures.summary(),
        "ready_s": statistics.median(figures.samples["ready_s"]),
        "phases": phases,
        "mem": memory,
        "mem_at_ready": at_ready,
        "errors": dict(errors),
    }


def times(count: int, share: float) -> int:
    return max(1, round(count * share))


async def requests(figures: Figures, deployment: Deployment, share: float) -> Counter[str]:
    """Send all requests of one deployment. Returns the number of failed ones by code."""
    errors: Counter[str] = Counter()
    stream = request(max_output_tokens=IDS, ignore_eos=True, seed=1)
    await together(deployment, [stream] * 3)
    added_latency(figures, deployment, times(200, share))
    for count, rounds in ROUNDS.items():
        for _ in range(times(rounds, share)):
            before, values, start = cpu_s(deployment), deployment.snapshot()["values"], time.monotonic()
            heard = await together(deployment, [{**stream, "seed": number} for number in range(count)])
            wall = time.monotonic() - start
            errors.update(each.code or "cut" for each in heard if not each.is_whole)
            await asyncio.sleep(0.3)  # wait for the worker's last telemetry
            spent = spent_s(before, cpu_s(deployment))
            note_round(figures, count, heard, wall, spent, difference(values, deployment.snapshot()["values"]))
    return errors


def note_round(
    figures: Figures,
    count: int,
    heard: list[Heard],
    wall: float,
    cpu: Mapping[str, float],
    worker: Mapping[str, float],
) -> None:
    """Record the figures of `count` concurrent streams."""
    chunks = sum(len(each.chunks) for each in heard)
    figures.add(f"first_audio_streams_{count}", [each.chunk_s[0] - each.sent_s for each in heard if each.chunk_s])
    figures.add(f"chunks_per_s_streams_{count}", [chunks / wall], "1/s")
    sound = [len(each.pcm) / 48_000 for each in heard]
    spans = [each.ended_s - each.sent_s for each in heard]
    figures.add(f"realtime_factor_streams_{count}", [span / s for span, s in zip(spans, sound, strict=True) if s], "1")
    steps = worker[f"{WORKER}.steps"]
    decode = worker[f"{WORKER}.LLM.steps"]
    figures.add(f"engine_per_decode_step_streams_{count}", [worker[f"{WORKER}.LLM.busy_s"] / decode])
    figures.add(f"worker_cpu_per_step_streams_{count}", [cpu[WORKER] / steps])
    figures.add(f"conductor_share_of_worker_cpu_streams_{count}", [cpu["conductor"] / cpu[WORKER]], "1")
    figures.add(f"api_cpu_per_chunk_streams_{count}", [cpu["api"] / max(1, chunks)])


def added_latency(figures: Figures, deployment: Deployment, count: int) -> None:
    """Measure sequential one-id requests: total time, engine time and the rest."""
    body = json.dumps(request(max_output_tokens=1, stream=False, stream_events="data"))
    walls, inside, busy = [], [], f"{WORKER}.LLM.busy_s"
    before = deployment.snapshot()["values"]
    connection = http.client.HTTPConnection(
        "127.0.0.1", deployment.port
    )  # a cheap client that keeps its connection open
    for _ in range(count):
        start = time.monotonic()
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        walls.append(time.monotonic() - start)
        inside.append(answer["usage"]["total_ms"] / 1000)
    connection.close()
    time.sleep(0.3)
    engine = difference(before, deployment.snapshot()["values"])[busy] / count
    figures.add("one_id_request", walls)
    figures.add("one_id_request_in_the_api", inside)
    figures.add("one_id_request_engine_mean", [engine])
    figures.add("one_id_request_added", [wall - engine for wall in walls])


async def together(deployment: Deployment, bodies: list[dict[str, Any]]) -> list[Heard]:
    async with new_client(deployment.url) as client:
        return list(await asyncio.gather(*(speak(client, body) for body in bodies)))


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def cpu_s(deployment: Deployment) -> dict[str, float]:
    """Return the CPU seconds so far by process; the pool's processes count as `pool`."""
    return by_name(deployment, lambda pid: sum(map(int, stat(pid)[11:13])) * TICK_S)


def spent_s(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0.0) for name in after}


def resident(deployment: Deployment) -> dict[str, float]:
    """Return the resident bytes by process."""
    return by_name(deployment, lambda pid: int(stat(pid)[21]) * PAGE)


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def by_name(deployment: Deployment, read: Any) -> dict[str, float]:
    names = {pid: name for name, pid in deployment.pids().items()}
    found: dict[str, float] = {}
    for process in deployment.processes():
        name = names.get(process.pid) or ("tracker" if "resource_tracker" in process.command else "pool")
        found[name] = found.get(name, 0.0) + read(process.pid)
    return found


def idle(figures: Figures, deployment: Deployment, span_s: float) -> None:
    """Measure the CPU share of every process without requests."""
    before = cpu_s(deployment)
    time.sleep(span_s)
    spent = spent_s(before, cpu_s(deployment))
    figures.add("idle_cpu", [sum(spent.values()) / span_s], "1")
    for name, seconds in spent.items():
        figures.add(f"idle_cpu_{name}", [seconds / span_s], "1")


def help_times(figures: Figures, count: int) -> None:
    """Measure `mstarctl --help`, and check that it loads no torch."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    for _ in range(count):
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "mstarctl", "--help"], env=environment, check=True, capture_output=True)
        figures.add("mstarctl_help", [time.monotonic() - start])
    look = (
        "import sys; sys.argv = ['mstarctl', '--help']\n"
        "from mstarctl.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", look], env=environment, check=False, capture_output=True).returncode
    figures.add("mstarctl_help_loads_torch", [float(loaded)], "1")


def source() -> dict[str, Any]:
    """Return the measured commit, and whether the tree had changes."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=REPO, check=False, capture_output=True, text=True).stdout.strip()

    return {"commit": git("rev-parse", "--short", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}


def environment(load: float) -> dict[str, Any]:
    """Describe the machine and the packages."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    packages = {name: version(name) for name in ("numpy", "msgspec", "pyzmq", "sanic", "httpx")}
    return {
        "gpu": None,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "packages": packages,
    }


if __name__ == "__main__":
    main()
