"""Mixture-of-experts layers of Qwen3-Omni on one GPU, beside the bandwidth floor and the library's grouped GEMM.

Run from the repository root: `python bench/gpu_moe.py [--tokens 1,8,16,32,64,512,2048] [--sweep] [--out FILE]`. Weights
and routing are random. Several calls with different routings are in one CUDA graph. The floor of a call is the bytes of
its active experts over the bandwidth. Times are medians over replays, by CUDA events. Prints a table and JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import gpu_orpheus
import torch
from torch.nn.functional import linear, silu

from mstar_core.engine.device import prepare_device
from mstar_core.layers import MoESpec, SparseMoE
from mstar_core.layers.kernels import moe as kernels
from mstar_core.layers.kernels.moe import MoETiling

LAYERS: Final = {
    "thinker": MoESpec(width=2048, inner=768, experts=128, experts_per_token=8),
    "talker": MoESpec(width=1024, inner=384, experts=128, experts_per_token=6, shared_inner=768),
}
BANDWIDTH: Final = 4.3e12
"""Bytes per second that an H200 reads in practice."""

CALLS: Final = 8
"""Calls of one graph, each with other tokens."""

REPLAYS: Final = 30
SWEPT: Final = tuple(itertools.product((64, 128), (64, 128, 256), (3, 4, 6, 8), (4, 8)))
"""Block, step, stages and warps of decode tilings."""


def layer(spec: MoESpec, device: torch.device) -> SparseMoE:
    """Return a layer with random bfloat16 weights, its shared expert appended."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with device:
        moe = SparseMoE(spec).requires_grad_(False).eval()
        for parameter in moe.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    torch.set_default_dtype(before)
    moe.fuse_projections()
    return moe


def chosen(moe: SparseMoE, x: torch.Tensor) -> torch.Tensor:
    """Return the routed experts of each token, [T, k]."""
    spec = moe.spec
    found = kernels.route(linear(x, moe.gate.weight), spec.experts, spec.experts_per_token, x.dtype, 16)
    return found.experts.view(spec.experts_per_token, len(x)).T.long()


def floor_us(moe: SparseMoE, given: Sequence[torch.Tensor], bandwidth: float) -> float:
    """Return microseconds to read the active experts of a call once, the mean over the calls."""
    spec = moe.spec
    active = sum(len(chosen(moe, x).unique()) + spec.shared_parts for x in given) / len(given)
    return active * 3 * spec.inner * spec.width * 2 / bandwidth * 1e6


def measure(call: Callable[[torch.Tensor], object], given: Sequence[torch.Tensor]) -> float:
    """Measure microseconds per call, with the calls of all inputs in one graph."""
    replay = gpu_orpheus.captured(lambda: [call(x) for x in given])
    return gpu_orpheus.event_ms(replay, REPLAYS)["p50"] * 1e3 / len(given)


def grouped(moe: SparseMoE, given: Sequence[torch.Tensor]) -> float:
    """Measure the pair of grouped GEMMs and the activation of the routed experts, with the sorting done before."""
    made, top = [], moe.spec.experts_per_token
    gate_up, down = moe.experts.gate_up_proj.transpose(1, 2), moe.experts.down_proj.transpose(1, 2)
    for x in given:
        experts = chosen(moe, x).flatten()
        order = experts.argsort(stable=True)
        ends = torch.bincount(experts, minlength=len(moe.experts.down_proj)).cumsum(0).int()
        made.append((x[order // top].contiguous(), ends))

    def pair(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = torch._grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=1)
        return torch._grouped_mm(silu(gate) * up, down, offs=ends)

    replay = gpu_orpheus.captured(lambda: [pair(*each) for each in made])
    return gpu_orpheus.event_ms(replay, REPLAYS)["p50"] * 1e3 / len(made)


def row(name: str, moe: SparseMoE, tokens: int, bandwidth: float) -> dict[str, Any]:
    """Return one line of the report. us: router, routing, sort and both GEMMs; experts_us: without the router."""
    device, spec = moe.gate.weight.device, moe.spec
    given = [torch.randn(tokens, spec.width, device=device).bfloat16() for _ in range(CALLS)]
    columns = spec.experts + (1 if spec.shared_inner else 0)
    logits = {id(x): torch.randn(tokens, columns, device=device).bfloat16() for x in given}
    floor, whole = floor_us(moe, given, bandwidth), measure(moe.branch, given)

    def experts(x: torch.Tensor) -> torch.Tensor:
        weights = moe.experts.gate_up_proj, moe.experts.down_proj
        return kernels.expert_terms(x, logits[id(x)], *weights, spec.experts_per_token, shared=spec.shared_parts)

    return {
        "layer": name,
        "tokens": tokens,
        "us": round(whole, 2),
        "experts_us": round(measure(experts, given), 2),
        "floor_us": round(floor, 2),
        "ratio": round(whole / floor, 3),
        "grouped_mm_us": round(grouped(moe, given), 2),
    }


def sweep(moe: SparseMoE, tokens: int) -> list[dict[str, Any]]:
    """Measure decode tilings, the fastest first. Those that do not fit the device are left out."""
    device, spec, found = moe.gate.weight.device, moe.spec, []
    given = [torch.randn(tokens, spec.width, device=device).bfloat16() for _ in range(CALLS)]
    logits = torch.randn(tokens, spec.experts + (1 if spec.shared_inner else 0), device=device).bfloat16()
    weights = moe.experts.gate_up_proj, moe.experts.down_proj
    for block, step, stages, warps in SWEPT:
        tiling = MoETiling(block=block, step=step, rows=16, stages=stages, warps=warps)
        if spec.inner % step:
            tiling = MoETiling(block=block, step=spec.inner & -spec.inner, rows=16, stages=stages, warps=warps)

        def call(x: torch.Tensor, tiling: MoETiling = tiling) -> torch.Tensor:
            return kernels.expert_terms(
                x, logits, *weights, spec.experts_per_token, shared=spec.shared_parts, forced=(tiling, tiling)
            )

        try:
            spent = measure(call, given)
        except Exception as error:  # noqa: BLE001 too much shared memory, which each version of triton reports in its own way
            print(f"block {block} step {step} stages {stages} warps {warps}: {type(error).__name__}")
            torch.cuda.synchronize()
            continue
        found.append({"block": block, "step": tiling.step, "stages": stages, "warps": warps, "us": round(spent, 2)})
    return sorted(found, key=lambda each: each["us"])


def table(report: dict[str, Any]) -> str:
    """Print the figures as a table."""
    lines = ["layer    tokens      us  experts   floor  ratio  grouped_mm"]
    for each in report["layers"]:
        lines.append(
            f"{each['layer']:8} {each['tokens']:6} {each['us']:7.1f} {each['experts_us']:8.1f} {each['floor_us']:7.1f}"
            f" {each['ratio']:6.2f} {each['grouped_mm_us']:11.1f}"
        )
    for each in report.get("sweep", []):
        lines.append(f"{each['layer']} {each['tokens']} tokens: {each['best'][:3]}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,16,32,64,512,2048")
    parser.add_argument("--sweep", action="store_true", help="measure tilings of decode steps too")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="bytes per second of the floor")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    prepare_device(device)
    tokens = [int(each) for each in options.tokens.split(",")]
    report: dict[str, Any] = {"what": "mixtures of experts, random weights", "env": gpu_orpheus.environment()}
    report |= {"bandwidth": options.bandwidth, "layers": [], "sweep": []}
    for name, spec in LAYERS.items():
        moe = layer(spec, device)
        report["layers"] += [row(name, moe, each, options.bandwidth) for each in tokens]
        if options.sweep:
            few = [each for each in tokens if each <= kernels.FEW_TOKENS]
            report["sweep"] += [{"layer": name, "tokens": each, "best": sweep(moe, each)} for each in few]
        del moe
    print(json.dumps(report))
    print(table(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
