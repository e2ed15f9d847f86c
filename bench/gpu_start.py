"""Benchmark of a start on a GPU: reading of weights, and whole deployments with cold and warm caches.

Run from the repository root: `python -m bench.gpu_start [--folder DIR] [--out FILE]`. Writes an Orpheus checkpoint in
the official shapes (6.6 GB of bfloat16), reads it in several ways, then starts deployments: nothing cached, everything
cached, and two replicas on one GPU. POSIX_FADV_DONTNEED drops the checkpoint from the page cache. Prints JSON.
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
from typing import Any

from bench.serving.deployment import Plan, Served

LIMITS = ("max_concurrent_requests=64", "max_seq_len=2048")


def main() -> int:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoint; written if missing")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--starts", default="cold,warm,replicas", help="of cold, warm, replicas and fp8, in this order")
    parser.add_argument("--weights-only", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.weights_only is not None:
        print(json.dumps(reading(options.weights_only)))
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="mstar-start-", dir="/tmp"))
    folder = options.folder or scratch / "orpheus"
    report: dict[str, Any] = {"what": "start of Orpheus 3B shapes", "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "bench.serving.checkpoint", str(folder)], check=True)
    own = [sys.executable, "-m", "bench.gpu_start", "--weights-only", str(folder)]
    read = subprocess.run(own, check=False, capture_output=True, text=True)
    is_read = read.returncode == 0
    report["reading"] = json.loads(read.stdout.splitlines()[-1]) if is_read else {"error": read.stderr[-3000:]}
    print(json.dumps(report["reading"], indent=1), flush=True)
    os.environ["MSTAR_CACHE_DIR"] = str(scratch / "cache")
    os.environ.pop("TRITON_CACHE_DIR", None)
    names = options.starts.split(",")
    for name in names:
        if name == "cold":
            shutil.rmtree(scratch / "cache", ignore_errors=True)
            drop(folder)
        try:
            report[name] = started(scratch / name, folder, name)
        except Exception as error:  # noqa: BLE001 isolation boundary: one start; the others are still measured
            report[name] = {"error": str(error)[-3000:]}
        told = {key: value for key, value in report[name].items() if key != "steps"}
        print(name, json.dumps(told), flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any("error" in report[name] for name in ("reading", *names)))


class Replicas(Plan):
    """Plan with two ranks on the first GPU."""

    def command(self) -> list[str]:
        """Return the command of Plan with the packaged replicas file and the same GPU twice."""
        plain = super().command()
        at = plain.index("--device")
        return [*plain[:at], "--gpus", "0,0", *plain[at + 2 :]]


def started(root: Path, folder: Path, name: str) -> dict[str, Any]:
    """Start and stop one deployment. name: `replicas`, `fp8`, or any other for a plain one.

    Returns the seconds to ready, by phase and process, and the contents of its caches.
    """
    root.mkdir()
    kind, model = (Replicas, "orpheus_replicas") if name == "replicas" else (Plan, "orpheus")
    settings = (*LIMITS, "quantization=fp8") if name == "fp8" else LIMITS
    plan = kind(model=model, device="cuda", port=18123, root=root, weights=folder, settings=settings)
    with Served(plan) as served:
        head = served.snapshot()
        used = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    return {
        "up_s": round(served.ready_s, 2),
        "ready_s": round(head["deployment"]["ready_s"], 2),
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


def reading(folder: Path) -> dict[str, Any]:
    """Measure seconds and GB/s of reading the language model to the device, and of fusing matrices afterwards."""
    import torch

    from mstar_core.layers import Checkpoint
    from mstar_core.weights.checkpoint import UploadTarget, stored_tensors, upload

    path = folder / "lm" / "model.safetensors"
    size = path.stat().st_size
    stored = stored_tensors(path)
    places = {each.name: torch.empty(each.shape, dtype=each.dtype, device="cuda") for each in stored}
    targets = [UploadTarget(stored=each, tensor=places[each.name]) for each in stored]

    def mapped() -> None:
        for name, value in Checkpoint.of_files([path]).tensors():
            places[name].copy_(value)

    made: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bytes": size, "filesystem": filesystem(path)}
    made["drop"] = [timed(lambda: drop(folder), 0), timed(lambda: upload(targets), size)]
    for threads in (4, 4, 1, 2, 8):
        made.setdefault(f"warm_{threads}", []).append(timed(partial(upload, targets, threads=threads), size))
    made["mapped_before"] = timed(mapped, size)
    drop(folder)
    made["cold_4"] = timed(lambda: upload(targets), size)
    drop(folder)
    made["cold_mapped"] = timed(mapped, size)
    upload(targets)
    groups = [
        [n for n in places if f".layers.{i}." in n and any(p in n for p in ps)]
        for i in range(28)
        for ps in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    ]
    made["join"] = timed(lambda: [torch.cat([places[name] for name in group]) for group in groups], 0)
    probe = next(each for each in stored if each.name.endswith("down_proj.weight"))
    expected = dict(Checkpoint.of_files([path]).tensors([probe.name]))[probe.name]
    made["equal"] = bool(torch.equal(places[probe.name].cpu(), expected))
    return made


def timed(work: Callable[[], object], size: int) -> dict[str, float]:
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
