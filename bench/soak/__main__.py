"""Mixed families under load while processes are killed: every request has one outcome, and no process grows.

Run from the repository root: `python -m bench.soak --minutes 30 --save bench/results/soak.json`. A process is killed
each minute (worker, follower, conductor, api in turn), 40 % of the requests are ended by their clients, files are new
to every cache, and each ten minutes the processes of a deployment restart one by one. Answers are compared with those
of undisturbed requests. Exit status 1 means that something was lost, changed, refused or left over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from bench.serving.deployment import Plan, Served
from bench.serving.figures import ROOT, head
from bench.soak.crowd import Crowd
from bench.soak.killer import KINDS, Killer
from bench.soak.report import result, table
from bench.soak.samples import sample_bodies
from bench.soak.watch import Watch
from mstarctl.bench.result import without_folders
from tests.fakes.ports import free_port

ON_CPU: Final = "orpheus,qwen3_omni,pi05"
ON_GPU: Final = "orpheus,qwen3_omni,bagel,pi05,vjepa2_ac"
GROUP: Final = "orpheus_tp2"
"""Name of the deployment with a follower: a tensor-parallel group of two ranks."""


def main() -> int:
    """Run the soak. Returns 1 if it failed."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))
    try:
        report = {**head(), "options": told(options), **asyncio.run(soak(options, scratch))}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        options.save.write_text(json.dumps(without_folders(report), separators=(",", ":")) + "\n")
    print(table(report), flush=True)
    return 1 if report["failures"] else 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--hours", type=float, help="length under load")
    length.add_argument("--minutes", type=float, default=2.0, help="length under load; default: 2")
    parser.add_argument("--deaths", type=int, help="end before that, after so many deaths and a rolling restart")
    parser.add_argument("--device", default="cpu", help="device of every deployment; default: cpu")
    parser.add_argument(
        "--families", help=f"miniatures, by name; default: {ON_CPU}, on a GPU {ON_GPU}. {GROUP} has a follower"
    )
    parser.add_argument("--max-tokens", type=int, default=96, help="most ids of an answer; 0: no limit; default: 96")
    parser.add_argument("--load", type=float, default=0.8, help="share of the measured capacity; default: 0.8")
    parser.add_argument("--cancelled", type=float, default=0.4, help="share of requests ended early; default: 0.4")
    parser.add_argument("--kill-s", type=float, default=60.0, help="seconds between kills; default: 60")
    parser.add_argument(
        "--kill",
        type=kinds_of,
        default=KINDS,
        metavar="KINDS",
        help=f"kinds of processes to kill, in this order; default: {','.join(KINDS)}",
    )
    parser.add_argument("--restart-s", type=float, default=600.0, help="seconds between rolling restarts; default: 600")
    parser.add_argument("--lull-s", type=float, default=600.0, help="seconds between checks without load; default: 600")
    parser.add_argument("--sample-s", type=float, default=60.0, help="seconds between samples; default: 60")
    parser.add_argument("--seed", type=int, default=1, help="of the load; default: 1")
    parser.add_argument("--save", type=Path, help="file for the result as JSON")
    return parser.parse_args()


def kinds_of(text: str) -> tuple[str, ...]:
    """Return the kinds of processes that an option names. Raises ArgumentTypeError."""
    kinds = tuple(text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"unknown kind of process {kind!r}; choose from {', '.join(KINDS)}")
    return kinds


def told(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that make a result."""
    return {name: value for name, value in vars(options).items() if name != "save"}


async def soak(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Start the deployments, load and kill them, and return the figures."""
    families = (options.families or (ON_CPU if options.device == "cpu" else ON_GPU)).split(",")
    with ExitStack() as stack:
        served = [
            stack.enter_context(Served(plan_of(name, options.device, scratch, len(families)))) for name in families
        ]
        crowds = [crowd_of(each, options) for each in served]
        for crowd in crowds:
            await crowd.measure(options.load / len(crowds))
        killer = Killer(served, options.kill)
        await asyncio.to_thread(killer.ask_for_rolling)
        note(f"load: {', '.join(f'{crowd.name} {crowd.rate:.2f}/s' for crowd in crowds)}")
        watch = Watch(crowds, killer, time.monotonic())
        await under_load(options, crowds, killer, watch)
        return result(crowds, killer, watch)


async def under_load(options: argparse.Namespace, crowds: list[Crowd], killer: Killer, watch: Watch) -> None:
    """Run clients, kills, restarts, lulls and samples side by side until the time is over, then one last lull."""
    seconds = 3600 * options.hours if options.hours else 60 * options.minutes
    end_s = watch.began_s + seconds
    duties = [
        killer.kill_forever(options.kill_s, watch.began_s),
        watch.lull_forever(options.lull_s),
        watch.sample_forever(options.sample_s),
        tell_forever(crowds, killer, watch),
    ]
    if killer.can_roll:
        duties.append(killer.roll_forever(options.restart_s, watch.began_s))
    beside = [asyncio.create_task(duty) for duty in duties]
    clients = asyncio.create_task(all_clients(crowds, end_s))
    if options.deaths is not None:
        beside.append(asyncio.create_task(leave_after(options.deaths, killer, crowds, clients)))
    try:
        await asyncio.wait([clients, *beside], return_when=asyncio.FIRST_COMPLETED)
        if not clients.done():
            ended = next(task for task in beside if task.done())
            ended.result()  # raises: none of them ends by itself
    finally:
        for task in (*beside, clients):
            task.cancel()
        for task in beside:
            with suppress(asyncio.CancelledError):
                await task
    await killer.settle()
    await watch.lull()


async def all_clients(crowds: list[Crowd], end_s: float) -> None:
    """Run the clients of all deployments until `end_s`."""
    async with asyncio.TaskGroup() as group:
        for crowd in crowds:
            group.create_task(crowd.run(end_s))


async def leave_after(deaths: int, killer: Killer, crowds: list[Crowd], clients: asyncio.Task[None]) -> None:
    """End the clients once so many processes have died and one deployment has restarted without a gap."""
    while len(killer.deaths) < deaths or (killer.can_roll and not killer.restarts):
        await killer.next_end()
    for crowd in crowds:
        crowd.leave()
    await clients


async def tell_forever(crowds: list[Crowd], killer: Killer, watch: Watch) -> None:
    """Print a line of progress each half minute. Ends when cancelled."""
    while True:
        await asyncio.sleep(30)
        counts = "; ".join(f"{crowd.name} {dict(crowd.counts())}" for crowd in crowds)
        note(f"{time.monotonic() - watch.began_s:.0f} s, {len(killer.deaths)} deaths: {counts}")


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


SMALL_CACHES: Final = ("feature_cache_bytes=2097152", "kv_cache.tokens=32768")
"""Caches that are full within a minute on the CPU, whose memory grows while they fill: what grows later is a leak."""


def plan_of(name: str, device: str, scratch: Path, deployments: int) -> Plan:
    """Return the deployment of a family. On a GPU all of them share its memory."""
    root = scratch / name
    root.mkdir()
    is_group = name == GROUP
    on_gpu = device != "cpu"
    return Plan(
        model="orpheus:tiny"
        if is_group
        else f"{name}:mini",  # the miniature has three heads, which two ranks cannot divide
        device=device,
        port=free_port(),
        root=root,
        name=name,
        shares_gpu=on_gpu,
        config=ROOT / "configs" / f"{GROUP}.yaml" if is_group else None,
        settings=(f"kv_cache.memory_fraction={0.7 / deployments:.3f}",) if on_gpu else SMALL_CACHES,
    )


def crowd_of(served: Served, options: argparse.Namespace) -> Crowd:
    """Return the clients of a deployment."""
    bodies = sample_bodies(f"http://127.0.0.1:{served.plan.port}", options.max_tokens)
    draws = random.Random(f"{options.seed} {served.plan.name}")
    return Crowd(served, bodies, draws, options.cancelled)


if __name__ == "__main__":
    raise SystemExit(main())
