"""Host CPU time of the worker around a decode step: routing of ids to streams, codec windows, sent outputs.

Run from the repository root: `python bench/worker_step.py [--streams 64] [--frames 40]`. Fake runners replace the model
and compute nothing. The tensor transport is real, messages are discarded. Prints JSON: microseconds of CPU per id and
per window.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mstar_core.engine.base import Done, Handle, Job, LoopStep, Pressure, StepResult
from mstar_core.engine.runner import NodeRunner, Running
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.messages.flow import Outputs
from mstar_core.messages.tensors import ShmTensor
from mstar_core.messages.wire import Message
from mstar_core.messages.work import OpenRequest, RunWalk, RunWalks
from mstar_core.transport.shm import TensorTransport
from mstar_core.transport.tensors import loan_of
from mstar_core.worker.executor import Executor
from mstar_core.worker.outbox import Outbox
from mstar_orpheus.plugin import ORPHEUS

FIRST_AUDIO_ID, IDS_PER_FRAME, FRAME_SAMPLES = 128266, 7, 2048


class Nowhere:
    """Fake courier that counts messages and returns loans as the api does."""

    def __init__(self, transport: TensorTransport) -> None:
        self.outputs = 0
        self._transport = transport

    def send(self, name: str, message: Message) -> bool:
        """Count a message."""
        if isinstance(message, Outputs):
            self.outputs += len(message.items)
            for item in message.items:
                if isinstance(item.ref, ShmTensor):
                    loan = loan_of(item.ref)
                    assert loan is not None
                    self._transport.release(loan.slot, loan.generation)
        return True


class Speaker(NodeRunner):
    """Fake language model: each step gives one audio id to every loop."""

    def __init__(self) -> None:
        self.name = "LLM"
        self.keys: list[int] = []
        self._done: list[Done] = []
        self._count = 0

    def open(
        self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1, adapter: int = -1
    ) -> None: ...

    def close(self, handle: Handle) -> None: ...

    def submit(self, job: Job) -> None:
        """Queue a job. Prompts end at once, loops never end."""
        if job.loop is None:
            self._done.append(Done(job=job, outputs={"token": torch.tensor([FIRST_AUDIO_ID])}))
        else:
            self.keys.append(int(job.key))

    def pressure(self) -> Pressure:
        return Pressure(ready=1)

    def launch(self) -> Running | None:
        return self

    def collect(self, running: Running) -> StepResult:
        """Return one id for each loop."""
        done, self._done = self._done, []
        keys = np.array(self.keys, dtype=np.int64)
        self._count += 1
        ids = np.full(len(keys), FIRST_AUDIO_ID + self._count % IDS_PER_FRAME * 4096, dtype=np.int64)
        return StepResult(done=done, loop=LoopStep(keys=keys, ids=ids) if len(keys) else None)


class Silence(NodeRunner):
    """Fake codec: every window becomes a frame of silence."""

    def __init__(self) -> None:
        self.name = "snac_decoder"
        self.jobs: list[Job] = []
        self._frame = torch.zeros(FRAME_SAMPLES, dtype=torch.int16)

    def open(
        self, handle: Handle, sampling: SamplingParams, max_tokens: int, rows: int = 1, adapter: int = -1
    ) -> None: ...

    def close(self, handle: Handle) -> None: ...

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def pressure(self) -> Pressure:
        return Pressure(ready=len(self.jobs))

    def launch(self) -> Running | None:
        return self

    def collect(self, running: Running) -> StepResult:
        """Take all waiting windows."""
        jobs, self.jobs = self.jobs, []
        return StepResult(done=[Done(job=job, outputs={"pcm": self._frame}) for job in jobs])


def measure(streams: int, frames: int, folder: Path) -> dict[str, Any]:
    """Measure CPU time per id and per window with synchronous streams."""
    transport = TensorTransport("worker-0", 1, folder)
    post = Nowhere(transport)
    speaker, codec = Speaker(), Silence()
    outbox = Outbox("worker-0", 0, post, transport)
    executor = Executor(ORPHEUS, 0, {"LLM": speaker, "snac_decoder": codec}, outbox, transport, time.monotonic)
    homes = {"LLM": 0, "snac_decoder": 0}
    for handle in range(streams):
        executor.open(OpenRequest(handle=handle, params={}, seed=1, homes=homes, max_tokens=4096, outputs=["audio"]))
        executor.run(RunWalks(handle=handle, partition="SNAC", runs=[RunWalk(run=1, walk="snac_chunk")]))
        executor.run(RunWalks(handle=handle, partition="LLM", runs=[RunWalk(run=2, walk="decode", max_iters=1 << 30)]))
    # The decode walk starts from the value that the prefill kept.
    ids = windows = 0
    id_s = window_s = 0.0
    for step in range(IDS_PER_FRAME * (frames + 4)):
        start = time.process_time()
        executor.take(speaker.collect(speaker))
        outbox.flush()
        middle = time.process_time()
        count = len(codec.jobs)
        if count:
            executor.take(codec.collect(codec))
            outbox.flush()
        if step < IDS_PER_FRAME * 5:
            continue
        ids, id_s = ids + streams, id_s + middle - start
        windows, window_s = windows + count, window_s + time.process_time() - middle
    assert post.outputs >= windows > 0
    transport.close()
    total = id_s + window_s
    return {
        "streams": streams,
        "windows": windows,
        "us_per_id_with_its_share_of_windows": round(1e6 * total / ids, 2),
        "us_per_step_without_windows_done": round(1e6 * id_s / (ids / streams), 1),
        "us_per_window_done": round(1e6 * window_s / windows, 2),
    }


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8,32,64")
    parser.add_argument("--frames", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mstar-") as folder:
        for streams in map(int, options.streams.split(",")):
            print(json.dumps(measure(streams, options.frames, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
