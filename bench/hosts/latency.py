"""Latency and idle cost of a second host: a miniature split over two processes, on one host and on two.

Run from the repository root, as root: `python -m bench.hosts.latency [--save FILE]`. Both hosts are nodes of Ray on
this machine, so messages cross the loopback interface by TCP with encryption. Both deployments run at once, and
requests go to them in turn. The added time is what a second host costs without a network. Afterwards their processes
idle, and their CPU time is read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx

from bench.hosts.machines import PORT, Machine, neighbours, ray_cluster
from bench.hosts.namespaces import SETTINGS, SPLITS
from bench.serving.deployment import Plan, Served, process_cpu_s
from bench.serving.figures import ROOT, at, head
from bench.soak.answers import Answer, ask
from bench.soak.samples import sample_bodies
from mstar_core.cluster.survey import survey
from mstarctl.bench.result import without_folders
from tests.fakes.ports import free_port

SAMPLE: Final = {"orpheus": "speech", "qwen3_omni": "spoken"}
WARM: Final = 5
SETTLE_S: Final = 5.0


def main() -> int:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.hosts.latency", description=__doc__)
    parser.add_argument("--model", default="orpheus", choices=SPLITS)
    parser.add_argument("--requests", type=int, default=100, help="to each deployment")
    parser.add_argument("--idle-s", type=float, default=30.0)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="mh-"))
    try:
        report = {**head(), "model": options.model, "requests": options.requests, **measure(options, scratch)}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(without_folders(report), indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Start both deployments and return their figures."""
    with ExitStack() as stack:
        first, second = stack.enter_context(neighbours(scratch))
        first.enter_network()
        stack.enter_context(ray_cluster(first, second))
        ray = f"{first.address}:{PORT}"
        names = [host.name for host in survey(ray, ()).hosts]
        plans = {
            "one host": plan_of(options.model, first, "one"),
            "two hosts": plan_of(options.model, first, "two", ray, names),
        }
        served = {name: stack.enter_context(Served(plan)) for name, plan in plans.items()}
        times = asyncio.run(alternate(served, options))
        time.sleep(SETTLE_S)
        idle = idle_shares(served, options.idle_s)
        ends = {name: down_s(each) for name, each in served.items()}
    figures = {
        name: {"first_audio_ms": spread(values), "idle_cores": idle[name], "down_s": ends[name]}
        for name, values in times.items()
    }
    medians = [figures[name]["first_audio_ms"]["p50"] for name in served]
    return {"deployments": figures, "added_first_audio_ms": round(medians[1] - medians[0], 3)}


def plan_of(model: str, machine: Machine, name: str, ray: str = "", names: Sequence[str] = ()) -> Plan:
    """Return a deployment whose nodes are split over two ranks. names: hosts of the ranks."""
    places = [f"ray.devices=[{','.join(f'{name}:cpu' for name in names)}]"] if names else []
    return Plan(
        model=f"{model}:mini",
        device="cpu",
        port=free_port(),
        root=machine.runs,
        name=name,
        config=ROOT / "configs" / SPLITS[model],
        settings=(*SETTINGS, *places),
        ray=ray,
        inside=machine.inside,
    )


async def alternate(served: dict[str, Served], options: argparse.Namespace) -> dict[str, list[float]]:
    """Send requests to the deployments in turn. Returns milliseconds to the first audio."""
    times: dict[str, list[float]] = {name: [] for name in served}
    urls = {name: f"http://127.0.0.1:{each.plan.port}" for name, each in served.items()}
    bodies = {name: sample_bodies(url, 28)[SAMPLE[options.model]] for name, url in urls.items()}
    async with httpx.AsyncClient(timeout=120) as http:
        for number in range(WARM + options.requests):
            for name, url in urls.items():
                http.base_url = httpx.URL(url)
                answer = await ask(http, bodies[name])
                if number >= WARM:
                    times[name].append(1000 * first_audio_s(answer))
    return times


def first_audio_s(answer: Answer) -> float:
    """Return the time from sending a request to its first audio. Raises RuntimeError if it failed."""
    for line, arrived in zip(answer.lines, answer.line_s, strict=True):
        if line["modality"] == "audio":
            return arrived - answer.sent_s
    raise RuntimeError(f"a request failed: {answer.sentence}")


def idle_shares(served: dict[str, Served], seconds: float) -> dict[str, dict[str, float]]:
    """Return the cores that the processes of each deployment use without requests, by process and `all`."""
    before = {name: cpu_s(each) for name, each in served.items()}
    time.sleep(seconds)
    shares = {}
    for name, each in served.items():
        now = cpu_s(each)
        found = {
            process: round((value - before[name].get(process, 0.0)) / seconds, 5) for process, value in now.items()
        }
        shares[name] = {"all": round(sum(found.values()), 5), **found}
    return shares


def down_s(served: Served) -> float:
    """Return the seconds of `mstarctl down` without requests. Raises RuntimeError if it fails."""
    begin = time.monotonic()
    done = served.mstarctl("down", served.plan.name)
    if done.returncode:
        raise RuntimeError(f"mstarctl down failed: {done.stderr}")
    return round(time.monotonic() - begin, 2)


def cpu_s(served: Served) -> dict[str, float]:
    """Return the CPU seconds so far of each process of a deployment, agents included."""
    hosts = served.snapshot()["hosts"]
    agents = {f"agent {name}": process_cpu_s(host["pid"]) for name, host in hosts.items() if host.get("pid")}
    return {**served.cpu_s(), **agents}


def spread(values: list[float]) -> dict[str, float]:
    """Return percentiles of values."""
    ordered = sorted(values)
    return {f"p{share}": round(at(ordered, share / 100), 3) for share in (5, 50, 95)}


if __name__ == "__main__":
    sys.exit(main())
