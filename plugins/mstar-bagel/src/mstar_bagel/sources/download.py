"""Lookup and download of the official weights: a given folder, the hub's cache, or a download with byte progress.

Called by the process that prepares the weights, before any worker starts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_bagel.checkpoint.config import (
    LLM_CONFIG,
    MODEL_FILE,
    TOKENIZER_CONFIG,
    VAE_FILE,
    VIT_CONFIG,
    read_sizes,
)
from mstar_bagel.plugin import REPO, WANTED
from mstar_core.errors import WeightsError
from mstar_core.weights.files import SEED, check_whole
from mstar_core.weights.sources import HuggingFace, WeightHub, cached_or_fetched

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

CONFIGS: Final = (LLM_CONFIG, VIT_CONFIG, TOKENIZER_CONFIG)
NEEDED: Final = (*CONFIGS, MODEL_FILE, VAE_FILE)
WAYS: Final = "use --weights DIR, --cache-dir DIR for another cache, or start bagel:tiny, which needs no download"


def resolve_weights(
    folder: Path | None = None,
    cache_dir: Path | None = None,
    progress: WeightProgress | None = None,
    *,
    hub: WeightHub | None = None,
) -> Path:
    """Return the folder of a complete checkpoint.

    folder: the operator's own, which is only checked. cache_dir: hub cache instead of the default. progress: called
    with (bytes so far, total bytes, file). Raises WeightsError naming the missing or damaged file and what to try.
    """
    if folder is not None:
        check_files(folder)
        return folder
    source = hub or HuggingFace(cache_dir)
    return cached_or_fetched(source, REPO, lambda: _cached(source), needed_files, WAYS, progress)


def check_files(folder: Path) -> None:
    """Raise WeightsError unless configs and weight files in `folder` are complete. Tensors are not read."""
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder", hint="give the folder of a checkpoint", file=str(folder))
    weights = () if (folder / SEED).is_file() else (MODEL_FILE, VAE_FILE)
    for name in (*CONFIGS, *weights):
        if not (folder / name).is_file():
            raise WeightsError(f"{folder / name} is missing", hint=WAYS, file=str(folder / name))
    read_sizes(folder)
    for name in weights:
        check_whole(folder / name)


def needed_files(listed: Mapping[str, int]) -> dict[str, int]:
    """Return the repository files to fetch with their sizes. Raises WeightsError if one is missing there."""
    lacking = next((name for name in NEEDED if name not in listed), None)
    if lacking is not None:
        raise WeightsError(f"{REPO} lacks {lacking}", f"it lists {len(listed)} files", WAYS, file=lacking)
    return {
        name: size for name, size in listed.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in WANTED)
    }


def _cached(hub: WeightHub) -> Path:
    """Return the folder in the cache. Raises WeightsError with the first missing or damaged file."""
    path = hub.cached(REPO, LLM_CONFIG)
    if path is None:
        raise WeightsError(f"{LLM_CONFIG} of {REPO} is missing", hint=WAYS, file=LLM_CONFIG)
    check_files(path.parent)
    return path.parent
