"""Resolution of the weights: a given folder, the hub cache, or a download with byte progress.

Called by the process that prepares the weights, before any worker starts. Loads no torch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.errors import WeightsError
from mstar_core.weights.files import check_whole, weight_files
from mstar_core.weights.sources import HuggingFace, WeightHub, cached_or_fetched
from mstar_qwen3omni.checkpoint.config import CONFIG, read_config

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

REPO: Final = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
WANTED: Final = ("*.json", "merges.txt", "*.safetensors")
"""Patterns of the repository files that a deployment reads."""

WAYS: Final = (
    "use --weights DIR for your own folder, --cache-dir DIR for another cache, "
    "or start qwen3_omni:tiny, which needs no download"
)


def resolve_weights(
    folder: Path | None = None,
    cache_dir: Path | None = None,
    progress: WeightProgress | None = None,
    *,
    hub: WeightHub | None = None,
) -> Path:
    """Return the folder of a complete checkpoint.

    folder: given by the operator, checked only. cache_dir: hub cache instead of the default. progress: called with
    (bytes so far, total bytes, file) during a download. Raises WeightsError with the missing or damaged file, the paths
    tried, and what to do.
    """
    if folder is not None:
        return checked(folder)
    source = hub or HuggingFace(cache_dir)
    return cached_or_fetched(source, REPO, lambda: _cached(source), needed_files, WAYS, progress)


def checked(folder: Path) -> Path:
    """Check config and weight files of a checkpoint and return `folder`. Tensors are not read. Raises WeightsError."""
    if not folder.is_dir():
        hint = "give --weights the folder of a checkpoint"
        raise WeightsError(f"{folder} is not a folder", hint=hint, file=str(folder))
    read_config(folder)
    for path in weight_files(folder):
        check_whole(path)
    return folder


def needed_files(listed: Mapping[str, int]) -> dict[str, int]:
    """Return the repository files to download with their sizes. Raises WeightsError if config or weights are absent."""
    files = {
        name: size
        for name, size in listed.items()
        if any(fnmatch.fnmatchcase(name, name_pattern) for name_pattern in WANTED)
    }
    for pattern, kind in ((CONFIG, "config"), ("*.safetensors", "weights")):
        if not fnmatch.filter(files, pattern):
            detail = f"it lists {len(listed)} files and no {pattern}"
            raise WeightsError(f"{REPO} contains no {kind}", detail, WAYS, file=pattern)
    return files


def _cached(hub: WeightHub) -> Path:
    """Return the checkpoint's folder in the cache. Raises WeightsError with the first missing or damaged file."""
    config = hub.cached(REPO, CONFIG)
    if config is None:
        raise WeightsError(f"{CONFIG} of {REPO} is missing", hint=WAYS, file=CONFIG)
    return checked(config.parent)
