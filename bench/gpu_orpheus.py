"""Decode steps of Orpheus' language model on one GPU, with random bfloat16 weights in the official 3B shapes.

Run from the repository root: `python bench/gpu_orpheus.py [--batches 1,8,32,64] [--steps 574] [--out FILE]`. The engine
is driven as the worker drives it, one step ahead. Prints JSON: per batch the device time of a step by CUDA events, the
wall time of a step with the host's loop around it, the host's own time in launch and collect, and the share of steps
that were replayed; also what capturing cost, and SNAC windows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.cuda_graphs.decode import DecodeSteps
from mstar_core.engine.device import prepare_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.engine.steps.attention import AttentionMetadata
from mstar_core.graph.declare.nodes import KV_CACHE, KVSpec, NodeSpec, Sampling
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import AttentionSpec, Llama3Scaling, RotarySpec
from mstar_core.layers.linear import fuse_projections
from mstar_orpheus.llama import Llama, LlamaConfig
from mstar_orpheus.vocoder.node import Vocoder
from mstar_orpheus.vocoder.snac import Snac, SnacConfig

VOCAB, LAYERS, PROMPT = 156940, 28, 40
SAMPLING = SamplingParams(temperature=0.6, top_p=0.8, repetition_penalty=1.3, seed=7)
SPEC = NodeSpec(
    name="LLM",
    engine=KV_CACHE,
    ports={"tokens": "i64[n]", "token": "i64[1]"},
    kv=KVSpec(layers=LAYERS, kv_heads=8, head_dim=128),
    sampling=Sampling(port="token"),
)
CONFIG = LlamaConfig(
    vocab=VOCAB,
    mlp=8192,
    layers=LAYERS,
    norm_eps=1e-5,
    ties=True,
    attention=AttentionSpec(width=3072, heads=24, kv_heads=8, head_dim=128),
    rotary=RotarySpec(width=128, base=500000.0, scaling=Llama3Scaling(factor=32, low=1, high=4, original_length=8192)),
)
CODEC = SnacConfig(latent=768, width=1024, rates=(8, 8, 4, 2), codebook_size=4096, codebook_dim=8, sample_rate=24000)


def random_llama(device: torch.device) -> Llama:
    """Build the decoder on the device, with normal weights of deviation 0.02."""
    with torch.device("meta"):
        module = Llama(CONFIG, has_head=False)
    module = module.to(torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    from mstar_core.layers import frequencies

    module.model.rotary.frequencies = frequencies(CONFIG.rotary).to(device)
    fuse_projections(module)
    return module.eval()


class Clock:
    """Worker loop around an engine that measures its parts."""

    def __init__(self, engine: KVCacheEngine) -> None:
        self.engine = engine
        self.launch_s: list[float] = []
        self.collect_s: list[float] = []
        self.wait_s: list[float] = []
        self.ends: list[float] = []
        self.rows: list[int] = []

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run until no work is left or `is_over` returns true."""
        flight: list[Any] = []
        while not is_over():
            start = time.perf_counter()
            running = self.engine.launch()
            self.launch_s.append(time.perf_counter() - start)
            if running is not None:
                flight.append(running)
            if not flight:
                return
            if len(flight) > 1 or running is None:
                self._collect(flight.pop(0))
        while flight:
            self._collect(flight.pop(0))

    def _collect(self, running: Any) -> None:
        start = time.perf_counter()
        for arriving in (*(drawn.host for drawn in running.drawn), *running.copies):
            arriving.wait()
        waited = time.perf_counter()
        result = self.engine.collect(running)
        assert not result.failed, result.failed
        self.wait_s.append(waited - start)
        self.collect_s.append(time.perf_counter() - waited)
        self.ends.append(time.perf_counter())
        self.rows.append(len(result.loop.ids) if result.loop is not None else 0)


def decode(engine: KVCacheEngine, graphs: DecodeSteps | None, batch: int, steps: int, first: int) -> dict[str, Any]:
    """Measure `batch` concurrent requests from prompt to end."""
    for handle in range(first, first + batch):
        engine.open(Handle(handle), SAMPLING, PROMPT + steps + 8)
        ids = torch.randint(0, 128000, (PROMPT,), generator=torch.Generator().manual_seed(handle))
        engine.submit(Job(key=JobKey(2 * handle), handle=Handle(handle), inputs={"tokens": ids}, outputs=("token",)))
        loop = LoopSpec(max_iters=steps, carry={"token": "token"}, stop_port="token", stop_ids=())
        engine.submit(Job(key=JobKey(2 * handle + 1), handle=Handle(handle), loop=loop, outputs=("token",)))
    before = (graphs.counts.hits, graphs.counts.misses) if graphs else (0, 0)
    clock = Clock(engine)
    start = time.perf_counter()
    clock.run(lambda: False)
    torch.cuda.synchronize()
    for handle in range(first, first + batch):
        engine.close(Handle(handle))
    full = [i for i in range(1, len(clock.ends)) if clock.rows[i] == batch and clock.rows[i - 1] == batch]
    gaps = [(clock.ends[i] - clock.ends[i - 1]) * 1e3 for i in full[5:]]
    hits, misses = (graphs.counts.hits - before[0], graphs.counts.misses - before[1]) if graphs else (0, 0)
    return {
        "batch": batch,
        "steps": len(gaps),
        "step_ms": spread(gaps),
        "ids_per_s": round(batch * 1e3 / statistics.mean(gaps), 1),
        "launch_us": spread([value * 1e6 for value in clock.launch_s[20:]]),
        "collect_us": spread([value * 1e6 for value in clock.collect_s[20:]]),
        "wait_us": spread([value * 1e6 for value in clock.wait_s[20:]]),
        "all_s": round(clock.ends[-1] - start, 3),
        "first_ids_ms": round((clock.ends[full[0]] - start) * 1e3, 2) if full else None,
        "graph_hits": hits,
        "graph_misses": misses,
        "pages_left": engine.memory().pages_used,
    }


def replays(graphs: DecodeSteps, context: int, repeats: int = 60) -> dict[str, Any]:
    """Measure device time of a replay of each bucket and of its parts, with all rows at `context` tokens."""
    import numpy as np

    found = {}
    attention: Any = graphs.node.attention
    for rows in graphs.sizes:
        bucket = graphs.buckets[(rows,)]
        tables = np.zeros((rows, graphs.node.pages), dtype=np.int32)
        pages = -(-(context + 1) // 16)
        if rows * pages >= attention.pools[0].shape[0] - 1:
            continue
        tables[:, :pages] = np.arange(rows * pages).reshape(rows, pages)
        bucket.buffers.prepare(AttentionMetadata.of(np.arange(rows), np.full(rows, context), tables))
        logits = torch.randn(rows, VOCAB, device="cuda") * 2
        parts = {"step": bucket.graph.replay, "draw": captured(lambda b=bucket, x=logits: b.draw(x))}
        found[str(rows)] = {name: event_ms(call, repeats) for name, call in parts.items()}
        bucket.park()
    return found


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Capture a call as a CUDA graph."""
    with torch.inference_mode():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    return graph.replay


def event_ms(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Measure milliseconds of each of several back-to-back calls, by CUDA events."""
    for _ in range(5):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return spread([a.elapsed_time(b) for a, b in itertools.pairwise(marks)])


def codec(device: torch.device) -> dict[str, Any]:
    """Measure SNAC windows of four frames: eager, and captured."""
    with device:
        vocoder = Vocoder(Snac(CODEC), 128266).eval().requires_grad_(False)
    found = {}
    for rows in (1, 8, 32, 64):
        window = torch.randint(128266, 128266 + 4096, (rows, 28), device=device)
        with torch.inference_mode():
            whole = event_ms(lambda w=window: vocoder.decode(w, None), 20)
            middle = event_ms(lambda w=window: vocoder.decode(w, None, (2048, 4096)), 20)
        graph = captured(lambda w=window: vocoder.decode(w, None, (2048, 4096)))
        found[str(rows)] = {"whole": whole, "middle": middle, "middle_captured": event_ms(graph, 20)}
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Return median, 95th percentile, minimum, maximum and count."""
    if not values:
        return {"n": 0}
    ordered = sorted(values)
    cuts = {"p50": len(ordered) // 2, "p95": int(len(ordered) * 0.95), "min": 0, "max": len(ordered) - 1}
    return {name: round(ordered[at], 4) for name, at in cuts.items()} | {"n": len(ordered)}


def environment() -> dict[str, Any]:
    """Return the environment of the measurement."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    import flashinfer
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "nvidia_smi": smi,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "flashinfer": flashinfer.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--steps", type=int, default=574)
    parser.add_argument("--eager", action="store_true", help="also measure each batch without CUDA graphs, 60 steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    prepare_device(device)
    report: dict[str, Any] = {"what": "Orpheus 3B shapes, random bf16", "env": environment(), "phases_s": {}}

    def phase(name: str, since: float) -> float:
        torch.cuda.synchronize()
        report["phases_s"][name] = round(time.perf_counter() - since, 2)
        return time.perf_counter()

    def save() -> None:
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")

    now = time.perf_counter()
    module = random_llama(device)
    now = phase("weights (random, on the device)", now)
    batches = [int(each) for each in options.batches.split(",")]
    settings = KVSettings(
        device=device,
        dtype=torch.bfloat16,
        num_pages=max(batches) * 44 + 64,
        page_size=16,
        max_slots=max(batches),
        max_seq_len=2048,
        vocab=VOCAB,
        token_budget=2048,
        attention="flashinfer",
        lookahead=1,
        prefix_cache=False,
        graphs=CaptureSizes(decode=(1, 8, 32, 64)),
    )
    engine = KVCacheEngine(SPEC, module, settings)
    phase("engine and graphs", now)
    node_graphs = engine._runner.graphs
    assert node_graphs is not None and node_graphs.decode is not None
    graphs = node_graphs.decode
    report["graphs"] = {"sizes": graphs.sizes, "capture_s": round(graphs.counts.capture_s, 2)}
    report["kernels"] = engine._runner._attention.origins
    decode(engine, graphs, 1, 40, 100_000)
    report["replay_ms_at_337"] = replays(graphs, 337)
    print(json.dumps(report, indent=1), flush=True)
    save()
    report["decode"] = []
    for batch in batches:
        report["decode"].append(decode(engine, graphs, batch, options.steps, 1000 * batch))
        print(json.dumps(report["decode"][-1]), flush=True)
        save()
    if options.eager:
        node_graphs.decode = None
        report["eager"] = [decode(engine, None, batch, 60, 500_000 + 1000 * batch) for batch in batches]
        print(json.dumps(report["eager"]), flush=True)
    report["snac_ms"] = codec(device)
    report["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    save()
    print(json.dumps({key: report[key] for key in ("phases_s", "graphs", "snac_ms", "memory_gb")}, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
