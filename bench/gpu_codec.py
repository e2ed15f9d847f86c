"""Codec steps on one GPU, by number of windows and beside a decode loop. Random weights in the official shapes.

Run from the repository root: `python bench/gpu_codec.py [--out FILE]`. Prints JSON: device time of a captured step,
host time of the engine's launch and collect, error against float64, and warm-up time. It also measures how much a
memory-bound loop of the size of a decode step (112 GEMMs of 32 rows with 5.6 GB of bfloat16 weights, one CUDA graph)
slows down if every seventh step has a codec step: on the loop's stream, on a stream of the codec, and with priority for
the loop's stream, also with smaller tiles.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu_codec_tiles import CODEC, KEEP, OFFSET, captured_us, decoder, errors
from mstar_core.engine.base import Handle, Job, JobKey
from mstar_core.engine.device import prepare_device
from mstar_core.engine.stateless.engine import StatelessEngine
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_orpheus.plugin import ORPHEUS
from mstar_orpheus.vocoder.fused_decoder import FusedDecoder
from mstar_orpheus.vocoder.node import Vocoder
from mstar_orpheus.vocoder.tiling import Tile, tile

WINDOWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
NUMBERS: dict[str, float | int | bool] = {
    "$first": False,
    "$last": False,
    "$param:flush": False,
    "$param:noise": 1,
    "$param:seed": 5,
}
IDS_PER_WINDOW, STEPS, PRODUCTS = 7, 210, 112


class Feeder:
    """Worker loop for the codec: a number of streams with one window each per step."""

    def __init__(self, vocoder: Vocoder, streams: int) -> None:
        device = torch.device("cuda", 0)
        node = ORPHEUS.node("snac_decoder")
        self.engine = StatelessEngine(node, vocoder, device=device, dtype=torch.float32, max_batch=64, lookahead=1)
        self.windows = torch.randint(OFFSET, OFFSET + 4096, (streams, 28))
        self.count = 0
        self.flight: list[Any] = []
        self.launch_us: list[float] = []
        self.collect_us: list[float] = []
        for handle in range(streams):
            self.engine.open(Handle(handle), SamplingParams(), 1)

    def launch(self) -> None:
        """Run one step of every stream, and collect the oldest step if it is done."""
        for handle in range(len(self.windows)):
            job = Job(
                key=JobKey(self.count),
                handle=Handle(handle),
                inputs={"window": self.windows[handle]},
                numbers=NUMBERS | {"$step": self.count},
                outputs=("pcm",),
            )
            self.engine.submit(job)
            self.count += 1
        start = time.perf_counter()
        self.flight.append(self.engine.launch())
        self.launch_us.append((time.perf_counter() - start) * 1e6)

    def collect(self, *, waits: bool) -> None:
        """Collect finished steps, or all."""
        while self.flight and (waits or self.engine.is_done(self.flight[0])):
            torch.cuda.synchronize() if waits else None
            start = time.perf_counter()
            result = self.engine.collect(self.flight.pop(0))
            self.collect_us.append((time.perf_counter() - start) * 1e6)
            assert len(result.done) == len(self.windows) and not result.failed


def by_windows(vocoder: Vocoder) -> dict[str, Any]:
    """Measure device and host time of a step for each number of windows."""
    found = {}
    for rows in WINDOWS:
        window = torch.randint(OFFSET, OFFSET + 4096, (rows, 28), device="cuda")
        facts = torch.ones((3, rows), dtype=torch.int64, device="cuda")
        device_us = captured_us(functools.partial(vocoder._middle, window, facts), 3)
        feeder = Feeder(vocoder, rows)
        for _ in range(30):
            feeder.launch()
            feeder.collect(waits=True)
        found[str(rows)] = {
            "device_ms": round(device_us / 1e3, 4),
            "launch_us": round(statistics.median(feeder.launch_us[5:]), 1),
            "collect_us": round(statistics.median(feeder.collect_us[5:]), 1),
        }
    return found


def decode_loop(stream: torch.cuda.Stream) -> Callable[[], None]:
    """A memory-bound step as a CUDA graph on a stream."""
    weights = [torch.randn(3072, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(PRODUCTS)]
    x = torch.randn(32, 3072, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(32, 8192, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, weights[0], out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for weight in weights:
            torch.mm(x, weight, out=out)
    return graph.replay


def beside(vocoder: Vocoder, streams: int, main: torch.cuda.Stream, *, is_apart: bool) -> dict[str, float]:
    """Measure milliseconds per loop step with a codec step of `streams` windows every seventh step (0: none)."""
    with torch.cuda.stream(main):
        replay = decode_loop(main)
        feeder = Feeder(vocoder, streams)
        if not is_apart:
            feeder.engine._stream = main
        if streams:
            feeder.launch()  # the first step of a graph uploads it
            feeder.collect(waits=True)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        for _ in range(10):
            replay()
        marks[0].record()
        for step, mark in enumerate(marks[1:]):
            if streams and step % IDS_PER_WINDOW == 0:
                feeder.collect(waits=False)
                if len(feeder.flight) < 2:
                    feeder.launch()
            replay()
            mark.record()
            if step >= 2:
                marks[step - 1].synchronize()  # the worker is at most two steps ahead
        torch.cuda.synchronize()
        feeder.collect(waits=True)
    times = sorted(before.elapsed_time(after) for before, after in itertools.pairwise(marks))
    return {
        "mean": round(statistics.mean(times), 4),
        "p50": round(times[STEPS // 2], 4),
        "p95": round(times[int(STEPS * 0.95)], 4),
        "max": round(times[-1], 4),
        "codec_steps": len(feeder.launch_us),
    }


def short_tile(kind: str, rows: int, columns: int) -> Tile:
    """Return the usual tile, limited to tiles with a short run time."""
    cut = tile(kind, rows, columns)
    return cut if cut.bm * cut.bn <= 64 * 64 else Tile(bm=64, bn=64)


def environment() -> dict[str, Any]:
    """Return the environment of the measurement."""
    import triton

    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "nvidia_smi": smi,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare_device(torch.device("cuda", 0))
    report: dict[str, Any] = {"what": "SNAC 24 kHz shapes, random weights, emitted frame", "env": environment()}
    snac = decoder()
    vocoder = Vocoder(snac, OFFSET).eval()
    start = time.perf_counter()
    vocoder.warm_up()
    torch.cuda.synchronize()
    report["warm_up_s"] = round(time.perf_counter() - start, 2)
    report["idle_s"] = []
    is_more = True
    while is_more:
        start = time.perf_counter()
        is_more = vocoder.idle()
        torch.cuda.synchronize()
        report["idle_s"].append(round(time.perf_counter() - start, 3))
    start = time.perf_counter()
    Vocoder(snac, OFFSET).eval().warm_up()
    report["warm_up_again_s"] = round(time.perf_counter() - start, 2)
    report["errors"] = errors(snac, ("split",))
    report["windows"] = by_windows(vocoder)
    print(json.dumps(report), flush=True)
    small = Vocoder(snac, OFFSET).eval()
    small._fused = FusedDecoder(snac, OFFSET, tiles=short_tile)
    small.warm_up()
    while small.idle():
        pass
    plain, first = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    report["beside_ms"] = {"alone": beside(vocoder, 0, plain, is_apart=True)}
    for streams in (32, 64):
        for name, stream, is_apart in (("same", plain, False), ("own", plain, True), ("priority", first, True)):
            report["beside_ms"][f"{name}_{streams}"] = beside(vocoder, streams, stream, is_apart=is_apart)
        report["beside_ms"][f"priority_short_tiles_{streams}"] = beside(small, streams, first, is_apart=True)
    report["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    for name in ("warm_up_s", "idle_s", "warm_up_again_s", "errors", "windows", "beside_ms"):
        print(name, json.dumps(report[name]))


assert KEEP[1] - KEEP[0] == CODEC.frame_samples

if __name__ == "__main__":
    with torch.inference_mode():
        main()
