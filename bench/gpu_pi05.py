"""Pi0.5 on one GPU: random weights in the official shapes, made there. Engines by themselves, then the whole server.

Run from the repository root: `python -m bench.gpu_pi05 [--out FILE]`. Prints JSON: seconds from a request's submission
to its actions on the host at the engines, by number of requests; the parts (cameras, prefix, flow) with their floors
from this device's own ceilings; where device time goes by family of kernel; then HTTP client to actions at batch 1 and
answers per second at saturation. `--tiny --device cpu` does the same with the miniature, to try the measurement.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.families.clock import by_family, ceilings, timed
from bench.families.policy import Acting, Observation, Place, checkpoint_modules, floors, observation, random_modules
from bench.families.robots import Load, served
from bench.serving.figures import ROOT, Figures, head, write
from mstar_core.engine.device import prepare_device
from mstar_pi05.sizes import Sizes
from mstar_pi05.tiny import write_tiny

PROMPT = 60
"""Ids of the prompt: an instruction with the state in it."""


def main() -> int:
    """Measure, print, write."""
    options = read_options()
    begun, figures, scratch = head(), Figures(), Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))
    report: dict[str, Any] = {
        **begun,
        "model": "pi05:tiny" if options.tiny else "pi05, official shapes, random weights",
    }
    try:
        if "engines" in options.part:
            report["engines"] = engines(options, figures, scratch)
        if "server" in options.part:
            report["server"] = server(options, figures, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report["metrics"] = figures.summary()
    if options.out:
        write(report, figures.samples, options.out)
    print(json.dumps(report, indent=1), flush=True)
    return 0


# -- the engines by themselves ---------------------------------------------------------------------------------------


def engines(options: argparse.Namespace, figures: Figures, scratch: Path) -> dict[str, Any]:
    """Every precision of the tower in turn, captured, and the first one without graphs."""
    device = torch.device(options.device)
    prepare_device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = {"size": 256, "copied_bytes": 1 << 20} if options.tiny else {}
    rates, found = ceilings(device, **size), dict[str, Any]()
    for vision in options.vision:
        place = Place(
            device=device, dtype=dtype, vision=vision, attention=options.attention, requests=max(options.batch) + 1
        )
        sizes, modules = _modules(options, place, scratch)
        for is_captured in (True, False) if vision == options.vision[0] else (True,):
            acting = Acting(sizes, modules, replace(place, is_captured=is_captured))
            label = f"{vision}_{'captured' if is_captured else 'plain'}"
            found[label] = _one_place(acting, label, options, figures, rates)
    return {"ceilings": rates, "prompt_ids": PROMPT, "places": found}


def _modules(options: argparse.Namespace, place: Place, scratch: Path) -> tuple[Sizes, dict[str, torch.nn.Module]]:
    if options.tiny:
        return checkpoint_modules(write_tiny(scratch / f"tiny-{place.vision}" / "pi05"), place)
    return Sizes(), random_modules(Sizes(), place)


def _one_place(
    acting: Acting, label: str, options: argparse.Namespace, figures: Figures, rates: Mapping[str, float]
) -> dict[str, Any]:
    device, sizes, repeats = acting.place.device, acting.sizes, options.repeats
    prompt = 8 if options.tiny else PROMPT
    rows = {size: [observation(sizes, 3, prompt, seed=n) for n in range(size)] for size in options.batch}
    _warm(acting, list(rows.values()))
    for size, seen in rows.items():
        samples = timed(partial(acting.act, *seen), device, repeats)
        figures.add(f"engines_{label}_rows_{size}", samples)
        figures.add(f"engines_{label}_chunks_per_s_rows_{size}", [size / value for value in samples], "1/s")
    two = observation(sizes, 2, prompt)
    _warm(acting, [[two]])
    figures.add(f"engines_{label}_two_cameras", timed(lambda: acting.act(two), device, repeats))
    parts = _parts(acting, rows[options.batch[0]][0], repeats)
    for name, samples in parts.items():
        figures.add(f"part_{label}_{name}", samples)
    one = rows[options.batch[0]]
    return {
        "floors_s": floors(sizes, 3, prompt, 10, rates), "counters": acting.counters(),
        "profile": by_family(lambda: acting.act(*one), device),
    }  # fmt: skip


def _warm(acting: Acting, groups: list[list[Observation]]) -> None:
    """Let every kind of batch run plainly, capture what it needs, and run again."""
    for seen in groups:
        acting.act(*seen)
    acting.turner.capture()
    for seen in groups:
        acting.act(*seen)


def _parts(acting: Acting, seen: Observation, repeats: int) -> dict[str, list[float]]:
    """Cameras, prefix and flow one after the other, each begun on an idle device and waited for."""
    turner, device = acting.turner, acting.place.device
    found: dict[str, list[float]] = {"cameras": [], "prefix": [], "flow": []}
    for _ in range(repeats):
        with torch.inference_mode():
            handle = acting.submit(seen, is_flowing=False)
            found["cameras"] += timed(partial(turner.once, "vit_encoder"), device, 1, warm=0)
            found["prefix"] += timed(turner.run, device, 1, warm=0)
            acting.flow(handle, seen)
            found["flow"] += timed(turner.run, device, 1, warm=0)
        acting.end()
    return found


# -- the whole server ------------------------------------------------------------------------------------------------


def server(options: argparse.Namespace, figures: Figures, scratch: Path) -> dict[str, Any]:
    """`mstarctl up pi05`, and robots that ask over HTTP."""
    weights = None
    if not options.tiny:
        weights = options.folder or scratch / "pi05"
        if not weights.exists():
            command = [sys.executable, "-m", "bench.families.robots", str(weights)]
            subprocess.run(command, cwd=ROOT, check=True)
    load = Load(alone=options.alone, clients=options.clients, each=options.each, side=224 if not options.tiny else 28)
    found = {}
    for vision in options.vision:
        root = scratch / f"run-{vision}"
        root.mkdir()
        settings = (
            f"model_kwargs.vision_dtype={vision}",
            f"max_concurrent_requests={max(options.clients + 1, 4)}",
            *(("kv_cache.tokens=32768",) if not options.tiny else ()),
        )
        found[vision] = served(
            load, model="pi05:tiny" if options.tiny else "pi05", device=options.device, port=options.port, root=root,
            weights=weights, settings=settings, figures=figures, label=vision,
        )  # fmt: skip
    return found


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", default=["engines", "server"], choices=("engines", "server"))
    parser.add_argument("--vision", nargs="*", default=["bfloat16", "tf32", "float32"], help="the tower's precisions")
    parser.add_argument("--attention", default=None, help="backend of the cache; default flashinfer, torch on the CPU")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 8], help="requests at once at the engines")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--alone", type=int, default=60, help="requests one after the other at the server")
    parser.add_argument("--clients", type=int, default=16, help="clients at saturation")
    parser.add_argument("--each", type=int, default=20, help="requests of each of them")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniature in place of the official shapes")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is written and kept")
    parser.add_argument("--port", type=int, default=18124)
    parser.add_argument("--out", type=Path, help="the file of figures; raw samples go beside it")
    options = parser.parse_args()
    options.attention = options.attention or ("flashinfer" if options.device == "cuda" else "torch")
    return options


if __name__ == "__main__":
    sys.exit(main())
