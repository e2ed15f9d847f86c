"""Resolution of the weights: a given folder, the hub cache, or a download with byte progress.

Called by the process that prepares the weights, before any worker starts.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from mstar_core.errors import WeightsError
from mstar_core.plugin import WeightRef
from mstar_core.plugin.model import WeightProgress
from mstar_core.weights.files import INDEX, TORCH_INDEX, TORCH_WHOLE, WHOLE, check_whole, weight_files
from mstar_core.weights.sources import HuggingFace, WeightHub, cached_or_fetched, linked_folder
from mstar_orpheus.checkpoint.layout import CONFIG, CheckpointLayout
from mstar_orpheus.plugin import ORPHEUS

LM_TEXT_FILES: Final = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
WEIGHT_FORMS: Final = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)
NEEDED: Final = {"lm": (CONFIG, "tokenizer.json"), "snac": (CONFIG,)}
_WAYS: Final = (
    "use --weights DIR for your own folder, --cache-dir DIR for another cache, "
    "or start orpheus:tiny, which needs no download"
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
    parts = {name: _part(name, ref, source, progress) for name, ref in ORPHEUS.weights.items()}
    return linked_folder({"lm": parts["lm"], "snac": parts["snac"]}, source.cache / "mstar-orpheus")


def checked(folder: Path) -> Path:
    """Check every weight file of both parts and return `folder`. Raises WeightsError."""
    if not folder.is_dir():
        raise WeightsError(
            f"{folder} is not a folder", hint="give --weights the folder of a checkpoint", file=str(folder)
        )
    layout = CheckpointLayout.find(folder)
    for part in (layout.lm, layout.snac):
        for path in part_files(part):
            check_whole(path)
    return folder


def part_files(part: Path) -> list[Path]:
    """Return the weight files of one part: safetensors before `.bin`, an index before a single file.

    Raises WeightsError with the first file that an index lists and the folder lacks.
    """
    return weight_files(part, (INDEX, WHOLE, TORCH_INDEX, TORCH_WHOLE))


def _part(name: str, ref: WeightRef, hub: WeightHub, progress: WeightProgress | None) -> Path:
    return cached_or_fetched(
        hub, ref.repo, lambda: _cached(name, ref, hub), partial(needed_files, ref=ref), _WAYS, progress
    )


def _cached(name: str, ref: WeightRef, hub: WeightHub) -> Path:
    """Return the part's folder in the cache. Raises WeightsError with the first missing or damaged file."""
    for file in NEEDED[name]:
        if hub.cached(ref.repo, file) is None:
            raise WeightsError(f"{file} of {ref.repo} is missing", hint=_WAYS, file=file, looked=[str(hub.cache)])
    folder = _folder(ref, hub)
    for path in part_files(folder):
        check_whole(path)
    return folder


def _folder(ref: WeightRef, hub: WeightHub) -> Path:
    config = hub.cached(ref.repo, CONFIG)
    assert config is not None
    return config.parent


def needed_files(listed: Mapping[str, int], ref: WeightRef) -> dict[str, int]:
    """Select the files to download: those of the reference, else the text files and one form of the weights."""
    if ref.files:
        lacking = [name for name in ref.files if name not in listed]
        if lacking:
            raise WeightsError(f"{ref.repo} lacks {lacking[0]}", hint=_WAYS, file=lacking[0])
        return {name: listed[name] for name in ref.files}
    texts = [name for name in LM_TEXT_FILES if name in listed]
    for patterns in WEIGHT_FORMS:
        tensors = [name for name in listed if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        if tensors:
            return {name: listed[name] for name in (*texts, *sorted(tensors))}
    raise WeightsError(f"{ref.repo} contains no weights", f"it lists {len(listed)} files", _WAYS, file=ref.repo)
