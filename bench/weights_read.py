"""Read a safetensors file from the page cache into tensors on the CPU: the loader beside plain parallel reads.

`python -m bench.weights_read OUT.json` writes a file of `--gib` GiB into a temporary folder, reads it once, and then
measures all ways in turn, `--rounds` times. Wall and CPU seconds are those of this process. `fastsafetensors` takes
part where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mstar_core.layers import Checkpoint, load_weights
from mstar_core.weights.checkpoint import StoredTensor, UploadTarget, stored_tensors, upload

TENSOR_BYTES: Final = 32 << 20
"""Size of each tensor: a matrix of 4,096 by 4,096 in bfloat16."""

CHUNK_BYTES: Final = 16 << 20
THREADS: Final = (1, 2, 4)
GIB: Final = 1 << 30

Way = Callable[[], Mapping[str, Tensor]]
"""Reads the whole file into new tensors."""


class Matrices(nn.Module):
    """Matrices under the names of the file, not initialized."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        side = int((TENSOR_BYTES // 2) ** 0.5)
        for name in names:
            self.register_buffer(name, torch.empty(side, side, dtype=torch.bfloat16))


def written(folder: Path, gib: float) -> Path:
    """Write random matrices as one file of about so many GiB."""
    side = int((TENSOR_BYTES // 2) ** 0.5)
    block = torch.randint(0, 2**15 - 2**9, (side, side), dtype=torch.int16)
    values = {f"w{number}": (block + number).view(torch.bfloat16) for number in range(round(gib * GIB / TENSOR_BYTES))}
    save_file(values, folder / "model.safetensors")
    return folder / "model.safetensors"


def by_loader(path: Path) -> Way:
    """`load_weights` on the CPU: a memory map, copied by one thread."""

    def read() -> Mapping[str, Tensor]:
        module = Matrices([stored.name for stored in stored_tensors(path)])
        load_weights(module, Checkpoint.of_files([path]))
        return dict(module.named_buffers())

    return read


def by_upload(path: Path) -> Way:
    """The reader of GPUs, with targets on the CPU: four threads, buffers, and a copy to the target."""

    def read() -> Mapping[str, Tensor]:
        stored = stored_tensors(path)
        targets = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in stored}
        upload([UploadTarget(stored=one, tensor=targets[one.name]) for one in stored])
        return targets

    return read


def by_threads(path: Path, threads: int) -> Way:
    """Plain `preadv` of chunks straight into the tensors, by several threads."""

    def read() -> Mapping[str, Tensor]:
        stored = stored_tensors(path)
        targets = {one.name: torch.empty(one.shape, dtype=one.dtype) for one in stored}
        jobs = [(one, start) for one in stored for start in range(0, one.size, CHUNK_BYTES)]
        lock, left = threading.Lock(), iter(jobs)
        file = os.open(path, os.O_RDONLY)

        def work() -> None:
            while True:
                with lock:
                    job = next(left, None)
                if job is None:
                    return
                _read_chunk(file, targets[job[0].name], *job)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.close(file)
        return targets

    return read


def _read_chunk(file: int, target: Tensor, stored: StoredTensor, start: int) -> None:
    view = memoryview(target.view(torch.uint8).flatten().numpy())[start : start + CHUNK_BYTES]
    done = 0
    while done < len(view):
        done += os.preadv(file, [view[done:]], stored.offset + start + done)


def by_fastsafetensors(path: Path) -> Way:
    """The package fastsafetensors, on the CPU."""

    def read() -> Mapping[str, Tensor]:
        from fastsafetensors import fastsafe_open

        with fastsafe_open(filenames=[str(path)], nogds=True, device="cpu") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}

    return read


def measured(way: Way) -> dict[str, float]:
    """Return wall and CPU seconds of one read."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    found = way()
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
    del found
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"wall_s": round(wall, 3), "cpu_s": round(cpu, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the file is written; by default the temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = written(Path(folder), options.gib)
        ways: dict[str, Way] = {"loader, CPU": by_loader(path), "reader of GPUs, on the CPU": by_upload(path)}
        ways |= {f"preadv, {threads} threads": by_threads(path, threads) for threads in THREADS}
        if importlib.util.find_spec("fastsafetensors") is not None:
            ways["fastsafetensors"] = by_fastsafetensors(path)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(options.rounds + 1):
            for name, way in ways.items():
                rounds[name].append(measured(way))
        report: dict[str, Any] = {"schema": "weights_read/1", "bytes": path.stat().st_size, "cores": os.cpu_count()}
        report["load_average"] = os.getloadavg()[0]
        report["torch"] = torch.__version__
        report["ways"] = {
            name: {
                "best_gb_s": round(path.stat().st_size / min(one["wall_s"] for one in found[1:]) / 1e9, 2),
                "least_cpu_s": min(one["cpu_s"] for one in found[1:]),
                "rounds": found[1:],
            }
            for name, found in rounds.items()
        }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report) + "\n")
    print(json.dumps({name: (each["best_gb_s"], each["least_cpu_s"]) for name, each in report["ways"].items()}))


if __name__ == "__main__":
    main()
