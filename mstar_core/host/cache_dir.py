"""Where what can be made again is kept: default checkpoints and compiled kernels. Used by the first child and by the
supervisor for all children."""

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
    """Where things are kept: --cache-dir, $MSTAR_CACHE_DIR or $XDG_CACHE_HOME/mstar."""
    if chosen:
        return Path(chosen)
    own = os.environ.get("MSTAR_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mstar"


def triton_cache(chosen: str | None) -> Path:
    """The folder of compiled Triton kernels of these versions on this host's GPU: $TRITON_CACHE_DIR when it is set."""
    own = os.environ.get(TRITON_CACHE)
    if own:
        return Path(own)
    parts = [f"triton-{_version('triton')}", f"torch-{_version('torch')}", _gpu()]
    return cache_root(chosen) / "kernels" / "_".join(re.sub(r"[^A-Za-z0-9.+-]+", "-", part) for part in parts)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _gpu() -> str:
    """The model of the first GPU as the driver tells it, without asking the driver's tool, which takes a second."""
    for path in sorted(_GPUS.glob("*/information")):
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "gpu"
