"""Qwen3-Omni's talker step on one GPU: talker, code predictor and all draws in one CUDA graph, and its parts.

Run from the repository root: `python bench/gpu_talker.py [--batches 1,8,16,32] [--steps 300] [--out FILE]`. Weights are
random bfloat16 in the official shapes. The engine is driven as the worker drives it, one step ahead, with all text ids
there from the start. Per batch: device time of the captured step and of each part in a graph of its own, by CUDA
events; wall time of a step with the host's loop around it; the bound of the step. Prints lines, then JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import gpu_orpheus
import torch

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.cuda_graphs.decode import DecodeStep
from mstar_core.engine.device import prepare_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.graph import Attend, GraphNode, Loop
from mstar_core.graph.compile.resident import loop_ports
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers.linear import fuse_projections
from mstar_core.weights.building import building
from mstar_core.weights.random_fill import fill_randomly
from mstar_qwen3omni.checkpoint.config import OmniConfig
from mstar_qwen3omni.graph import build
from mstar_qwen3omni.talker.talker import Talker

CONFIG: Final = OmniConfig()
SAMPLING: Final = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05, seed=7)
PREDICTOR: Final = {"temperature": 1.0, "top_k": 50, "top_p": 0.8}
STATES: Final = ("code0", "last_hidden", "text_ended")
PROMPT, REPEATS = 200, 60
BOUNDS_MS: Final = {
    "H100": {1: 1.0, 8: 1.6, 16: 2.1, 32: 2.7},
    "H200": {1: 0.70, 8: 1.1, 16: 1.5, 32: 1.9},
}
"""Weights read once per step, uniform routing, by device and sequences: performance targets, section 2.3."""


def random_talker(device: torch.device) -> Talker:
    """Build the talker on the device with random weights."""
    with building(device, torch.bfloat16):
        module = Talker(CONFIG)
    fill_randomly(module, 1)
    module.eval().requires_grad_(False)
    fuse_projections(module)
    return module


def make_engine(module: Talker, batches: list[int], steps: int, device: torch.device) -> KVCacheEngine:
    """Build the talker's engine with one captured step for each batch."""
    loop = build(CONFIG).talker["talker_decode"]
    assert isinstance(loop, Loop) and isinstance(loop.body, GraphNode)
    length = PROMPT + steps + 32
    settings = KVSettings(
        device=device,
        dtype=torch.bfloat16,
        num_pages=(max(batches) + 1) * (length // 16 + 2),
        page_size=16,
        max_slots=max(batches),
        max_seq_len=length,
        vocab=CONFIG.talker.vocab,
        token_budget=2048,
        attention="flashinfer",
        lookahead=1,
        prefix_cache=False,
        graphs=CaptureSizes(decode=tuple(batches)),
        loop=loop_ports(loop, loop.body),
    )
    return KVCacheEngine(loop.body.spec, module, settings)


def submit(engine: KVCacheEngine, handle: int, steps: int) -> None:
    """Open one request: a prompt, the opening, and a loop whose text has come."""
    ids = torch.randint(0, 150_000, (PROMPT + steps,), generator=torch.Generator().manual_seed(handle))
    engine.open(Handle(handle), SAMPLING, PROMPT + steps + 16)
    keys = [JobKey(10 * handle + index) for index in range(3)]
    engine.submit(Job(key=keys[0], handle=Handle(handle), inputs={"tokens": ids[:PROMPT]}, sample=False))
    opening = {"text": ids[:1], "$param:voice": torch.tensor(handle % 3)}
    engine.submit(Job(key=keys[1], handle=Handle(handle), inputs=opening, outputs=STATES, attend=Attend(tokens=6)))
    loop = LoopSpec(
        max_iters=steps,
        carry={name: name for name in STATES},
        stop_port="code0",
        emit=("frame",),
        feed="text",
        after_end="empty",
    )
    given = {f"$param:code_predictor_{name}": torch.tensor(value) for name, value in PREDICTOR.items()}
    engine.submit(
        Job(key=keys[2], handle=Handle(handle), inputs=given, outputs=STATES, attend=Attend(tokens=1), loop=loop)
    )
    engine.feed(keys[2], ids[PROMPT:].tolist(), True)


def parts(module: Talker, step: DecodeStep, rows: int) -> dict[str, float]:
    """Measure milliseconds of each part of a step, each in a graph of its own."""
    device = module.codec_head.weight.device
    states = torch.randn(rows, CONFIG.talker.width, device=device).bfloat16()
    code0, text = torch.arange(rows, device=device), torch.arange(rows, device=device)
    uniform = torch.rand(rows, CONFIG.groups - 1, device=device)
    rule = [torch.full((rows,), value, device=device) for value in PREDICTOR.values()]
    ended = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    frame = torch.zeros(rows, CONFIG.groups, dtype=torch.int64, device=device)
    logits = torch.randn(rows, CONFIG.talker.vocab, device=device).bfloat16()
    seen: list[torch.Tensor] = []

    def first_codes(_: int, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores)
        return code0

    def layers() -> None:
        step.buffers.reset()
        module.model(states, step.buffers.device["positions"], step.buffers.view)

    calls: dict[str, Callable[[], object]] = {
        "predictor": lambda: module.predict(states, code0, uniform, rule[0], rule[1], rule[2]),
        "predictor without draws": lambda: module.code_predictor.unroll(states, states, first_codes),
        "layers": layers,
        "inputs": lambda: module.frame_vectors(frame) + module.text_vectors(text, ended)[0],
        "head": lambda: module.head(states),
        "draw of code 0": lambda: step._draw(logits),
    }
    found = {}
    for name, call in calls.items():
        found[name] = gpu_orpheus.event_ms(gpu_orpheus.captured(call), REPEATS)["p50"]
        seen.clear()
    return found


def measure(engine: KVCacheEngine, module: Talker, rows: int, steps: int, first: int) -> dict[str, Any]:
    """Measure `rows` requests at once: the loop, then replays of the step as the last one left it."""
    handles = range(first, first + rows)
    for handle in handles:
        submit(engine, handle, steps)
    clock, start = gpu_orpheus.Clock(engine), time.perf_counter()
    clock.run(lambda: clock.rows.count(rows) >= steps - 20)
    full = [at for at in range(1, len(clock.ends)) if clock.rows[at] == rows == clock.rows[at - 1]]
    gaps = [(clock.ends[at] - clock.ends[at - 1]) * 1e3 for at in full[5:]]
    node_graphs = engine._runner.graphs
    assert node_graphs is not None and node_graphs.decode is not None
    assert gaps, "no step held the whole batch"
    graphs = node_graphs.decode
    step = graphs.buckets[(rows,)]
    replay = gpu_orpheus.event_ms(step.run, REPEATS)
    found = {
        "batch": rows,
        "steps": len(gaps),
        "replay_ms": replay,
        "parts_ms": parts(module, step, rows),
        "step_ms": gpu_orpheus.spread(gaps),
        "frames_per_s": round(rows * 1e3 / statistics.mean(gaps), 1),
        "audio_s_per_s": round(rows * 80 / statistics.mean(gaps), 1),
        "bound_ms": bound(rows),
        "launch_us": gpu_orpheus.spread([value * 1e6 for value in clock.launch_s[20:]]),
        "collect_us": gpu_orpheus.spread([value * 1e6 for value in clock.collect_s[20:]]),
        "all_s": round(time.perf_counter() - start, 2),
    }
    for handle in handles:
        engine.close(Handle(handle))
    step.park()
    return found


def bound(rows: int) -> float | None:
    """Return the bound of a step on this device in milliseconds, if it is known."""
    name = torch.cuda.get_device_name()
    return next((bounds.get(rows) for device, bounds in BOUNDS_MS.items() if device in name), None)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8,16,32")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    prepare_device(device)
    batches = [int(each) for each in options.batches.split(",")]
    start = time.perf_counter()
    module = random_talker(device)
    loaded = time.perf_counter()
    engine = make_engine(module, batches, options.steps, device)
    report: dict[str, Any] = {
        "what": "talker step of Qwen3-Omni, random bf16 weights",
        "env": gpu_orpheus.environment(),
        "phases_s": {"weights": round(loaded - start, 2), "capture": round(time.perf_counter() - loaded, 2)},
        "batches": [],
    }
    measure(engine, module, batches[0], 40, 100_000)  # the first prompts compile kernels
    for rows in batches:
        report["batches"].append(measure(engine, module, rows, options.steps, 1000 * rows))
        print(json.dumps(report["batches"][-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    report["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
