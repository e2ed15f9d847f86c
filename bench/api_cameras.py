"""Path of a robot request to the conductor and back: client latency and CPU time of the api, for one or two source
trees.

Run from the repository root: `python bench/api_cameras.py [--against FOLDER] [--save NAME]`. Prints one JSON object.
The api is a separate process with a real pool. Fakes of conductor and worker run in the client's process and answer
immediately, so the measurement covers everything except the engines: body, decoding, prompt, tensors, response.
Requests are sequential, each with three images of 224 x 224 pixels. Two trees are measured in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from bench.robot_requests import FORMS, Robot, images_of, write_config
from bench.serving.figures import median
from bench.serving.in_turn import by_figure, keep, measured, parser_of, ratios
from mstar_core.messages.flow import Outputs
from mstar_core.messages.requests import NewRequest
from mstar_pi05.checkpoint.config import ACTION_WIDTH, Sizes
from mstar_pi05.deployment import read_deployment
from mstar_pi05.plugin import spec
from tests.api.own_process import own_api, spec_in
from tests.fakes.conductor import FakeDeployment

SPEC: Final = spec(Sizes(), read_deployment({}))
SIDE: Final = 224
WARM: Final = 10


Serve = Callable[[argparse.Namespace], Coroutine[None, None, None]]
"""Serves the measurement of one tree, with the command-line options."""


def command(
    text: str | None,
    script: str,
    form: str,
    serve: Serve,
    answering: str,
    add: Callable[[argparse.ArgumentParser], None] = lambda _: None,
) -> None:
    """Measure, print, and save with --save. form: default image form; answering: which fakes answer, and when."""
    parser = parser_of(text, requests=100)
    add(parser)
    parser.add_argument("--form", choices=FORMS, default=form, help="how the images are sent")
    parser.add_argument("--processes", type=int, help="pool size of both trees; default: their own")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
        return
    found, begun = measured(options, script, ["measure"])
    windows = found["measure"]
    report = {
        **begun,
        "form": options.form,
        "processes": options.processes,
        "workload": f"windows of {options.requests} sequential requests, three images of {SIDE} pixels a side, 453 kB; "
        f"{answering}; the trees in turn",
        "ms": by_figure(windows),
        "ratios": ratios(windows),
        "windows": windows,
    }
    keep(report, options.save)


async def serve(options: argparse.Namespace) -> None:
    """Serve one tree: one window per line of standard input."""
    arrived: list[float] = []

    def answer(fake: FakeDeployment, request: NewRequest) -> None:
        arrived.append(time.monotonic())
        actions = np.zeros((Sizes().horizon, ACTION_WIDTH), np.float32)
        if "finished" in Outputs.__struct_fields__:  # a tree whose workers report the end themselves
            fake.output(request.handle, "action", actions, finishes=True)
            return
        fake.output(request.handle, "action", actions)
        fake.finish(request.handle)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mstar-api-")))
        write_config(folder / "pi05", Sizes())
        chosen = {} if options.processes is None else {"pool_processes": options.processes}
        deployment = msgspec.structs.replace(spec_in(str(folder), SPEC, api=chosen), folder=str(folder / "pi05"))
        fake = FakeDeployment(deployment.ipc_dir, answer)
        stack.callback(fake.close)
        fake.attach()
        async with own_api(deployment, fake.supervisor, "bench.api_cameras") as api:
            await fake.until(lambda: bool(fake.received))
            fake.ready()
            await api.ready()
            with closing(Robot(api.port, images_of(SIDE, options.form))) as robot:
                await asyncio.to_thread(_load, robot, WARM)
                print("{}", flush=True)
                while (await asyncio.to_thread(sys.stdin.readline)).strip():
                    arrived.clear()
                    cpu = api.cpu_s
                    begun, took = await asyncio.to_thread(_load, robot, options.requests)
                    found = {
                        "to_conductor_ms": [at - start for at, start in zip(arrived, begun, strict=True)],
                        "whole_ms": took,
                        "api_cpu_ms": [(api.cpu_s - cpu) / options.requests],
                    }
                    print(json.dumps({k: round(1000 * median(sorted(v)), 3) for k, v in found.items()}), flush=True)


def _load(robot: Robot, requests: int) -> tuple[list[float], list[float]]:
    begun, took = [], []
    for number in range(requests):
        begun.append(time.monotonic())
        took.append(robot.ask(number))
    return begun, took


if __name__ == "__main__":
    command(__doc__, __file__, "png", serve, "conductor and worker answer at once")
