"""Ahead-of-time build of FlashInfer's paged attention kernels, on any machine with nvcc and without a GPU.

Called by `make kernels` and by scripts/wheelhouse.py. Each kernel becomes OUT/<name>/<name>.so, the layout that
FlashInfer looks for, beside a kernels.json that says what it was built with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "kernels"
LOCK = ROOT / "scripts" / "wheelhouse.lock"
BUILD_ONLY = (
    "requests",
    "tqdm",
    "einops",
    "ninja",
    "nvidia-ml-py",
    "tabulate",
    "click",
    "packaging",
    "jinja2",
    "markupsafe",
    "filelock",
    "cuda-bindings",
    "cuda-core",
    "cuda-pathfinder",
    "urllib3",
    "certifi",
    "idna",
    "charset-normalizer",
)
"""Packages that FlashInfer imports, besides torch and numpy, before it can write a build file."""


def main() -> None:
    """Build the selected kernels. Existing kernels of the same build are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=BUILD / "aot")
    parser.add_argument("--arch", default="9.0a", help="CUDA architectures, separated by blanks")
    parser.add_argument("--head-dims", default="64,128,256", help="head sizes, separated by commas")
    parser.add_argument("--dtypes", default="bfloat16", help="bfloat16, float16 or both, separated by a comma")
    parser.add_argument("--jobs", default=os.environ.get("MAX_JOBS", "2"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        build(options.out, options)
        return
    nvcc = find_nvcc()
    home = nvcc.parents[1]
    environment = {
        **os.environ,
        "CUDA_HOME": str(home),
        "FLASHINFER_CUDA_ARCH_LIST": options.arch,
        "FLASHINFER_WORKSPACE_BASE": str(BUILD),
        "LIBRARY_PATH": f"{libcuda_stub()}:{home}/lib64:{home}/lib:{os.environ.get('LIBRARY_PATH', '')}",
        "MAX_JOBS": options.jobs,
    }
    python = build_python()
    environment["PATH"] = f"{python.parent}:{nvcc.parent}:{os.environ['PATH']}"
    subprocess.run([python, __file__, *sys.argv[1:], "--inside"], env=environment, check=True)


def build(out: Path, options: argparse.Namespace) -> None:
    """Compile every kernel of the list. Runs in an environment with FlashInfer."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / "kernels.json"
    known: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    recipe = {"flashinfer": flashinfer_version(), "nvcc": nvcc_version(), "arch": options.arch}
    for spec in specs(options.head_dims.split(","), options.dtypes.split(",")):
        target = out / spec.name / f"{spec.name}.so"
        held = known.get(spec.name, {})
        if target.exists() and {key: held.get(key) for key in recipe} == recipe and held["sha256"] == digest(target):
            print(f"kept   {spec.name}")
            continue
        start = time.monotonic()
        spec.build(verbose=False)
        target.parent.mkdir(exist_ok=True)
        shutil.copy2(spec.jit_library_path, target)
        subprocess.run(["strip", "--strip-unneeded", target], check=True)
        known[spec.name] = {**recipe, "sha256": digest(target), "bytes": target.stat().st_size}
        record.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        print(f"built  {spec.name}  {target.stat().st_size / 1e6:.2f} MB  {time.monotonic() - start:.0f} s", flush=True)


def specs(head_dims: list[str], dtypes: list[str]) -> list[Any]:
    """Return the kernels of the attention backend: page append, and decode and prefill of each head size and dtype."""
    import torch
    from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.page import gen_page_module

    chosen = [gen_page_module()]
    for dim in map(int, head_dims):
        for dtype in (getattr(torch, name) for name in dtypes):
            same = (dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False)
            chosen += [gen_batch_decode_module(*same), gen_batch_prefill_module("fa2", *same, False)]
    return chosen


def find_nvcc() -> Path:
    """Return the nvcc of a toolkit that has its headers. Exits if there is none."""
    on_path = shutil.which("nvcc")
    homes = [
        os.environ.get("CUDA_HOME"),
        "/usr/local/cuda",
        str(Path(on_path).resolve().parents[1]) if on_path else None,
    ]
    for home in filter(None, homes):
        nvcc = Path(home) / "bin" / "nvcc"
        if nvcc.exists() and (Path(home) / "include" / "cuda_runtime.h").exists():
            return nvcc
    sys.exit(
        "nvcc is missing: install the CUDA compiler and runtime headers (packages cuda-nvcc-13-0 and "
        "cuda-cudart-dev-13-0), or set CUDA_HOME"
    )


def nvcc_version() -> str:
    """Return the release that `nvcc --version` prints."""
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release \S+, V(\S+)", text)
    return found.group(1) if found else text.strip()


def flashinfer_version() -> str:
    import flashinfer

    return str(flashinfer.__version__)


def libcuda_stub() -> Path:
    """Return a folder with an empty libcuda.so. The linker needs one, and only a driver installs the real one."""
    folder = BUILD / "stub"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so"
    if not library.exists():
        empty = folder / "empty.c"
        empty.write_text("")
        command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, empty]
        subprocess.run(command, check=True)
    return folder


def build_python() -> Path:
    """Return a Python with the locked FlashInfer beside this environment's torch, installed once under build/."""
    pins = [f"{name}=={version}" for name, version, group in locked() if group == "attention"]
    folder = BUILD / "env"
    python, mark = folder / "bin" / "python", folder / "pins.txt"
    if mark.exists() and mark.read_text() == "\n".join(pins):
        return python
    venv.create(folder, with_pip=True, clear=True)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    own = [path for path in sys.path if path.endswith("site-packages")]
    (site / "beside.pth").write_text("\n".join(own) + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *pins, *BUILD_ONLY], check=True)
    mark.write_text("\n".join(pins))
    return python


def locked() -> list[tuple[str, str, str]]:
    """Return name, version and group of every pin in the lock file."""
    lines = (line.split() for line in LOCK.read_text().splitlines() if line and not line.startswith("#"))
    return [(fields[0], fields[1], fields[2]) for fields in lines]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
