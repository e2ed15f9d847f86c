"""Benchmark of the start of three families on one GPU: nothing compiled, and compiled; kernels by phase and later.

Run from the repository root: `python -m bench.gpu_ready [--models orpheus,qwen3_omni,bagel] [--out FILE]`. Weights are
random numbers in the official shapes. Each model starts with an empty cache of Triton kernels and then with the full
one, and answers each kind of request twice. A kernel that is compiled after ready is a defect: the exit code is then 1.
`--pack FOLDER` also packs the kernels of each model. Prints JSON. `--tiny --device cpu` tests the benchmark itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.families.pictures import picture
from bench.gpu_qwen3omni import CONFIGS, png, wav
from bench.serving.client import ask
from bench.serving.deployment import Plan, Served, gpu_state
from bench.serving.figures import head
from bench.serving.options import add_deployment_options
from mstar_core.host import kernel_pack

KERNELS: Final = ("kernels_ahead", "kernels_missed", "kernels_late")
LINES: Final = re.compile(r"kernel|traced|graph of|captured function|one by one|does not fit|warm-up")
"""Lines of a worker's log that say what its start compiled and captured."""

SPEECH: Final = {"max_output_tokens": 12, "talker_max_tokens": 24, "ignore_eos": True}
SIDE, TINY_SIDE = 512, 64
"""Pixels of an image's side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of request: form fields, parameters of the model and files."""

    text: str = "a small red boat on a quiet lake"
    outputs: str = "text"
    params: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def body(self, seed: int) -> dict[str, Any]:
        """Return the form."""
        params = {**self.params, "seed": seed}
        text = f"{self.text} {seed}"
        return {"text": text, "output_modalities": self.outputs, "stream_events": "full", "model_kwargs": params}


def kinds(model: str, side: int) -> dict[str, Kind]:
    """Return the kinds of requests of a model by name. side: pixels of an image's side."""
    if model == "orpheus":
        return {"speech": Kind(outputs="audio", params={"max_output_tokens": 140, "ignore_eos": True, "voice": "tara"})}
    image, sound = {"image.png": png(side)}, {"sound.wav": wav(3.0)}
    if model == "qwen3_omni":
        return {
            "text_to_speech": Kind(outputs="text,audio", params=SPEECH),
            "image_to_speech": Kind(outputs="text,audio", params=SPEECH, files=image),
            "speech_to_text": Kind(params={"max_output_tokens": 12, "ignore_eos": True}, files=sound),
        }
    return {
        "text_to_image": Kind(outputs="image", params={"width": side, "height": side, "num_timesteps": 5}),
        "edit": Kind(outputs="image", params={"num_timesteps": 5}, files={"image.png": picture(side)}),
        "image_to_text": Kind(params={"max_output_tokens": 8, "ignore_eos": True}, files=image),
    }


def weights(model: str, folder: Path) -> Path:
    """Write a checkpoint folder of the official shapes."""
    if model == "orpheus":
        subprocess.run([sys.executable, "-m", "bench.serving.checkpoint", str(folder)], check=True)
        return folder
    if model == "qwen3_omni":
        from bench.families.omni_checkpoint import write_random
    else:
        from bench.families.bagel_checkpoint import write_random
    return write_random(folder, seed=1)


def main() -> int:
    """Measure, print and write the report."""
    options = read_options()
    scratch = Path(tempfile.mkdtemp(prefix="md-", dir="/tmp"))
    report: dict[str, Any] = {**head(), "starts": {}, "defects": []}
    try:
        for model in options.models.split(","):
            folder = None if options.tiny else weights(model, scratch / model)
            for cache in options.caches.split(","):
                try:
                    found = started(options, scratch, model, folder, cache)
                except Exception as error:  # noqa: BLE001 isolation boundary: one start; the others are still measured
                    found = {"error": str(error)[-4000:], "late": 0}
                    report["defects"].append(f"{model}, {cache}: no start")
                report["starts"][f"{model}, {cache}"] = found
                if found["late"]:
                    report["defects"].append(f"{model}, {cache}: {found['late']} kernels compiled after ready")
                print(f"{model}, {cache}:", json.dumps({key: found[key] for key in found if key != "log"}), flush=True)
                if options.out:
                    options.out.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(report["defects"], indent=1), flush=True)
    return int(bool(report["defects"]))


def started(options: argparse.Namespace, scratch: Path, model: str, folder: Path | None, cache: str) -> dict[str, Any]:
    """Start and stop one deployment. cache: `cold` empties the cache of compiled kernels first, and so does `packed`,
    which installs the pack of the start before.
    """
    kernels, root = scratch / "kernels", scratch / f"{model}-{cache}"
    pack = None if options.pack is None else options.pack / f"{model}-kernels.tar.xz"
    if cache in ("cold", "packed"):
        shutil.rmtree(kernels, ignore_errors=True)
    root.mkdir()
    environment = {"TRITON_CACHE_DIR": str(kernels)}
    if cache == "packed":
        environment[kernel_pack.VARIABLE] = str(pack)
    if options.pack is not None and cache == "cold":
        environment["MSTAR_KERNEL_LIST"] = str(options.pack / f"{model}-list.jsonl")
    plan = Plan(
        model=f"{model}:tiny" if options.tiny else model,
        device=options.device,
        port=options.port,
        root=root,
        weights=folder,
        settings=tuple(options.set),
        environment=environment,
        config=CONFIGS / "qwen3omni_single_gpu.yaml" if model == "qwen3_omni" and not options.tiny else None,
    )
    with Served(plan) as served, served.telling(3000):
        start = served.snapshot()
        found: dict[str, Any] = {
            "up_s": round(served.ready_s, 2),
            "ready_s": round(start["deployment"]["ready_s"], 2),
            "phases_s": start["deployment"]["phases_s"],
            "in_start": counted(served.fresh_values()),
        }
        seeds = iter(range(1, 100))
        chosen = kinds(model, TINY_SIDE if options.tiny else SIDE)
        found["requests_s"] = {
            name: [timed(options.port, kind, next(seeds)) for _ in range(2)] for name, kind in chosen.items()
        }
        served.wait_captured(quiet_s=1.5, limit_s=20)
        values = served.fresh_values()
        found |= {
            "at_end": counted(values),
            "late": int(sum(value for name, value in values.items() if name.endswith(".kernels_late"))),
        }
        found["graphs"] = {name: value for name, value in values.items() if name.endswith(("graph_bytes", "captured"))}
        found |= {"gpu": gpu_state(), "log": log_lines(root)}
    if pack is not None and cache != "packed" and kernels.is_dir():
        found["packed"] = {"kernels": kernel_pack.pack(kernels, pack), "bytes": pack.stat().st_size}
    return found


def counted(values: Mapping[str, float]) -> dict[str, float]:
    """Return the counts of compiled kernels by process."""
    return {name: value for name, value in values.items() if name.rpartition(".")[2] in KERNELS}


def timed(port: int, kind: Kind, seed: int) -> float | str:
    """Send a request. Returns its seconds, or the code of its error."""
    heard = asyncio.run(ask(port, kind.body(seed), files=kind.files or None))
    return heard.code or round(heard.ended_s - heard.sent_s, 3)


def log_lines(root: Path) -> list[str]:
    """Return the lines of the workers' logs about kernels and captures."""
    logs = sorted(path for path in (root / ".state").rglob("*.log") if "worker" in path.name)
    return [line for path in logs for line in path.read_text(errors="replace").splitlines() if LINES.search(line)]


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="orpheus,qwen3_omni,bagel")
    parser.add_argument("--caches", default="cold,warm", help="of cold, warm and packed (with --pack)")
    add_deployment_options(parser, 18126)
    parser.add_argument("--pack", type=Path, help="folder for the packed kernels of each model")
    return parser.parse_args()


if __name__ == "__main__":
    started_s = time.monotonic()
    code = main()
    print(f"{time.monotonic() - started_s:.0f} s")
    sys.exit(code)
