"""Linear layers of Orpheus' decode step on one GPU: the small-M GEMM beside cuBLAS, and the whole captured step.

Run from the repository root: `python bench/gpu_linear.py [--rows 1,2,4,8,16,32,64] [--no-step] [--out FILE]`. Each
GEMM of a class has its own random weights, with at least 300 MB in one CUDA graph, so that no weight is read from a
cache. Times are medians over replays, by CUDA events. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import gpu_orpheus
import torch
from torch.nn.functional import linear

from mstar_core.engine.cuda_graphs.cache import CaptureSizes
from mstar_core.engine.device import prepare_device
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.layers import linear as layer
from mstar_core.layers.linear import LinearWeight, elementwise_kernels
from mstar_core.layers.quantize import quantize, to_float8

CLASSES: Final = {
    "qkv": (5120, 3072),
    "o": (3072, 3072),
    "gate-up": (16384, 3072),
    "down": (3072, 8192),
    "head": (156940, 3072),
}
"""Name -> outputs and inputs. gate-up includes the activation, which is a separate kernel with cuBLAS."""

LEAST_BYTES: Final = 300 << 20
MANY: Final = (128, 256, 512, 2048)
REPLAYS: Final = 30


def products(rows: Sequence[int]) -> list[dict[str, Any]]:
    """Measure one GEMM of each class, kind of weights and number of rows."""
    found = []
    for name, (outputs, inputs) in CLASSES.items():
        count = max(2, -(-LEAST_BYTES // (outputs * inputs)))
        plain = [LinearWeight(torch.randn(outputs, inputs, device="cuda").bfloat16() * 0.02) for _ in range(count)]
        small = [to_float8(each.values) for each in plain]
        for each in rows:
            x = torch.randn(each, inputs, device="cuda").bfloat16()
            library = over(plain, by_library, name, x)
            found.append(row(name, "bf16", each, plain[0], over(plain, by_layer, name, x), library))
            found.append(row(name, "fp8", each, small[0], over(small, by_layer, name, x), library))
        del plain, small
    return found


def by_library(name: str, x: torch.Tensor, weights: LinearWeight) -> torch.Tensor:
    """Run the GEMM by cuBLAS, and the activation in a separate kernel."""
    out = linear(x, weights.values)
    return elementwise_kernels().gated_activation(out) if name == "gate-up" else out


def by_layer(name: str, x: torch.Tensor, weights: LinearWeight) -> torch.Tensor:
    """Run the GEMM as the layers do."""
    if name == "gate-up":
        return layer.project_gated(x, weights)
    return layer.project(x, weights) if name == "head" else layer.project_partial(x, weights)


Product = Callable[[str, torch.Tensor, LinearWeight], torch.Tensor]


def over(weights: list[LinearWeight], call: Product, name: str, x: torch.Tensor) -> float:
    """Measure microseconds per call, with all calls in one CUDA graph."""
    replay = gpu_orpheus.captured(lambda: [call(name, x, each) for each in weights])
    return gpu_orpheus.event_ms(replay, REPLAYS)["p50"] * 1e3 / len(weights)


def row(name: str, kind: str, rows: int, weights: LinearWeight, own_us: float, library_us: float) -> dict[str, Any]:
    """Return one line of the report. library_us: cuBLAS with bfloat16 weights, for every kind."""
    size = weights.values.numel() * weights.values.element_size()
    return {
        "class": name,
        "kind": kind,
        "rows": rows,
        "us": round(own_us, 2),
        "gb_per_s": round(size / own_us / 1e3),
        "cublas_bf16_us": round(library_us, 2),
        "is_small_m": rows <= layer.SMALL_M,
    }


def step(module: Any, device: torch.device) -> dict[str, Any]:
    """Measure milliseconds of a captured decode step with all rows at 337 tokens, and of its sampling."""
    settings = KVSettings(
        device=device,
        dtype=torch.bfloat16,
        num_pages=64 * 44 + 64,
        page_size=16,
        max_slots=64,
        max_seq_len=2048,
        vocab=gpu_orpheus.VOCAB,
        token_budget=2048,
        attention="flashinfer",
        lookahead=1,
        prefix_cache=False,
        graphs=CaptureSizes(decode=(1, 8, 32, 64)),
    )
    engine = KVCacheEngine(gpu_orpheus.SPEC, module, settings)
    node_graphs = engine._runner.graphs
    assert node_graphs is not None and node_graphs.decode is not None
    graphs = node_graphs.decode
    return {"capture_s": round(graphs.counts.capture_s, 2), "replay_ms": gpu_orpheus.replays(graphs, 337)}


def steps(device: torch.device) -> dict[str, Any]:
    """Measure the step with cuBLAS, with the layers' kernels, and with float8 weights."""
    module, few = gpu_orpheus.random_llama(device), layer.SMALL_M
    found: dict[str, Any] = {}
    # With a threshold of 0 rows, every GEMM uses the library.
    layer.SMALL_M = 0
    found["cublas"] = step(module, device)
    layer.SMALL_M = few
    found["bf16"] = step(module, device)
    started = time.perf_counter()
    report = quantize(module, "fp8")
    torch.cuda.synchronize()
    found["quantize_s"] = round(time.perf_counter() - started, 2)
    found["quantization"] = dataclasses.asdict(report)
    found["fp8"] = step(module, device)
    return found


def table(report: dict[str, Any]) -> str:
    """Print the figures as a table."""
    lines = ["class    kind  rows      us   GB/s  cuBLAS bf16 us"]
    for each in report["products"]:
        lines.append(
            f"{each['class']:8} {each['kind']:5} {each['rows']:4} {each['us']:7.1f} {each['gb_per_s']:6}"
            f" {each['cublas_bf16_us']:9.1f}"
        )
    for kind in ("cublas", "bf16", "fp8"):
        if kind in report.get("step", {}):
            replay = report["step"][kind]["replay_ms"]
            lines.append(f"step {kind:7}" + ", ".join(f"{n} rows {r['step']['p50']:.3f} ms" for n, r in replay.items()))
    return "\n".join(lines)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64")
    parser.add_argument("--no-step", action="store_true", help="GEMMs only")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    prepare_device(device)
    rows = [int(each) for each in options.rows.split(",")]
    report: dict[str, Any] = {"what": "Orpheus 3B shapes, random weights", "env": gpu_orpheus.environment()}
    report["products"] = products([*rows, *MANY])
    if not options.no_step:
        report["step"] = steps(device)
    print(json.dumps(report))
    print(table(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
