"""Cache folders of default checkpoints and compiled kernels.

Used by `up`, by the supervisor for its children, and by workers that download weights.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from typing import Final

TRITON_CACHE: Final = "TRITON_CACHE_DIR"
"""Triton's own variable for the folder of compiled kernels."""

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
