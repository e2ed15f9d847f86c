"""Resolution of the weights: a given folder, the hub cache, or a download with byte progress.

Called by the process that prepares the weights, before any worker starts. Loads no torch.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.errors import WeightsError
from mstar_core.weights.files import check_whole, weight_files
from mstar_core.weights.sources import HuggingFace, WeightHub, cached_or_fetched
from mstar_llm.checkpoint.config import CONFIG, read_config
from mstar_llm.request.tokenizer import FILE

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

REPO: Final = "Qwen/Qwen3-8B"
NEEDED: Final = ("*.json", "*.jinja", "model*.safetensors")
"""Patterns of the repository files that a deployment reads."""

WAYS: Final = (
    "use --weights DIR for your own folder, --cache-dir DIR for another cache, "
    "or start llm:tiny, which needs no download"
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
    return cached_or_fetched(source, REPO, partial(_cached, REPO, source), partial(needed_files, REPO), WAYS, progress)


def checked(folder: Path) -> Path:
    """Check config and weight files of a checkpoint and return `folder`. Tensors are not read. Raises WeightsError."""
    if not folder.is_dir():
        hint = "give --weights the folder of a checkpoint"
        raise WeightsError(f"{folder} is not a folder", hint=hint, file=str(folder))
    read_config(folder)
    for path in weight_files(folder):
        check_whole(path)
    return folder


def needed_files(repo: str, listed: Mapping[str, int]) -> dict[str, int]:
    """Return the repository files to download with their sizes. Raises WeightsError if one of the kinds is absent."""
    files = {
        name: size
        for name, size in listed.items()
        if "/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in NEEDED)
    }
    for pattern in (CONFIG, FILE, "*.safetensors"):
        if not fnmatch.filter(files, pattern):
            detail = f"it lists {len(listed)} files and no {pattern}"
            raise WeightsError(f"{repo} is not a checkpoint of this kind", detail, WAYS, file=pattern)
    return files


def _cached(repo: str, hub: WeightHub) -> Path:
    """Return the checkpoint's folder in the cache. Raises WeightsError with the first missing or damaged file."""
    config, tokenizer = hub.cached(repo, CONFIG), hub.cached(repo, FILE)
    if config is None or tokenizer is None:
        missing = FILE if config else CONFIG
        raise WeightsError(f"{missing} of {repo} is missing", hint=WAYS, file=missing)
    return checked(config.parent)
