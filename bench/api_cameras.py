"""From a robot's request to the conductor and back: time of the client, CPU of the api, for one or two source trees.

Run from the repository root: `python bench/api_cameras.py [--against FOLDER] [--save NAME]`. Prints one JSON object.
The api is a process of its own with a real pool; conductor and worker are stand-ins in the client's process that answer
at once, so what is measured is all that stands around the engines: body, decoding, prompt, tensors, answer. Requests
come one after the other, each with three images of 224 x 224 pixels. Two trees take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.robot_requests import FORMS, Robot, images_of, write_config
from bench.serving.figures import ROOT, head, median, summary
from bench.serving.trees import Tree
from mstar_core.messages.requests import NewRequest
from mstar_pi05.deployment import read_deployment
from mstar_pi05.plugin import spec
from mstar_pi05.sizes import ACTION_WIDTH, Sizes
from tests.api.own_process import own_api, spec_in
from tests.fakes.conductor import FakeDeployment

SPEC: Final = spec(Sizes(), read_deployment({}))
RESULTS: Final = ROOT / "bench" / "results" / "api"
SIDE: Final = 224
WARM: Final = 10


def main() -> None:
    """Measure, print, and keep with --save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another source tree, measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=100, help="requests of a window; each round has one per tree")
    parser.add_argument("--form", choices=FORMS, default="png", help="how the images are sent")
    parser.add_argument("--save", metavar="NAME", help=f"also write it to {RESULTS.relative_to(ROOT)}/NAME.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.requests, options.form))
        return
    load = os.getloadavg()[0]
    folders = (("before", options.against), ("now", ROOT))
    trees = [Tree(name, folder, __file__) for name, folder in folders if folder is not None]
    windows = [tree.window("measure") for _ in range(options.rounds) for tree in trees]
    for tree in trees:
        tree.close()
    report = {
        **head(), "before": options.against.name if options.against else None,
        "form": options.form,
        "workload": f"windows of {options.requests} requests one after the other, three images of {SIDE} pixels a "
        "side, 453 kB; conductor and worker answer at once; the trees in turn",
        "load_before_and_after": [round(load, 2), round(os.getloadavg()[0], 2)],
        "ms": {tree.name: _by_figure(windows, tree.name) for tree in trees}, "ratios": _ratios(windows),
        "windows": windows,
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{options.save}.json").write_text(json.dumps(report, indent=1) + "\n")


def _by_figure(windows: list[dict[str, Any]], tree: str) -> dict[str, Any]:
    mine = [found for found in windows if found["tree"] == tree]
    return {name: summary([found[name] for found in mine], "ms") for name in mine[0] if name != "tree"}


def _ratios(windows: list[dict[str, Any]]) -> dict[str, float]:
    """Now by before, the median over neighbouring windows."""
    before, now = ([found for found in windows if found["tree"] == name] for name in ("before", "now"))
    names = [name for name in now[0] if name != "tree"] if before else []
    pairs = {name: sorted(b[name] / a[name] for a, b in zip(before, now, strict=True)) for name in names}
    return {name: round(median(values), 3) for name, values in pairs.items()}


async def serve(requests: int, form: str) -> None:
    """One tree's side: a window for each line of the standard input."""
    arrived: list[float] = []

    def answer(fake: FakeDeployment, request: NewRequest) -> None:
        arrived.append(time.monotonic())
        fake.output(request.handle, "action", np.zeros((Sizes().horizon, ACTION_WIDTH), np.float32))
        fake.finish(request.handle)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mstar-api-")))
        write_config(folder / "pi05", Sizes())
        deployment = msgspec.structs.replace(spec_in(str(folder), SPEC), folder=str(folder / "pi05"))
        fake = FakeDeployment(deployment.ipc_dir, answer)
        stack.callback(fake.close)
        fake.attach()
        async with own_api(deployment, fake.supervisor, "bench.api_cameras") as api:
            await fake.until(lambda: bool(fake.received))
            fake.ready()
            await api.ready()
            with closing(Robot(api.port, images_of(SIDE, form))) as robot:
                await asyncio.to_thread(_load, robot, WARM)
                print("{}", flush=True)
                while (await asyncio.to_thread(sys.stdin.readline)).strip():
                    arrived.clear()
                    cpu = api.cpu_s
                    begun, took = await asyncio.to_thread(_load, robot, requests)
                    found = {
                        "to_conductor_ms": [at - start for at, start in zip(arrived, begun, strict=True)],
                        "whole_ms": took, "api_cpu_ms": [(api.cpu_s - cpu) / requests],
                    }  # fmt: skip
                    print(json.dumps({k: round(1000 * median(sorted(v)), 3) for k, v in found.items()}), flush=True)


def _load(robot: Robot, requests: int) -> tuple[list[float], list[float]]:
    begun, took = [], []
    for number in range(requests):
        begun.append(time.monotonic())
        took.append(robot.ask(number))
    return begun, took


if __name__ == "__main__":
    main()
