"""Deployments on two hosts that a slow cable joins, while parts of them are killed.

Run from the repository root, as root: `python -m bench.hosts.namespaces [--save FILE]`. The hosts are namespaces with
their own network, host name and shared memory; the cable delays each frame by 1 ms and loses 0.1 %. Each host has its
own Ray. The answers of a miniature whose nodes are split over both are compared with those of one host, undisturbed and
while Ray, agents, workers or the cable fail. Exit status 1 means that an answer was lost, changed or had no outcome, or
that the deployment did not recover.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from bench.hosts.machines import PORT, Link, Machine, RayNode, machines, ray_cluster
from bench.serving.deployment import Plan, Served
from bench.serving.figures import ROOT, head
from bench.soak.answers import Answer, ask, flaws
from bench.soak.samples import sample_bodies
from mstarctl.bench.result import without_folders

API_PORT: Final = 8000
LIMIT_S: Final = 180.0
CUT_S: Final = 15.0
READY_S: Final = 120.0
POLL_S: Final = 0.2
SPLITS: Final = {"orpheus": "orpheus_disaggregated.yaml", "qwen3_omni": "qwen3omni_2gpu.yaml"}
"""Deployment files that put the last nodes of a model onto rank 1."""

SETTINGS: Final = ("max_seq_len=2048", "kv_cache.pages=1024")
MAX_TOKENS: Final = 112


@dataclass(slots=True)
class Case:
    """Outcomes of the requests during one disturbance.

    ready_s: from the disturbance until all processes were ready again, None if they were not within the limit.
    """

    name: str
    requests: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    flaws: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0
    ready_s: float | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Two hosts with Ray, and the deployment on them."""

    hosts: tuple[Machine, Machine]
    rays: tuple[RayNode, RayNode]
    link: Link
    served: Served
    references: Mapping[str, Answer]
    bodies: Mapping[str, Mapping[str, Any]]

    def child(self, name: str) -> int:
        """Return the process of a child."""
        return int(self.served.snapshot()["children"][name]["pid"])

    def agent(self) -> int:
        """Return the process of the agent on the second host."""
        return int(self.served.snapshot()["hosts"][self.hosts[1].name]["pid"])

    def is_ready(self) -> bool:
        """Return whether every process and host is ready."""
        now = self.served.snapshot()
        hosts = [host.get("state", "") for host in now["hosts"].values()]
        children = [child["state"] for name, child in now["children"].items() if name != "weights"]
        return set(hosts) <= {"", "ready"} and set(children) <= {"ready"}


def main() -> int:
    """Run all cases and print the result as JSON. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.hosts.namespaces", description=__doc__)
    parser.add_argument("--models", default=",".join(SPLITS))
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--loss", type=float, default=0.001)
    parser.add_argument("--cases", default=",".join(CASES), help="in their order")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {
        **head(),
        "options": {n: v for n, v in vars(options).items() if n != "save"},
        "models": {},
    }
    for model in options.models.split(","):
        report["models"][model] = [asdict(case) for case in prove(model, options)]
    failed = [case for model in report["models"].values() for case in model if case["flaws"] or case["ready_s"] is None]
    report["failures"] = len(failed)
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(without_folders(report), indent=1) + "\n")
    return 1 if failed else 0


def told(model: str, case: Case) -> Case:
    """Print a case as a line of a table, and return it."""
    ready = "not ready again" if case.ready_s is None else f"ready in {case.ready_s:.1f} s"
    pause = f"longest pause {case.longest_pause_s:.1f} s"
    print(f"{model:<11} {case.name:<14} {case.outcomes} {ready}, {pause} {case.flaws[:3] or ''}", flush=True)
    return case


def prove(model: str, options: argparse.Namespace) -> list[Case]:
    """Serve a model on one host, then on two, and disturb it there."""
    scratch = Path(tempfile.mkdtemp(prefix="mh-"))
    try:
        with ExitStack() as stack:
            first, second, link = stack.enter_context(machines(scratch, delay_ms=options.delay_ms, loss=options.loss))
            first.enter_network()
            with Served(plan_of(model, first)) as alone:
                bodies = bodies_of(alone)
                references = asyncio.run(answers(bodies))
            rays = stack.enter_context(ray_cluster(first, second))
            served = stack.enter_context(Served(plan_of(model, first, second)))
            site = Site((first, second), rays, link, served, references, bodies)
            with served.telling():
                return [told(model, run_case(site, name)) for name in options.cases.split(",")]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def plan_of(model: str, first: Machine, second: Machine | None = None) -> Plan:
    """Return the deployment on one host, or split over two."""
    places = f"ray.devices=[{first.name}:cpu,{second.name}:cpu]" if second else ""
    return Plan(
        model=f"{model}:mini",
        device="cpu",
        port=API_PORT,
        root=first.runs,
        name=model,
        config=ROOT / "configs" / SPLITS[model],
        settings=(*SETTINGS, *filter(None, [places])),
        environment={"OMP_NUM_THREADS": "1"},
        ray=f"{first.address}:{PORT}" if second else "",
        inside=first.inside,
    )


def bodies_of(served: Served) -> dict[str, dict[str, Any]]:
    """Return the samples of a deployment as requests that draw their ids."""
    return sample_bodies(f"http://127.0.0.1:{served.plan.port}", MAX_TOKENS)


async def answers(bodies: Mapping[str, Mapping[str, Any]]) -> dict[str, Answer]:
    """Return the answer to each request, one after the other."""
    async with client() as http:
        return {name: await ask(http, body) for name, body in bodies.items()}


def client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{API_PORT}", timeout=LIMIT_S, limits=limits)


# --------------------------------------------------------------------------------------------------------------- cases
def run_case(site: Site, name: str) -> Case:
    """Send all requests at once, disturb them when the first has begun, and send all again when all is ready."""
    case = Case(name)
    before, after = CASES[name]
    with Readiness(site) as readiness:
        asyncio.run(_requests(site, case, before, readiness))
        if after is not None:
            after(site)
        case.ready_s = readiness.wait()
    if case.ready_s is not None:
        asyncio.run(_requests(site, case, None, readiness))
    return case


class Readiness:
    """Observes on a thread when a site was last not ready. Owned by `run_case`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._struck_s = self._unready_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def strike(self) -> None:
        """Begin the clock: something is disturbed now."""
        self._struck_s = self._unready_s = time.monotonic()

    def wait(self) -> float | None:
        """Wait until the site is ready. Returns the seconds from the strike, None if it was not ready in time."""
        end = time.monotonic() + READY_S
        while not self._site.is_ready():
            if time.monotonic() > end:
                return None
            time.sleep(POLL_S)
        return round(self._unready_s - self._struck_s, 1)

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_S):
            if not self._site.is_ready():
                self._unready_s = time.monotonic()

    def __enter__(self) -> Readiness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


async def _requests(site: Site, case: Case, strike: Callable[[Site], None] | None, readiness: Readiness) -> None:
    has_begun = asyncio.Event()

    def watch(answer: Answer) -> bool:
        if answer.outputs:
            has_begun.set()
        return False

    async with client() as http:
        tasks = {name: asyncio.create_task(ask(http, body, leave=watch)) for name, body in site.bodies.items()}
        if strike is not None:
            await has_begun.wait()
            readiness.strike()
            await asyncio.to_thread(strike, site)
        found = {name: await task for name, task in tasks.items()}
    outcomes = Counter(case.outcomes)
    for name, answer in found.items():
        kind = "whole" if answer.is_whole else answer.code or ("refused" if answer.is_refused else "cut")
        outcomes[kind] += 1
        if kind in ("whole", "cut"):
            case.flaws += [f"{name}: {flaw}" for flaw in flaws(answer, site.references[name])]
        if len(answer.ends) > 1:
            case.flaws.append(f"{name}: {len(answer.ends)} ends")
        case.longest_pause_s = round(max(case.longest_pause_s, answer.longest_pause_s), 2)
    case.requests += len(found)
    case.outcomes = dict(outcomes)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_workers_without_ray(site: Site) -> None:
    """Kill Ray on both hosts, then the worker of the second one, which its agent starts again."""
    for ray in site.rays:
        ray.kill()
    kill(site.child("worker-1"))


def start_ray(site: Site) -> None:
    """Start a new cluster at the address of the old one."""
    for ray in site.rays:
        ray.kill()
        ray.start()


def cut(site: Site) -> None:
    """Lose all frames between the hosts for a while."""
    site.link.cut()
    time.sleep(CUT_S)
    site.link.mend()


def restart_second_ray(site: Site) -> None:
    """Start the raylet of the second host again."""
    site.rays[1].kill()
    site.rays[1].start()


CASES: Final[Mapping[str, tuple[Callable[[Site], None] | None, Callable[[Site], None] | None]]] = {
    "undisturbed": (None, None),
    "raylet": (lambda site: site.rays[1].kill(), restart_second_ray),
    "worker": (lambda site: kill(site.child("worker-1")), None),
    "first worker": (lambda site: kill(site.child("worker-0")), None),
    "agent": (lambda site: kill(site.agent()), None),
    "cut": (cut, None),
    "head": (kill_workers_without_ray, None),
    "new cluster": (start_ray, None),
    "agent again": (lambda site: kill(site.agent()), None),
}
"""Actions while requests run, and after them."""


if __name__ == "__main__":
    sys.exit(main())
