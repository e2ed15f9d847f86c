"""Lookup and download of the official weights: a given folder, the hub's cache, or a download with byte progress.

Called by the process that prepares the weights, before any worker starts. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.errors import WeightsError
from mstar_core.weights.files import SEED, check_whole, weight_files
from mstar_core.weights.sources import HuggingFace, WeightHub, cached_checkpoint, cached_or_fetched, chosen_files
from mstar_wan22.checkpoint.config import FILES, HIGH, INDEX, LOW, TEXT, TEXT_FILES, TOKENIZER, VAE, read_sizes
from mstar_wan22.plugin import VARIANTS, WANTED

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

WAYS: Final = "use --weights DIR, --cache-dir DIR for another cache, or start the :tiny model, which needs no download"


def resolve_wan22(
    folder: Path | None = None,
    cache_dir: Path | None = None,
    progress: WeightProgress | None = None,
    *,
    hub: WeightHub | None = None,
) -> Path:
    """Return the folder of a complete checkpoint of TI2V-5B.

    folder: the operator's own, which is only checked. cache_dir: hub cache instead of the default. progress: called
    with (bytes so far, total bytes, file). Raises WeightsError naming the missing or damaged file and what to try.
    """
    return _resolved("wan22", folder, hub or HuggingFace(cache_dir), progress)


def resolve_wan22_a14b(
    folder: Path | None = None,
    cache_dir: Path | None = None,
    progress: WeightProgress | None = None,
    *,
    hub: WeightHub | None = None,
) -> Path:
    """Return the folder of a complete checkpoint of T2V-A14B, see `resolve_wan22`."""
    return _resolved("wan22_a14b", folder, hub or HuggingFace(cache_dir), progress)


def resolve_wan22_i2v_a14b(
    folder: Path | None = None,
    cache_dir: Path | None = None,
    progress: WeightProgress | None = None,
    *,
    hub: WeightHub | None = None,
) -> Path:
    """Return the folder of a complete checkpoint of I2V-A14B, see `resolve_wan22`."""
    return _resolved("wan22_i2v_a14b", folder, hub or HuggingFace(cache_dir), progress)


def _resolved(name: str, folder: Path | None, hub: WeightHub, progress: WeightProgress | None) -> Path:
    if folder is not None:
        return checked(folder)
    repo = VARIANTS[name].repo
    find = partial(cached_checkpoint, hub, repo, (INDEX,), checked, WAYS)
    return cached_or_fetched(hub, repo, find, partial(needed_files, repo), WAYS, progress)


def checked(folder: Path) -> Path:
    """Check configs and weight files of a checkpoint and return `folder`. Tensors are not read. Raises WeightsError."""
    if not folder.is_dir():
        hint = "give --weights the folder of a checkpoint"
        raise WeightsError(f"{folder} is not a folder", hint=hint, file=str(folder))
    sizes = read_sizes(folder)
    tokenizer = folder / TOKENIZER / "tokenizer.json"
    if not tokenizer.is_file():
        raise WeightsError(f"{tokenizer} is missing", hint=WAYS, file=str(tokenizer))
    parts = (HIGH, LOW, VAE) if sizes.has_experts else (HIGH, VAE)
    if (folder / SEED).is_file():
        return folder
    for part, names in ((TEXT, TEXT_FILES), *((part, FILES) for part in parts)):
        for path in weight_files(folder / part, names):
            check_whole(path)
    return folder


def needed_files(repo: str, listed: Mapping[str, int]) -> dict[str, int]:
    """Return the repository's files to download with their sizes. Raises WeightsError if one of a kind is absent."""
    needed = {INDEX: "config", f"{TOKENIZER}/tokenizer.json": "tokenizer", "*/*.safetensors": "weights"}
    return chosen_files(repo, listed, WANTED, needed, WAYS)
