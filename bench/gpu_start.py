"""Benchmark of a start on a GPU: reading of weights, and whole deployments with cold and warm caches.

Run from the repository root: `python -m bench.gpu_start [--model MODEL] [--folder DIR] [--out FILE]`. Writes a
checkpoint of the official names and shapes (bfloat16: Orpheus 6.6, BAGEL 29, Qwen3-Omni 71 GB), reads it in several
ways, then starts deployments: nothing cached, everything cached, and for Orpheus two replicas on one GPU. The files of
Orpheus are dropped from the page cache by POSIX_FADV_DONTNEED; larger ones are written into a file system in memory if
there is room. Each start answers a request. Prints JSON. `--tiny --device cpu` tests the benchmark itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.families.stored_weights import bagel_files, bytes_of, omni_files, place_for
from bench.gpu_qwen3omni import CONFIGS
from bench.gpu_ready import SIDE, TINY_SIDE, kinds, timed
from bench.serving.deployment import Plan, Served
from bench.serving.figures import head as conditions

LIMITS: Final = ("max_concurrent_requests=64", "max_seq_len=2048")
MODELS: Final = ("orpheus", "bagel", "qwen3_omni")
PORT: Final = 18123
THREADS: Final = (4, 8, 16)
"""Threads of the readings from the page cache, in this order."""


def main() -> int:
    """Measure, print and write the report."""
    options = read_options()
    if options.weights_only is not None:
        print(json.dumps(reading(options.weights_only, reads=options.reads)))
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="mstar-start-", dir="/tmp"))
    stored = None if options.folder or options.tiny else storage(options.model, scratch)
    try:
        report, names = measured(options, scratch, options.folder or stored)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if stored is not None:
            shutil.rmtree(stored, ignore_errors=True)
    return int(any("error" in report[name] for name in names))


def storage(model: str, scratch: Path) -> Path:
    """Return the folder of a checkpoint that does not exist yet."""
    place = scratch if model == "orpheus" else place_for(bytes_of(model), scratch)
    return place / f"mstar-{model}-{os.getpid()}"


def measured(options: argparse.Namespace, scratch: Path, folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Write the checkpoint, read it and start the deployments. Returns the report and the names of its parts."""
    report: dict[str, Any] = {**conditions(), "what": f"start of {options.model} in its official shapes"}
    names = options.starts.split(",")

    def keep(name: str, found: dict[str, Any]) -> None:
        report[name] = found
        told = {key: value for key, value in found.items() if key not in ("steps", "log")}
        print(name, json.dumps(told), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report) + "\n")

    if folder is not None:
        if not folder.exists():
            start = time.monotonic()
            write_files(options.model, folder)
            keep("writing", {"s": round(time.monotonic() - start, 1), "filesystem": filesystem(folder)})
        if options.reads:
            own = [sys.executable, "-m", "bench.gpu_start", "--weights-only", str(folder), "--reads", options.reads]
            read = subprocess.run(own, check=False, capture_output=True, text=True)
            is_read = read.returncode == 0
            keep("reading", json.loads(read.stdout.splitlines()[-1]) if is_read else {"error": read.stderr[-3000:]})
            names = ["reading", *names]
    os.environ["MSTAR_CACHE_DIR"] = str(options.cache or scratch / "cache")
    os.environ.pop("TRITON_CACHE_DIR", None)
    for number, name in enumerate(options.starts.split(",")):
        if name == "cold":
            shutil.rmtree(os.environ["MSTAR_CACHE_DIR"], ignore_errors=True)
            if folder is not None and options.model == "orpheus":
                drop(folder)
        label = name if name not in report else f"{name}_{number}"
        try:
            keep(label, started(options, scratch / f"{number}", folder, name))
        except Exception as error:  # noqa: BLE001 isolation boundary: one start; the others are still measured
            keep(label, {"error": str(error)[-3000:]})
    return report, [name for name in names if name in report]


def write_files(model: str, folder: Path) -> None:
    """Write a checkpoint with weight files."""
    match model:
        case "bagel":
            bagel_files(folder)
        case "qwen3_omni":
            omni_files(folder)
        case _:
            subprocess.run([sys.executable, "-m", "bench.serving.checkpoint", str(folder)], check=True)


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="orpheus", choices=MODELS)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; written if missing, and kept")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels, kept; default: one of this run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--starts", default="cold,warm", help="of cold, warm, replicas and fp8, in this order")
    parser.add_argument("--reads", default="warm,mapped,cold", help="of warm, mapped and cold; an empty string: none")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for `mstarctl up`; may be repeated")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="the miniature in place of the official shapes")
    parser.add_argument("--weights-only", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Replicas(Plan):
    """Plan with two ranks on the first GPU."""

    def command(self) -> list[str]:
        """Return the command of Plan with the packaged replicas file and the same GPU twice."""
        plain = super().command()
        at = plain.index("--device")
        return [*plain[:at], "--gpus", "0,0", *plain[at + 2 :]]


def started(options: argparse.Namespace, root: Path, folder: Path | None, name: str) -> dict[str, Any]:
    """Start and stop one deployment. name: `replicas`, `fp8`, or any other for a plain one.

    Returns the seconds to ready, by phase and process, the contents of its caches, and the time of a request.
    """
    root.mkdir()
    model, settings = options.model, LIMITS if options.model == "orpheus" else ()
    kind, served_model = (Replicas, "orpheus_replicas") if name == "replicas" else (Plan, model)
    plan = kind(
        model=f"{served_model}:tiny" if options.tiny else served_model,
        device=options.device,
        port=PORT,
        root=root,
        weights=folder,
        settings=(*settings, *(("quantization=fp8",) if name == "fp8" else ()), *options.set),
        config=CONFIGS / "qwen3omni_single_gpu.yaml" if model == "qwen3_omni" and not options.tiny else None,
    )
    asked = next(iter(kinds(model, TINY_SIDE if options.tiny else SIDE).values()))
    with Served(plan) as served, served.telling(3000):
        request_s = timed(PORT, asked, 1)
        head = served.snapshot()
        used = (
            subprocess.run(
                ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout.strip()
            if options.device == "cuda"
            else ""
        )
    return {
        "up_s": round(served.ready_s, 2),
        "ready_s": round(head["deployment"]["ready_s"], 2),
        "request_s": request_s,
        "phases_s": head["deployment"]["phases_s"],
        "children": {name: child["phases_s"] for name, child in head["children"].items()},
        "caches": {name: child["facts"].get("caches") for name, child in head["children"].items()},
        "gpu_memory": used,
        "steps": steps(root),
    }


def steps(root: Path) -> list[dict[str, Any]]:
    """Return the duration of each phase of the workers, from the events of their starts."""
    found = []
    for path in sorted(root.rglob("events.ndjson")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["type"] == "phase" and str(event["child"]).startswith("worker"):
                found.append({key: event.get(key) for key in ("child", "phase", "detail", "after", "after_s")})
    return found


def reading(folder: Path, reads: str) -> dict[str, Any]:
    """Measure seconds and GB/s of reading all weight files to the device, from the page cache unless a name says cold.

    reads: of warm (the loader with several numbers of threads), mapped (a memory map) and cold (dropped before).
    """
    import torch

    from mstar_core.layers import Checkpoint
    from mstar_core.weights.checkpoint import UploadTarget, stored_tensors, upload

    paths = sorted(folder.rglob("*.safetensors"))
    size = sum(path.stat().st_size for path in paths)
    start = time.perf_counter()
    stored = [each for path in paths for each in stored_tensors(path)]
    headers_s = time.perf_counter() - start
    places = {each.name: torch.empty(each.shape, dtype=each.dtype, device="cuda") for each in stored}
    targets = [UploadTarget(stored=each, tensor=places[each.name]) for each in stored]

    def mapped() -> None:
        for name, value in Checkpoint.of_files(paths).tensors():
            places[name].copy_(value)

    made: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bytes": size, "filesystem": filesystem(paths[0])}
    made |= {"tensors": len(stored), "headers_s": round(headers_s, 3)}
    made["first"] = transfer(lambda: upload(targets), size)
    if "warm" in reads.split(","):
        for threads in THREADS:
            made.setdefault(f"warm_{threads}", []).append(transfer(partial(upload, targets, threads=threads), size))
    if "mapped" in reads.split(","):
        made["mapped"] = transfer(mapped, size)
    if "cold" in reads.split(","):
        drop(folder)
        made["cold_4"] = transfer(lambda: upload(targets), size)
    probe = next(each for each in stored if each.name.endswith("down_proj.weight"))
    expected = dict(Checkpoint.of_files([probe.path]).tensors([probe.name]))[probe.name]
    made["equal"] = bool(torch.equal(places[probe.name].cpu(), expected))
    return made


def transfer(work: Callable[[], object], size: int) -> dict[str, float]:
    """Return the seconds until the device is idle, and GB/s for `size` bytes."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    return {"s": round(took, 3), "GB_per_s": round(size / took / 1e9, 2)}


def drop(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def filesystem(path: Path) -> str:
    """Return the type of a file's filesystem."""
    command = ["stat", "-f", "-c", "%T", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
