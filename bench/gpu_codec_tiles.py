"""Tiles and precisions of the codec's kernels on one GPU: the fastest tile per layer, and the error of each precision.

Run from the repository root: `python bench/gpu_codec_tiles.py [--out FILE]`. Random weights in the official SNAC
shapes. Child processes compile the kernels in parallel first.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mstar_core.engine.device import prepare_device
from mstar_orpheus.vocoder.frames import codes_from_ids, levels_from_codes
from mstar_orpheus.vocoder.fused_decoder import FusedDecoder
from mstar_orpheus.vocoder.snac import Snac, SnacConfig
from mstar_orpheus.vocoder.tiling import Tile

CODEC = SnacConfig(latent=768, width=1024, rates=(8, 8, 4, 2), codebook_size=4096, codebook_dim=8, sample_rate=24000)
OFFSET, KEEP, ROWS = 128266, (2048, 4096), (1, 8, 32, 64)
TILES = tuple(
    Tile(bm=bm, bn=bn, bk=bk, warps=warps, stages=stages)
    for bm, bn, bk, warps, stages in (
        (16, 32, 32, 4, 4),
        (16, 64, 64, 4, 3),
        (32, 32, 32, 4, 4),
        (32, 32, 64, 4, 3),
        (32, 64, 32, 4, 4),
        (64, 32, 32, 4, 3),
        (64, 64, 32, 4, 3),
        (64, 64, 32, 8, 3),
        (64, 128, 32, 4, 3),
        (64, 128, 32, 8, 3),
        (128, 64, 32, 8, 2),
        (128, 128, 32, 8, 2),
        (32, 32, 32, 4, 1),
        (64, 64, 32, 4, 1),
        (64, 64, 32, 8, 1),
        (128, 64, 32, 8, 1),
        (64, 128, 32, 8, 1),
        (128, 128, 32, 8, 1),
        (16, 32, 32, 2, 2),
        (32, 64, 32, 4, 1),
    )
)
LAYERS = ("mixing", *(f"{kind}{block}" for block in range(4) for kind in ("upsample", "noisy", "unit")))
CHILDREN = 14


def decoder() -> Snac:
    """Build the official shapes, with different slopes per snake so that an error in one is visible."""
    torch.manual_seed(3)
    with torch.device("cuda"):
        snac = Snac(CODEC).eval().requires_grad_(False)
    for name, parameter in snac.named_parameters():
        if name.endswith("alpha"):
            parameter.uniform_(0.3, 3.0)
    return snac


def layer(fused: FusedDecoder, name: str, rows: int) -> Callable[[], object]:
    """Return a call of one layer on random input."""
    spans = fused.spans(4, KEEP)
    if name == "mixing":
        latent = torch.randn(rows * 16, CODEC.latent, device="cuda")
        return lambda: fused._pointwise(latent, fused._mixing, fused._mixed, None)
    block, span = fused._blocks[int(name[-1])], spans[int(name[-1])]
    length = span.count * block.rate
    wide, bent = (torch.randn(rows * length, block.outer, device="cuda") for _ in range(2))
    other = torch.empty_like(wide)
    if name.startswith("noisy"):
        noise = torch.randn(rows * length, device="cuda")
        return lambda: fused._pointwise(wide, block.noisy, block.first, noise)
    if name.startswith("unit"):
        return lambda: fused._unit(block.units[1], bent, wide, other, rows, length, is_kept=True)
    given = torch.randn(rows * span.length, block.inner, device="cuda")
    return lambda: fused._upsample(block, span, given, rows, wide, bent, is_bent=False)


def captured_us(call: Callable[[], object], count: int = 10) -> float:
    """Measure microseconds per call: the median of nine replays of a CUDA graph with `count` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        for _ in range(count):
            call()
        graph.capture_end()
    torch.cuda.synchronize()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    median: float = sorted(times)[4]
    return median


def compile_share(share: int) -> None:
    """Compile this process's part of the kernels."""
    snac = decoder()
    tasks = [(name, cut) for name in LAYERS for cut in TILES]
    for name, cut in tasks[share::CHILDREN]:
        fused = FusedDecoder(snac, OFFSET, tiles=lambda *_, cut=cut: cut)
        try:
            layer(fused, name, 1)()
        except Exception as error:  # noqa: BLE001 a cut that does not fit is a finding
            print(name, cut, type(error).__name__, str(error)[:200], flush=True)


def errors(snac: Snac, precisions: Sequence[str]) -> dict[str, Any]:
    """Measure relative (by norms) and largest errors against float64, of PyTorch modules and each precision."""
    rows = 4
    window = OFFSET + torch.randint(0, 4096, (rows, 28), device="cuda")
    levels = levels_from_codes(codes_from_ids(window, OFFSET, 4096))
    noise = [torch.randn(rows, 1, length, device="cuda") for length in CODEC.noise_lengths(4)]
    exact = copy.deepcopy(snac).double()
    wanted = exact.decode(levels, [each.double() for each in noise], KEEP).squeeze(1)
    found: dict[str, Any] = {"plain": difference(snac.decode(levels, noise, KEEP).squeeze(1), wanted)}
    for precision in precisions:
        try:
            fused = FusedDecoder(snac, OFFSET, precision=precision)
            found[precision] = difference(fused.decode(window, fused.cut_noise(noise, 4, KEEP), KEEP), wanted)
        except Exception as error:  # noqa: BLE001 a cut that does not fit is a finding
            found[precision] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return found


def difference(made: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """Return the relative error by norms, and the largest."""
    apart = made.double() - wanted
    return {"relative": float(apart.norm() / wanted.norm()), "largest": float(apart.abs().max())}


def whole(snac: Snac) -> dict[str, Any]:
    """Measure milliseconds of a captured decode, of PyTorch modules and each precision with the stored tiles."""
    found: dict[str, Any] = {}
    for rows in ROWS:
        window = OFFSET + torch.randint(0, 4096, (rows, 28), device="cuda")
        facts = torch.ones((3, rows), dtype=torch.int64, device="cuda")
        for precision in ("split", "ieee", "tf32x3"):
            try:
                fused = FusedDecoder(snac, OFFSET, precision=precision)
                call = lambda f=fused, w=window, x=facts: f.decode(w, f.seeded_noise(x, 4, KEEP), KEEP, is_pcm=True)  # noqa: E731
                found.setdefault(precision, {})[rows] = round(captured_us(call, 2) / 1e3, 4)
            except Exception as error:  # noqa: BLE001 a cut that does not fit is a finding
                found.setdefault(precision, {})[rows] = f"{type(error).__name__}: {error}"[:200]
    return found


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare_device(torch.device("cuda", 0))
    if options.share is not None:
        compile_share(options.share)
        return
    began = time.perf_counter()
    command = [sys.executable, __file__, "--share"]
    children = [subprocess.Popen([*command, str(share)]) for share in range(CHILDREN)]
    snac = decoder()
    report: dict[str, Any] = {"errors": errors(snac, ("split", "ieee", "tf32x3", "tf32"))}
    print(json.dumps(report), flush=True)
    report["whole_ms"] = whole(snac)
    print(json.dumps(report["whole_ms"]), flush=True)
    for child in children:
        child.wait()
    print("compiled", time.perf_counter() - began, flush=True)
    report["layers_us"] = {}
    fused = FusedDecoder(snac, OFFSET)
    for name in LAYERS:
        for rows in ROWS:
            timed = []
            for cut in TILES:
                fused._tile = lambda *_, cut=cut: cut
                try:
                    key = f"{cut.bm}x{cut.bn}x{cut.bk}w{cut.warps}s{cut.stages}"
                    timed.append((captured_us(layer(fused, name, rows)), key))
                except Exception:  # noqa: BLE001 a cut that does not fit is left out
                    continue
            timed.sort()
            report["layers_us"][f"{name}@{rows}"] = timed
            print(f"{name}@{rows}", " ".join(f"{key}={us:.1f}" for us, key in timed[:4]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("all", time.perf_counter() - began)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
