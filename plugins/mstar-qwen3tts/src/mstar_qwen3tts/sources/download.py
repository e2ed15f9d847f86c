"""Resolution of the weights: a given folder, the hub cache, or a download with byte progress.

Called by the process that prepares the weights, before any worker starts. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.weights.files import checked_folder
from mstar_core.weights.sources import HuggingFace, WeightHub, cached_checkpoint, cached_or_fetched, chosen_files
from mstar_qwen3tts.checkpoint.config import CODEC_FOLDER, CONFIG, read_config

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

CUSTOM_REPO: Final = "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"
BASE_REPO: Final = "Qwen/Qwen3-TTS-12Hz-1.7B-Base"
WANTED: Final = ("*.json", "merges.txt", "*.safetensors", f"{CODEC_FOLDER}/*.json", f"{CODEC_FOLDER}/*.safetensors")
"""Patterns of the repository files that a deployment reads."""

WAYS: Final = (
    "use --weights DIR for your own folder or another Qwen3-TTS-12Hz checkpoint, --cache-dir DIR for another cache, "
    "or start qwen3_tts:tiny, which needs no download"
)


def resolve_custom(
    folder: Path | None = None,
    cache_dir: Path | None = None,
    progress: WeightProgress | None = None,
    *,
    hub: WeightHub | None = None,
) -> Path:
    """Return the folder of a complete CustomVoice checkpoint; arguments and errors as `resolved`."""
    return resolved(CUSTOM_REPO, folder, cache_dir, progress, hub)


def resolve_base(
    folder: Path | None = None,
    cache_dir: Path | None = None,
    progress: WeightProgress | None = None,
    *,
    hub: WeightHub | None = None,
) -> Path:
    """Return the folder of a complete Base checkpoint; arguments and errors as `resolved`."""
    return resolved(BASE_REPO, folder, cache_dir, progress, hub)


def resolved(
    repo: str, folder: Path | None, cache_dir: Path | None, progress: WeightProgress | None, hub: WeightHub | None
) -> Path:
    """Return the folder of a complete checkpoint.

    folder: given by the operator, checked only. cache_dir: hub cache instead of the default. progress: called with
    (bytes so far, total bytes, file) during a download. Raises WeightsError with the missing or damaged file, the paths
    tried, and what to do.
    """
    if folder is not None:
        return checked(folder)
    source = hub or HuggingFace(cache_dir)
    find = partial(cached_checkpoint, source, repo, (CONFIG, f"{CODEC_FOLDER}/{CONFIG}"), checked, WAYS)
    return cached_or_fetched(source, repo, find, partial(needed_files, repo), WAYS, progress)


def checked(folder: Path) -> Path:
    """Check config and weight files of a checkpoint and return `folder`. Tensors are not read. Raises WeightsError."""
    found = checked_folder(folder, read_config)
    if (folder / CODEC_FOLDER / CONFIG).is_file() and not (folder / "random_weights.json").is_file():
        checked_folder(folder / CODEC_FOLDER, lambda each: each)
    return found


def needed_files(repo: str, listed: Mapping[str, int]) -> dict[str, int]:
    """Return the repository files to download with their sizes. Raises WeightsError if config or weights are absent."""
    needs = {CONFIG: "config", "*.safetensors": "weights", f"{CODEC_FOLDER}/*.safetensors": "codec weights"}
    return chosen_files(repo, listed, WANTED, needs, WAYS)
