"""Triton kernels ahead of time: packs of compiled kernels, made on a GPU machine, or from lists without a GPU.

`pack CACHE OUT` packs Triton's cache after a start, `install PACK CACHE` installs a pack by hand (workers install what
MSTAR_KERNELS names), and `build OUT LIST...` compiles recorded lists (MSTAR_KERNEL_LIST) for an architecture that this
machine does not have. A key of Triton's cache hashes Triton's own files, which differ from one Python to the next: the
build takes the hash from the wheel of the target's Python. Called by `make kernels`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "kernels"
LISTS = ROOT / "scripts" / "kernel_lists"
VERSION: Final = "3.6.0"
"""Triton of the GPU image. The lists are recorded with it."""

PLATFORMS = ("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_27_x86_64")


def main() -> int:
    """Run the chosen command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="pack Triton's cache folder")
    packing.add_argument("cache", type=Path)
    packing.add_argument("out", type=Path)
    installing = commands.add_parser("install", help="install a pack into Triton's cache folder")
    installing.add_argument("pack", type=Path)
    installing.add_argument("cache", type=Path)
    building = commands.add_parser("build", help="compile lists and pack the kernels")
    building.add_argument("out", type=Path)
    building.add_argument("lists", type=Path, nargs="*", help=f"by default those of {LISTS.relative_to(ROOT)}")
    building.add_argument("--arch", type=int, default=90, help="compute capability, as 90")
    building.add_argument("--python", default="3.12", help="version of the target's Python")
    building.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), *map(str, ROOT.glob("plugins/*/src"))]
    from mstar_core.host import kernel_pack

    if options.command == "pack":
        print(f"{options.out}: {kernel_pack.pack(options.cache, options.out)} kernels")
    elif options.command == "install":
        print(f"{options.cache}: {kernel_pack.install(options.pack, options.cache)} new keys")
    else:
        return build(options)
    return 0


def build(options: argparse.Namespace) -> int:
    """Compile every entry of the lists and pack the result. Returns 1 if an entry of the lists is stale."""
    lists = options.lists or sorted(LISTS.glob("*.jsonl"))
    entries = unique(lists)
    if not entries:
        print(f"no list of kernels in {LISTS.relative_to(ROOT)}: no pack is made")
        return 0
    own = ".".join(map(str, sys.version_info[:2]))
    sys.path.insert(0, str(triton_for(own)))
    target = triton_for(options.python)
    with tempfile.TemporaryDirectory(prefix="mstar-kernels-") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        compiler = Compiler(options.arch, key_of(target / "triton"))
        done = compiler.compile(entries, options.jobs)
        changed = sum(entry["hash"] not in compiler.keys(folder) for entry in done)
        launchers = compiler.launchers(done, options.python)
        from mstar_core.host.kernel_pack import pack

        options.out.parent.mkdir(parents=True, exist_ok=True)
        count = pack(Path(folder), options.out)
    size = options.out.stat().st_size
    print(
        f"{options.out}: {count} kernels of {len(entries)}, {launchers} launchers, {size / 1e6:.2f} MB; "
        f"{changed} have changed since they were recorded"
    )
    return int(count < len(entries))


def unique(lists: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the entries of all lists, each kernel once."""
    found: dict[str, dict[str, Any]] = {}
    for path in lists:
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found.setdefault(json.dumps({**entry, "hash": ""}, sort_keys=True), entry)
    return list(found.values())


def triton_for(python: str) -> Path:
    """Return a folder with Triton's wheel for a version of Python, downloaded once under build/."""
    folder = BUILD / f"triton-{VERSION}-py{python}"
    if not (folder / "triton").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            python,
            "--implementation",
            "cp",
            *PLATFORMS,
            "--target",
            str(folder),
            f"triton=={VERSION}",
        ]
        subprocess.run(command, check=True)
    return folder


def key_of(triton: Path) -> str:
    """Return the part of cache keys that identifies a Triton: its version and the hashes of its files.

    The same text as `triton.runtime.cache.triton_key`, of a package that this Python need not be able to import.
    """
    files = [triton / "runtime" / "cache.py", *modules(triton / "compiler"), *modules(triton / "backends")]
    files += [triton / "_C" / "libtriton.so", *modules(triton / "language")]
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return VERSION + "-".join(hashes)


def modules(folder: Path) -> Iterator[Path]:
    """Yield the source files of a package in the order of pkgutil: sorted, a package before its contents."""
    seen: set[str] = set()
    for path in sorted(folder.iterdir()):
        name = inspect.getmodulename(path.name) if path.is_file() else path.name
        if name is None or name in seen or name == "__init__" or "." in name:
            continue
        if path.is_file():
            seen.add(name)
            yield path
        elif (path / "__init__.py").is_file():
            seen.add(name)
            yield path / "__init__.py"
            yield from modules(path)


class Compiler:
    """Triton with a target that this machine does not have. Made once in a process."""

    def __init__(self, arch: int, key: str) -> None:
        import triton.backends.nvidia.driver as nvidia
        import triton.runtime.cache as cache
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver

        self.target = GPUTarget("cuda", arch, 32)
        self.nvidia = nvidia
        self._keys: set[str] | None = None
        cache.triton_key = lambda: key
        driver.set_active(_NoDevice(self.target))

    def compile(self, entries: Sequence[dict[str, Any]], jobs: int) -> list[dict[str, Any]]:
        """Compile entries into Triton's cache with forked processes. Returns those that compile; names the others."""
        from mstar_core.process.forked_work import run_forked

        done = run_forked([partial(self._compile, entry) for entry in entries], max(1, jobs), _show(len(entries)))
        for index, entry in enumerate(entries):
            if index not in done:
                try:
                    self._compile(entry)
                except Exception as error:  # noqa: BLE001 isolation boundary: one kernel
                    print(f"stale: {entry['kernel']}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return [entries[index] for index in sorted(done)]

    def launchers(self, entries: Sequence[dict[str, Any]], python: str) -> int:
        """Build the launchers of entries for a version of Python. Returns their number, 0 without its headers."""
        include = headers(python)
        if include is None:
            print(f"no headers of Python {python}: launchers are built on the GPU machine")
            return 0
        from triton.runtime.build import platform_key
        from triton.runtime.cache import get_cache_manager

        folder = Path(self.nvidia.__file__).parent
        sources = {self._launcher(entry): "__triton_launcher" for entry in entries}
        sources[(folder / "driver.c").read_text()] = "cuda_utils"
        suffix = f".cpython-{python.replace('.', '')}-x86_64-linux-gnu.so"
        for source, name in sources.items():
            key = hashlib.sha256((source + platform_key()).encode()).hexdigest()
            made = _shared_library(source, [folder / "include", include])
            get_cache_manager(key).put(made, f"{name}{suffix}", binary=True)
        return len(sources) - 1

    def keys(self, folder: str) -> set[str]:
        """Return the hashes of the compiled kernels in a cache folder."""
        if self._keys is None:
            self._keys = {json.loads(path.read_text()).get("hash", "") for path in Path(folder).glob("*/[!_]*.json")}
        return self._keys

    def _compile(self, entry: dict[str, Any]) -> Any:
        import triton

        from mstar_core.engine.cuda_graphs.kernel_list import source_of

        source, options = source_of(entry)
        return triton.compile(source, target=self.target, options=options)

    def _launcher(self, entry: dict[str, Any]) -> str:
        made = self._compile(entry)  # from the cache
        found = made.src
        meta = getattr(made.metadata, "tensordesc_meta", None)
        text: str = self.nvidia.make_launcher(found.constants, dict(found.signature), meta)
        return text


class _NoDevice:
    """Triton's driver where there is no GPU."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


def _show(total: int) -> Any:
    return lambda done: print(f"{done} of {total}", flush=True) if done % 20 == 0 else None


def _shared_library(source: str, includes: Sequence[Path]) -> bytes:
    """Compile C source that uses the CUDA driver's library, which need not be here."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from kernels import libcuda_stub

    stub = libcuda_stub()
    with tempfile.TemporaryDirectory(prefix="mstar-launcher-") as scratch:
        file, out = Path(scratch) / "main.c", Path(scratch) / "main.so"
        file.write_text(source)
        shutil.copy2(stub / "libcuda.so", Path(scratch) / "libcuda.so.1")
        command = [
            "gcc",
            str(file),
            "-O3",
            "-shared",
            "-fPIC",
            "-Wno-psabi",
            "-s",
            "-o",
            str(out),
            "-l:libcuda.so.1",
            f"-L{scratch}",
            *(f"-I{each}" for each in includes),
        ]
        subprocess.run(command, check=True)
        return out.read_bytes()


def headers(python: str) -> Path | None:
    """Return the folder of a Python's C headers, None if no interpreter of this version has them."""
    if python == ".".join(map(str, sys.version_info[:2])):
        found = [Path(sysconfig.get_paths()["include"])]
    else:
        homes = [Path.home() / ".pyenv" / "versions", Path("/usr"), Path("/usr/local"), Path("/opt")]
        found = [path for home in homes for path in home.glob(f"**/include/python{python}") if path.is_dir()]
    return next((path for path in found if (path / "Python.h").is_file()), None)


if __name__ == "__main__":
    sys.exit(main())
