"""Resolution of the weights: a given folder, the hub cache, or a download with byte progress.

Called by the process that prepares the weights, before any worker starts. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.families.tokenizer import FILE
from mstar_core.weights.files import checked_folder
from mstar_core.weights.sources import HuggingFace, WeightHub, cached_checkpoint, cached_or_fetched, chosen_files
from mstar_whisper.checkpoint.config import CONFIG, GENERATION, read_config

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

REPO: Final = "openai/whisper-large-v3-turbo"
WANTED: Final = ("*.json", "model*.safetensors")
"""Patterns of the repository files that a deployment reads."""

WAYS: Final = (
    "use --weights DIR for your own folder, --cache-dir DIR for another cache, "
    "or start whisper:tiny, which needs no download"
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
    find = partial(cached_checkpoint, source, REPO, (CONFIG, GENERATION, FILE), checked, WAYS)
    return cached_or_fetched(source, REPO, find, needed_files, WAYS, progress)


def checked(folder: Path) -> Path:
    """Check config and weight files of a checkpoint and return `folder`. Tensors are not read. Raises WeightsError."""
    return checked_folder(folder, read_config)


def needed_files(listed: Mapping[str, int]) -> dict[str, int]:
    """Return the repository files to download with their sizes. Raises WeightsError if one of a kind is absent."""
    needed = {CONFIG: "config", GENERATION: "config of generation", FILE: "tokenizer", "*.safetensors": "weights"}
    return chosen_files(REPO, listed, WANTED, needed, WAYS)
