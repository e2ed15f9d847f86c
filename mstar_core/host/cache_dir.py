"""Cache folders of default checkpoints, compiled kernels and bytecode of Python modules.

Used by `up`, by the supervisor for its children, and by workers that download weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import metadata
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Final

TRITON_CACHE: Final = "TRITON_CACHE_DIR"
"""Triton's own variable for the folder of compiled kernels."""

BYTECODE: Final = "PYTHONPYCACHEPREFIX"
"""Python's own variable for the folder of bytecode."""

UNWRITTEN: Final = "PYTHONDONTWRITEBYTECODE"
LARGEST: Final = "torch"
"""The package that decides where bytecode is kept: most of the modules are its own."""

_GPUS: Final = Path("/proc/driver/nvidia/gpus")


def cache_root(chosen: str | None) -> Path:
    """Return the cache folder: --cache-dir, $MSTAR_CACHE_DIR or $XDG_CACHE_HOME/mstar, whichever is set first."""
    if chosen:
        return Path(chosen)
    folder = os.environ.get("MSTAR_CACHE_DIR")
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mstar"


def triton_cache(chosen: str | None) -> Path:
    """Return the folder of compiled Triton kernels: $TRITON_CACHE_DIR, or one for these versions and this GPU model."""
    folder = os.environ.get(TRITON_CACHE)
    if folder:
        return Path(folder)
    parts = [f"triton-{_version('triton')}", f"torch-{_version('torch')}", _gpu()]
    return cache_root(chosen) / "kernels" / "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part) for part in parts)


def bytecode_environment(
    chosen: str | None, environment: Mapping[str, str] = os.environ, package: str = LARGEST
) -> dict[str, str]:
    """Return the variables with which processes keep bytecode in the cache folder. Empty if they need not.

    A worker imports thousands of modules, and compiling them takes three times as long as loading their bytecode.
    Container images often set PYTHONDONTWRITEBYTECODE and install packages without it.
    They need not if the package has bytecode beside its sources, or if Python will write it there. A folder that the
    environment names is kept. chosen: the cache folder of `--cache-dir`.
    """
    if environment.get(BYTECODE):
        return {}
    found = find_spec(package)
    source = None if found is None else found.origin
    if source is None or os.path.exists(cache_from_source(source)):
        return {}
    if not environment.get(UNWRITTEN) and os.access(os.path.dirname(source), os.W_OK):
        return {}
    return {BYTECODE: str((cache_root(chosen) / "bytecode").absolute()), UNWRITTEN: ""}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _gpu() -> str:
    """Return the model of the first GPU. The driver's files answer at once, nvidia-smi takes a second."""
    for path in sorted(_GPUS.glob("*/information")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "gpu"
