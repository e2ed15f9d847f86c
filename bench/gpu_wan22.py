"""Wan 2.2 TI2V-5B on one GPU with random weights: denoise steps, one block by parts, and the decoder.

Run from the repository root: `python -m bench.gpu_wan22 [--out FILE]`. The nodes run in this process, so times contain
no server. A step is both branches of guidance of a video of 704 x 1280 and 121 frames, 1,033 TFLOP; shares are of
790 TFLOP/s. Sections are written one by one. `--tiny --device cpu` runs small sizes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from mstar_core.engine.device import prepare_device, resolve_device
from mstar_core.parallel.shards import WHOLE
from mstar_core.weights.building import building
from mstar_core.weights.random_fill import fill_randomly
from mstar_wan22.checkpoint.config import Sizes, TransformerSizes
from mstar_wan22.nodes.media import Frames
from mstar_wan22.nodes.solver import HISTORY, advance
from mstar_wan22.nodes.transformer import TEXT_ROWS, Denoiser, Transformer, keep_floats
from mstar_wan22.request.schedule import step_table
from mstar_wan22.sources import tiny

PEAK: Final = 790e12
"""Operations per second of a dense bfloat16 GEMM. Source: the model's specification, section 12."""

VIDEOS: Final = {"704x1280x121": (31, 44, 80), "480x832x33": (9, 30, 52)}
"""Latents of the measured videos: frames, rows and columns."""

SMALL: Final = {"32x64x9": (3, 2, 4)}
STEPS: Final = 3
"""Measured steps behind one for warm-up: four of 704 x 1280 x 121 take about 8 s."""

CHUNKS: Final = 4


def work(sizes: TransformerSizes, tokens: int, branches: int = 2) -> float:
    """Return the operations of a step."""
    width, layers = sizes.width, sizes.layers
    linear = tokens * layers * (12 * width**2 + 4 * width * sizes.inner)
    attention = 4 * layers * tokens**2 * width
    return branches * (linear + attention + 4 * TEXT_ROWS * layers * tokens * width)


def timed(device: torch.device, run: Callable[[], object]) -> float:
    """Return the seconds of a call, its kernels included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def steps(sizes: Sizes, device: torch.device, dtype: torch.dtype, grid: tuple[int, int, int]) -> dict[str, Any]:
    """Return the seconds of guided steps with their solver."""
    with building(device, dtype):
        network = Transformer(sizes.transformer, WHOLE)
        keep_floats(network)
    fill_randomly(network, 1)
    denoiser = Denoiser(network.eval().requires_grad_(False), expands=sizes.expands)
    table, _ = step_table(50, sizes.flow_shift, (5.0, 5.0), None, "diffusers", "unipc")
    x = torch.randn(sizes.transformer.outputs, *grid, device=device)
    history = x.new_zeros(HISTORY, *x.shape)
    texts = [torch.randn(count, sizes.transformer.text, device=device, dtype=dtype) for count in (60, 120)]

    def step(row: np.ndarray) -> None:
        nonlocal x, history
        x, history = advance(x, history, denoiser.guided(x, row, texts, None), row)

    seconds = [timed(device, lambda row=row: step(row)) for row in table[: STEPS + 1]]
    tokens = grid[0] * (grid[1] // 2) * (grid[2] // 2)
    total, mean = work(sizes.transformer, tokens), float(np.mean(seconds[1:]))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {
        "tokens": tokens,
        "tflop": round(total / 1e12, 1),
        "first_s": round(seconds[0], 3),
        "step_s": round(mean, 4),
        "tflop_per_s": round(total / mean / 1e12, 1),
        "share_of_bound": round(total / mean / PEAK, 3),
        "finite": bool(torch.isfinite(x).all()),
        "peak_gib": round(peak, 1),
    }


def decoding(sizes: Sizes, device: torch.device, dtype: torch.dtype, grid: tuple[int, int, int]) -> dict[str, Any]:
    """Return the seconds of the decoder's first chunk, and of those behind it, which have four frames."""
    with building(device, dtype):
        node = Frames(sizes.vae, expands=sizes.expands)
    fill_randomly(node, 1)
    node.eval().requires_grad_(False)
    latents = torch.randn(sizes.vae.channels, *grid, device=device)
    memory = torch.empty(0, device=device, dtype=dtype)
    seconds, counts = [], []
    for number in range(min(CHUNKS + 2, grid[0])):
        inputs = {"latents": [latents], "memory": [memory], "step": np.array([number])}
        kept: dict[str, Any] = {}
        seconds.append(timed(device, partial(_decode, node, inputs, kept)))
        memory = kept["memory"][0]
        counts.append(len(kept["frames"][0]))
    later = float(np.mean(seconds[2:] or seconds[-1:]))
    return {"first_s": round(seconds[0], 4), "chunk_s": round(later, 4), "frames": counts, "memory": memory.numel()}


def _decode(node: Frames, inputs: dict[str, Any], kept: dict[str, Any]) -> None:
    kept |= node(**inputs)


def main() -> None:
    """Measure and print a JSON line per section; write all of them to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    device = resolve_device(given.device)
    prepare_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes, videos = (tiny.BASE, SMALL) if given.tiny else (Sizes(), VIDEOS)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "steps": STEPS}
    with torch.inference_mode():
        for measure in (steps, decoding):
            for video, grid in videos.items():
                section = {f"{measure.__name__} {video}": measure(sizes, device, dtype, grid)}
                found |= section
                print(json.dumps(section), flush=True)
                if given.out is not None:
                    given.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
