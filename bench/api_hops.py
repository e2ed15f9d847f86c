"""Path of a robot request through the api and the conductor and back, for one or two source trees.

Run from the repository root: `python bench/api_hops.py [--against FOLDER] [--save NAME]`. Prints one JSON object. The
api, its pool and the conductor are separate processes. Fakes of supervisor and worker run in the client's process, and
the worker answers as soon as it has the walks, or --think-ms later. The measurement covers the path from the client to
the worker and back, with all wake-ups of processes. While a device computes, idle processes fall asleep: with
--think-ms 15 the same path takes twice as long on an idle machine. Requests are sequential, each with three images of
224 x 224 pixels. Two trees are measured in turn. --spin-us sets `wait_spin_us` of the later tree; compare with
`--against .`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from bench.api_cameras import SIDE, SPEC, WARM, command
from bench.robot_requests import Robot, images_of, write_config
from bench.serving.figures import median
from mstar_core.config.deployment import DeploymentSpec, NodePlacement, Plan, RankPlan
from mstar_core.messages.flow import Output, Outputs
from mstar_core.messages.life import Hello, PeerReady, PeerUp, Phase, Ping, ServiceState
from mstar_core.messages.requests import RequestFinished
from mstar_core.messages.wire import Envelope, Message, WireCodec
from mstar_core.messages.work import RunWalks, WalkDone
from mstar_core.transport import Courier, Mailbox, mailbox_endpoint
from mstar_core.transport.shm import TensorTransport
from mstar_pi05.checkpoint.config import ACTION_WIDTH, Sizes
from tests.api.own_process import own_api, spec_in

WORKER: Final = "worker-0"
SETTLE_S: Final = 0.5
"""Time until the conductor knows the worker."""

ACTIONS: Final = np.zeros((Sizes().horizon, ACTION_WIDTH), np.float32)


class Others:
    """Supervisor and worker, on a separate thread. asked: arrival times of walks; told: start times of answers."""

    def __init__(self, spec: DeploymentSpec, think_s: float) -> None:
        self.asked: list[float] = []
        self.told: list[float] = []
        self.ready = threading.Event()
        self.is_over = False
        self._think_s = think_s
        self._ipc = spec.ipc_dir
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._codecs = {name: WireCodec(name, 0) for name in ("supervisor", WORKER)}
        self._boxes: dict[str, Mailbox] = {
            name: Mailbox(self._context, self.endpoint(name), codec) for name, codec in self._codecs.items()
        }
        self._couriers = {name: Courier(self._context, codec) for name, codec in self._codecs.items()}
        self._tensors = TensorTransport(WORKER, 0, self._ipc)
        self._up: set[str] = set()
        self._last_ping = 0.0

    def endpoint(self, name: str) -> str:
        """Return the endpoint of a process's mailbox."""
        return mailbox_endpoint(self._ipc, name, 0)

    def run(self) -> None:
        """Handle messages until the end."""
        supervisor, worker = self._boxes["supervisor"], self._boxes[WORKER]
        while not self.is_over:
            worker.wait(0.02)
            for box in (worker, supervisor):
                for item in box.drain():
                    if isinstance(item, Envelope):
                        self._take(item.body)
            if time.monotonic() > self._last_ping + 1:
                self._last_ping = time.monotonic()
                for name in self._up:
                    self._couriers["supervisor"].send(name, Ping(seq=0))
        for box in self._boxes.values():
            box.close()
        for courier in self._couriers.values():
            courier.close()
        self._tensors.close()
        self._context.term()

    def _take(self, message: Message) -> None:
        match message:
            case RunWalks():
                self.asked.append(time.monotonic())
                time.sleep(self._think_s)
                self.told.append(
                    time.monotonic()
                )  # before the answer is sent, because the client may be done afterwards
                self._answer(message)
            case Hello():
                self._greet(message)
            case Phase(name="api", phase="ready"):
                self.ready.set()

    def _greet(self, hello: Hello) -> None:
        for courier in self._couriers.values():
            courier.connect(hello.name, hello.endpoint, 0)
        tell = self._couriers["supervisor"].send
        up = PeerUp(name=hello.name, incarnation=0, endpoint=hello.endpoint, fd_endpoint=hello.fd_endpoint)
        mine = PeerUp(name=WORKER, incarnation=0, endpoint=self.endpoint(WORKER), fd_endpoint=self._tensors.endpoint)
        self._up.add(hello.name)
        for name in self._up:
            tell(name, up)
            other = "conductor" if name == "api" else "api"
            if other in self._up:
                tell(hello.name, PeerUp(name=other, incarnation=0, endpoint=self.endpoint(other)))
        tell(hello.name, mine)
        if hello.name == "conductor":  # it sends Hello when it is ready
            tell("conductor", PeerReady(name=WORKER, incarnation=0))
            time.sleep(SETTLE_S)
            tell("api", ServiceState(state="ready"))

    def _answer(self, walks: RunWalks) -> None:
        send = self._couriers[WORKER].send
        ref = self._tensors.put(ACTIONS, "api")
        output = Output(handle=walks.handle, seq=0, port="robot_actions", modality="action", ref=ref)
        told: dict[str, Any] = {}
        end: dict[str, Any] = {}
        if getattr(walks.runs[-1], "finishes", False):  # a tree whose workers report the end themselves
            counts = {"flow": 10}
            told = {
                "finished": [RequestFinished(handle=walks.handle, reason="stop", emitted={WORKER: 1}, counts=counts)]
            }
            end = {"is_told": True}
        send("api", Outputs(worker=WORKER, items=[output], **told))
        first, last = (run.run for run in walks.runs)
        send("conductor", WalkDone(handle=walks.handle, run=first, rank=0))
        send("conductor", WalkDone(handle=walks.handle, run=last, rank=0, counts={"flow": 10}, emitted=1, **end))


async def serve(options: argparse.Namespace) -> None:
    """Serve one tree: one window per line of standard input."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mstar-api-")))
        write_config(folder / "pi05", Sizes())
        names = tuple(node.name for node in SPEC.nodes)
        chosen = {} if options.processes is None else {"pool_processes": options.processes}
        spin_us = options.spin_us if os.environ.get("BENCH_TREE") == "now" else None
        spec = msgspec.structs.replace(
            spec_in(str(folder), SPEC, api=chosen),
            folder=str(folder / "pi05"),
            plugin="pi05",
            plan=Plan(
                ranks=(RankPlan(rank=0, device="cpu", nodes=names),),
                placements=tuple(NodePlacement(node=name, replicas=((0,),)) for name in names),
            ),
        )
        if spin_us is not None:
            spec = msgspec.structs.replace(spec, wait_spin_us=spin_us)
        others = Others(spec, options.think_ms / 1000)
        thread = threading.Thread(target=others.run)
        thread.start()
        try:
            async with own_api(spec, others.endpoint("supervisor"), "bench.api_cameras") as api:
                await asyncio.to_thread(others.ready.wait, 60)
                with _conductor(spec, others.endpoint("supervisor")) as conductor:
                    await api.ready()
                    with closing(Robot(api.port, images_of(SIDE, options.form))) as robot:
                        try:
                            await _windows(others, robot, options.requests)
                        finally:
                            conductor.terminate()
        finally:
            others.is_over = True
            thread.join()


def _conductor(spec: DeploymentSpec, supervisor: str) -> subprocess.Popen[bytes]:
    path = Path(spec.run_dir) / "spec.json"
    words = [sys.executable, "-m", "mstar_core.conductor", str(path), "--incarnation", "0", "--supervisor", supervisor]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


async def _windows(others: Others, robot: Robot, requests: int) -> None:
    await asyncio.to_thread(_load, others, robot, WARM)
    print("{}", flush=True)
    while (await asyncio.to_thread(sys.stdin.readline)).strip():
        found = await asyncio.to_thread(_load, others, robot, requests)
        print(json.dumps({k: round(1000 * median(sorted(v)), 3) for k, v in found.items()}), flush=True)


def _load(others: Others, robot: Robot, requests: int) -> dict[str, list[float]]:
    others.asked.clear()
    others.told.clear()
    begun, ended = [], []
    for number in range(requests):
        begun.append(time.monotonic())
        robot.ask(number)
        ended.append(time.monotonic())
    there = [at - start for at, start in zip(others.asked, begun, strict=True)]
    back = [end - at for end, at in zip(ended, others.told, strict=True)]
    whole = [end - start for end, start in zip(ended, begun, strict=True)]
    return {"to_worker_ms": there, "back_ms": back, "whole_ms": whole}


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("--think-ms", type=float, default=0.0, help="how long the worker has the walks")
    parser.add_argument("--spin-us", type=int, help="wait_spin_us of the later tree; default: its own")


if __name__ == "__main__":
    command(
        __doc__, __file__, "npy", serve, "api and conductor are real, the worker answers --think-ms later", add_words
    )
