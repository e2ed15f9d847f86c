"""GEMMs of a frame of V-JEPA 2-AC on one GPU: tiles multicast within clusters beside Triton and the library.

Run from the repository root: `python -m bench.gpu_frame_products [--cached 1 9 23] [--out FILE]`. First the largest
difference of each kind of product from float64, by rows; then each product by itself, over weights that no cache holds,
in one graph; then all layers of the predictor in one graph behind so many frames, with each kind of product by either
kernel; cuts of the product that are written in `TRIALS`. Prints lines, then JSON. Exit code 1: a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.functional import linear as library

from bench.serving.figures import head
from mstar_core.engine.attention.kernels.split_kv import PagedDenseAttention
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.device import prepare_device, resolve_device
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape
from mstar_core.weights.building import building
from mstar_vjepa2.checkpoint.config import RELEASED_AC
from mstar_vjepa2.kernels import gemm, multicast_gemm
from mstar_vjepa2.nodes import linear
from mstar_vjepa2.nodes.blocks import MixCached, stack, sum_norm
from mstar_vjepa2.nodes.rotary import Rotary3D

TOKENS: Final = RELEASED_AC.encoder.frame_tokens + RELEASED_AC.conditions
WIDTH, HEADS, INNER = RELEASED_AC.predictor.width, RELEASED_AC.predictor.heads, RELEASED_AC.predictor.inner
LAYERS: Final = RELEASED_AC.predictor.layers
PAGE: Final = TOKENS + 1
SHAPES: Final = {"turned": (3 * WIDTH, WIDTH), "gelu": (INNER, WIDTH), "out": (WIDTH, WIDTH), "down": (WIDTH, INNER)}
"""Kind -> outputs and inputs."""

LIMIT: Final = 0.01
"""Of ‖result - reference‖ / ‖reference‖: bfloat16 is between 0.001 and that."""

TRIALS: Final[Mapping[str, tuple[tuple[int, int, int, int, int], ...]]] = {
    "turned": ((1, 2, 4, 8, 1), (1, 2, 2, 8, 1), (1, 2, 4, 6, 1), (2, 3, 2, 8, 1)),
    "gelu": ((2, 3, 2, 8, 1), (2, 3, 1, 8, 1), (2, 3, 2, 6, 1), (1, 2, 2, 8, 1)),
    "out": ((1, 2, 4, 8, 3), (1, 2, 2, 8, 3), (1, 2, 4, 6, 3), (1, 3, 2, 8, 2)),
    "down": ((1, 2, 4, 8, 3), (1, 2, 2, 8, 3), (1, 2, 4, 6, 3), (2, 3, 2, 8, 4)),
}
"""Kind -> cuts that are timed by themselves: instructions high, blocks above and across, stages, slices of inputs."""


@dataclass(slots=True)
class Case:
    """Inputs of a GEMM. pool: receives keys and values."""

    x: Tensor
    rotation: tuple[Tensor, Tensor]
    pool: Tensor
    places: Tensor

    def run(self, kernels: Any, kind: str, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the result in float32 with partial sums added; the queries of rotated ones."""
        if kind == "turned":
            return kernels.qkv_rotary(self.x, weight, bias, self.rotation, self.pool, self.places)
        if kind == "gelu":
            return kernels.linear(self.x, weight, bias, is_gelu=True)
        return kernels.split_k(self.x, weight)


def case(inputs: int, rows: int = TOKENS) -> Case:
    """Return random rows of a frame."""
    with torch.inference_mode():
        rotation = Rotary3D(WIDTH // HEADS).to("cuda").of_ids(torch.arange(rows, device="cuda") % TOKENS, 16, 16)
    pool = torch.zeros(3, 2, PAGE, HEADS, WIDTH // HEADS, device="cuda", dtype=torch.bfloat16)
    places = 2 * PAGE + torch.arange(rows, device="cuda")
    return Case(torch.randn(rows, inputs, device="cuda").bfloat16(), rotation, pool, places)


def weights_of(kind: str) -> tuple[Tensor, Tensor]:
    """One layer's, in bfloat16."""
    outputs, inputs = SHAPES[kind]
    return torch.randn(outputs, inputs, device="cuda").bfloat16() / 32, torch.randn(outputs, device="cuda").bfloat16()


def reference(given: Case, kind: str, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Return the expected result of `Case.run` and the expected pool, in float64."""
    found = given.x.double() @ weight.double().T
    if kind in ("out", "down"):
        return [found]
    found = found + bias.double()
    if kind == "gelu":
        return [gelu(found)]
    cosine, sine = (each.double().reshape(-1, WIDTH // HEADS) for each in given.rotation)
    heads = found.unflatten(-1, (3 * HEADS, -1))
    first, second = heads[..., 0::2], heads[..., 1::2]
    beside = torch.stack([-second, first], -1).flatten(-2)
    turned = heads * cosine[:, None] + beside * sine[:, None]
    both = turned[:, : 2 * HEADS]
    return [both[:, :HEADS], both[:, HEADS:], heads[:, 2 * HEADS :]]


def check() -> bool:
    """Check every kind by rows. Return whether all are correct."""
    is_right = True
    for kind, (_, inputs) in SHAPES.items():
        weight, bias = weights_of(kind)
        for rows in (TOKENS - 2, TOKENS, PAGE):
            given = case(inputs, rows)
            line = [f"{kind} {len(given.x)} rows:"]
            for name, kernels in (("cluster", multicast_gemm), ("tiles", gemm)):
                given.pool.zero_()
                made = given.run(kernels, kind, weight, bias)
                again = given.run(kernels, kind, weight, bias)
                torch.cuda.synchronize()
                found = [made.double().sum(0) if kind in ("out", "down") else made.double()]
                if kind == "turned":
                    flat = given.pool.double().flatten(0, 2)
                    found += [flat[given.places], flat[given.places + PAGE]]
                wanted = reference(given, kind, weight, bias)
                errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
                is_same = torch.equal(made, again)
                is_right &= name != "cluster" or (is_same and all(each < LIMIT for each in errors))
                line.append(f"{name} {' '.join(f'{each:.5f}' for each in errors)}{'' if is_same else ' NOT THE SAME'}")
            print(*line, flush=True)
    return is_right


def graph_us(run: Callable[[], object], pieces: int, repeats: int = 25) -> float:
    """Measure microseconds per piece: the median of replays of one CUDA graph of `pieces`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found) / pieces


def alone() -> dict[str, dict[str, float]]:
    """Measure microseconds of each GEMM over the weights of all layers, by kernel and tiling."""
    found: dict[str, dict[str, float]] = {}
    for kind, (_, inputs) in SHAPES.items():
        given, layers = case(inputs), [weights_of(kind) for _ in range(LAYERS)]
        lines: dict[str, float] = {"tiles": graph_us(partial(_all, given, gemm, kind, layers), LAYERS)}
        lines["cluster"] = graph_us(partial(_all, given, multicast_gemm, kind, layers), LAYERS)
        whole_tiles = case(inputs, TOKENS - 2)
        lines["cluster, 256 rows"] = graph_us(partial(_all, whole_tiles, multicast_gemm, kind, layers), LAYERS)
        lines["library"] = graph_us(partial(_by_library, given.x, layers), LAYERS)
        for up, above, across, stages, splits in TRIALS[kind]:
            cut = multicast_gemm.ClusterConfig(up=up, above=above, across=across, stages=stages, splits=splits)
            name = f"{64 * up}, {above}x{across}, stages {stages} splits {splits}"
            try:
                with cut_as(kind, cut):
                    lines[name] = graph_us(partial(_all, given, multicast_gemm, kind, layers), LAYERS)
            except Exception as error:  # noqa: BLE001 the other cuts are still to be timed
                print(kind, name, type(error).__name__, error, flush=True)
        found[kind] = lines
        print(kind, {name: round(each, 2) for name, each in lines.items()}, flush=True)
    return found


def _all(given: Case, kernels: Any, kind: str, layers: list[tuple[Tensor, Tensor]]) -> None:
    for weight, bias in layers:
        given.run(kernels, kind, weight, bias)


def _by_library(x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> None:
    for weight, bias in layers:
        library(x, weight, bias)


@contextmanager
def cut_as(kind: str, cut: multicast_gemm.ClusterConfig) -> Iterator[None]:
    """Use this tiling for every GEMM of this kind."""
    found = multicast_gemm.config_of
    multicast_gemm.config_of = lambda weight, asked: cut
    try:
        yield
    finally:
        multicast_gemm.config_of = found


class Layers:
    """All layers of the predictor, with random weights and `cached` frames."""

    def __init__(self, cached: int) -> None:
        with building(torch.device("cuda"), torch.bfloat16):
            self.blocks = stack(RELEASED_AC.predictor)
            self.norm = nn.LayerNorm(WIDTH)
        for each in self.blocks.parameters():
            each.data.normal_(std=0.02)
        self.blocks.requires_grad_(False)
        self.given = case(WIDTH)
        pools = [
            torch.randn(cached + 2, 2, TOKENS, HEADS, WIDTH // HEADS, device="cuda").bfloat16() for _ in self.blocks
        ]
        shape = AttentionShape(sequences=1, tokens=TOKENS, pages=cached + 1, writes=True)
        self.passes = AttentionBuffers(PagedDenseAttention(pools, TOKENS, shape), torch.device("cuda"))
        held = np.array([cached * TOKENS], dtype=np.int64)
        tables = np.arange(cached + 1, dtype=np.int32)[None]
        first = np.zeros(1, dtype=np.int64)
        self.passes.prepare(AttentionMetadata.of(first, held, tables, TOKENS, causal=False))

    def run(self) -> Tensor:
        """Run one pass."""
        self.passes.reset()
        x, branch = self.given.x, None
        for layer, block in enumerate(self.blocks):
            x, branch = block(x, branch, self.given.rotation, MixCached(self.passes.view, layer))
        return sum_norm(x, branch, self.norm)[1]


@contextmanager
def chosen(kinds: set[str]) -> Iterator[None]:
    """Use `multicast_gemm` for GEMMs of these kinds and `gemm` for others."""
    found = linear._kernels

    def choose(x: Tensor, layer: nn.Linear) -> Any:
        small = "down" if layer.in_features > layer.out_features else "out"
        return SimpleNamespace(
            linear=(multicast_gemm if "gelu" in kinds else gemm).linear,
            split_k=(multicast_gemm if small in kinds else gemm).split_k,
            qkv_rotary=(multicast_gemm if "turned" in kinds else gemm).qkv_rotary,
            can_rotate=gemm.can_rotate,
        )

    linear._kernels = choose
    try:
        yield
    finally:
        linear._kernels = found


def in_layers(cached: int) -> dict[str, float]:
    """Measure microseconds of a layer with each choice of kernels, and the difference of the results."""
    layers, every = Layers(cached), set(SHAPES)
    found: dict[str, float] = {}
    choices = {
        "tiles": set(),
        **{kind: {kind} for kind in SHAPES},
        "all": every,
        "tiles again": set(),
        "all again": every,
    }
    made: dict[str, Tensor] = {}
    for name, kinds in choices.items():
        with chosen(kinds):
            found[name] = graph_us(layers.run, LAYERS)
            made[name] = layers.run().float()
    found["difference"] = float((made["all"] - made["tiles"]).norm() / made["tiles"].norm())
    print(f"behind {cached}:", {name: round(each, 3) for name, each in found.items()}, flush=True)
    return found


def main() -> int:
    """Check, measure and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", type=int, nargs="*", default=[1, 9, 23, 37], help="cached frames")
    parser.add_argument("--out", type=Path, help="the file of figures")
    options = parser.parse_args()
    prepare_device(resolve_device("cuda"))
    report: dict[str, Any] = {**head(), "model": "official shapes, random weights", "unit": "us"}
    with torch.inference_mode():
        report["is_right"] = check()
        report["alone"] = alone()
        report["layer"] = {str(cached): in_layers(cached) for cached in options.cached}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report), flush=True)
    return int(not report["is_right"])


if __name__ == "__main__":
    sys.exit(main())
