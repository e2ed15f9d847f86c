"""Resolution of the weights: a given folder, the hub cache, or a download with byte progress.

Called by the process that prepares the weights, before any worker starts. Loads no torch.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.errors import WeightsError
from mstar_core.weights.sources import HuggingFace, WeightHub, fetch_files
from mstar_qwen3omni.checkpoint.config import CONFIG, read_config

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

REPO: Final = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
INDEX: Final = "model.safetensors.index.json"
WHOLE: Final = "model.safetensors"
SEED: Final = "random_weights.json"
"""File of a folder with random weights in place of weight files: see `mstar_core.weights.random_fill`."""

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
    try:
        return _cached(source)
    except WeightsError as missing:
        if source.is_offline:
            detail = f"{missing.title}; looked in {source.cache}; downloads are disabled (HF_HUB_OFFLINE)"
            raise WeightsError(
                f"the weights of {REPO} are not on this machine", detail, WAYS, **missing.facts
            ) from missing
    fetch_files(source, REPO, wanted_files(source.files(REPO)), progress)
    return _cached(source)


def checked(folder: Path) -> Path:
    """Check config and weight files of a checkpoint and return `folder`. Tensors are not read. Raises WeightsError."""
    if not folder.is_dir():
        hint = "give --weights the folder of a checkpoint"
        raise WeightsError(f"{folder} is not a folder", hint=hint, file=str(folder))
    read_config(folder)
    for path in weight_files(folder):
        problem = damage(path)
        if problem:
            raise WeightsError(f"{path} is damaged", problem, "download this file again", file=str(path))
    return folder


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: those of its index, or one file. Raises WeightsError for a bad index."""
    index = folder / INDEX
    if (folder / SEED).is_file():
        return []
    if not index.is_file():
        return [folder / WHOLE]
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / file for file in sorted({str(file) for file in named.values()})]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} cannot be read", repr(error), "download it again", file=str(index)) from error


def damage(path: Path) -> str:
    """Return what is wrong with a safetensors file, or an empty text if its size matches its header."""
    if not path.is_file():
        return "it is missing"
    size = path.stat().st_size
    with path.open("rb") as file:
        head = int.from_bytes(file.read(8), "little")
        if size < 8 or head > size - 8:
            return f"{size} bytes are too few for its header"
        try:
            entries = [entry for name, entry in json.loads(file.read(head)).items() if name != "__metadata__"]
            whole = 8 + head + max((int(entry["data_offsets"][1]) for entry in entries), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            return f"its header cannot be read: {error}"
    return "" if whole == size else f"{size} bytes; expected from its header: {whole}"


def wanted_files(listed: Mapping[str, int]) -> dict[str, int]:
    """Return the repository files to download with their sizes. Raises WeightsError if config or weights are absent."""
    found = {name: size for name, size in listed.items() if any(fnmatch.fnmatchcase(name, each) for each in WANTED)}
    for pattern, kind in ((CONFIG, "config"), ("*.safetensors", "weights")):
        if not fnmatch.filter(found, pattern):
            detail = f"it lists {len(listed)} files and no {pattern}"
            raise WeightsError(f"{REPO} contains no {kind}", detail, WAYS, file=pattern)
    return found


def _cached(hub: WeightHub) -> Path:
    """Return the checkpoint's folder in the cache. Raises WeightsError with the first missing or damaged file."""
    config = hub.cached(REPO, CONFIG)
    if config is None:
        raise WeightsError(f"{CONFIG} of {REPO} is missing", hint=WAYS, file=CONFIG)
    return checked(config.parent)
