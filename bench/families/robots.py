"""Robot clients of a Pi0.5 server over HTTP, and the checkpoint that it serves.

`python -m bench.families.robots FOLDER` writes random weights in the official shapes in a separate process, so that the
benchmark process holds no device context.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.robot_requests import Robot, images_of, write_config
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import Figures
from bench.serving.watch import note_stations, watched
from mstar_pi05.checkpoint.config import Sizes
from mstar_pi05.published import names, policy_target, shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a benchmark. alone: sequential requests. clients: concurrent clients with `each` requests.
    side: image size.
    """

    alone: int
    clients: int
    each: int
    side: int


def served(
    load: Load,
    *,
    model: str,
    device: str,
    port: int,
    root: Path,
    weights: Path | None,
    settings: tuple[str, ...],
    figures: Figures,
    label: str,
) -> dict[str, Any]:
    """Start a deployment, warm it up until nothing more is captured, measure, and stop it. Raises for a status other
    than 200.
    """
    plan = Plan(model=model, device=device, port=port, root=root, weights=weights, settings=settings)
    images = images_of(load.side)
    with Served(plan) as running:
        begun = running.snapshot()
        for _ in range(2):
            at_once(port, images, load.clients, 2)
            one_by_one(port, images, 3)
            captured = running.wait_captured()
        before = running.captures()
        alone, crowd = f"server_{label}_alone", f"server_{label}_clients_{load.clients}"
        with watched(running, figures, alone) as one:
            figures.add(alone, one_by_one(port, images, load.alone))
        note_stations(running, figures, alone, load.alone)
        arrays = images_of(load.side, "npy")
        figures.add(f"{alone}_npy", one_by_one(port, arrays, load.alone))
        one_by_one(port, arrays[:2], 5)
        figures.add(f"{alone}_npy_two_cameras", one_by_one(port, arrays[:2], load.alone))
        with watched(running, figures, crowd) as many:
            start = time.monotonic()
            answered = at_once(port, images, load.clients, load.each)
            span = time.monotonic() - start
        note_stations(running, figures, crowd, load.clients * load.each)
        figures.add(crowd, answered)
        figures.add(f"server_{label}_chunks_per_s_clients_{load.clients}", [len(answered) / span], "1/s")
        is_clean = running.captures() == before
        return {
            "ready_s": round(running.ready_s, 2),
            "phases_s": begun["deployment"]["phases_s"],
            "captured": captured,
            "captured_while_measured": not is_clean,
            "alone": one,
            "clients": many,
            "resident_bytes": running.resident_bytes(),
            "gpu_at_end": gpu_state(),
            "held": running.wait_clean(),
            "values": {name: value for name, value in running.values().items() if "graph" in name},
        }


def one_by_one(port: int, images: list[bytes], count: int) -> list[float]:
    """Return the seconds of each request of one robot."""
    with contextlib.closing(Robot(port, images)) as robot:
        return [robot.ask(number) for number in range(count)]


def at_once(port: int, images: list[bytes], clients: int, each: int) -> list[float]:
    """Return the seconds of each request of concurrent robots, each with sequential requests."""
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        loads = pool.map(lambda _: one_by_one(port, images, each), range(clients))
        return [seconds for load in loads for seconds in load]


# -- the checkpoint --------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, device: str = "cuda", sizes: Sizes | None = None) -> Path:
    """Write a checkpoint in openpi's layout with random bfloat16 weights, and tokenizer and statistics of
    `pi05:tiny`.
    """
    sizes = sizes or Sizes()
    write_config(folder, sizes)
    generator, found, weights = torch.Generator(device).manual_seed(1), shapes(sizes), {}
    for name in sorted(names(sizes)):
        place = policy_target(name)
        if place is not None:
            weights[name] = _drawn(name, found[place], generator, device).cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    """Draw a tensor: scale-preserving matrices, unit norm weights, zero biases."""
    made = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    if len(shape) > 1:
        return made.normal_(0.0, made[0].numel() ** -0.5, generator=generator)
    is_layer_norm = "layer_norm" in name or "post_layernorm" in name
    return made.fill_(1.0) if is_layer_norm and name.endswith("weight") else made


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
