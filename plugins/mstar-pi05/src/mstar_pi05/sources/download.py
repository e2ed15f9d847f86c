"""Lookup and download of the official weights: a given folder, the hub's cache, or a download with byte
progress.

Called by the fetching process before any worker starts. A repository may have lerobot's layout or openpi's. The
tokenizer is in a separate repository that requires a login.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.errors import WeightsError
from mstar_core.weights.files import INDEX, checked_folder
from mstar_core.weights.sources import (
    HuggingFace,
    WeightHub,
    cached_checkpoint,
    cached_or_fetched,
    chosen_files,
    fetch_files,
    linked_folder,
)
from mstar_pi05.checkpoint.config import CONFIG, read_sizes
from mstar_pi05.plugin import TOKENIZER_REPO, WEIGHTS_REPO
from mstar_pi05.request.prompt import FILES as TOKENIZERS

if TYPE_CHECKING:
    from mstar_core.plugin.model import WeightProgress

WANTED: Final = (
    CONFIG,
    INDEX,
    "model*.safetensors",
    "policy_preprocessor*",
    "policy_postprocessor*",
    "assets/*norm_stats.json",
    *TOKENIZERS,
)
"""Patterns of the repository files that a deployment reads, in either layout."""

WAYS: Final = "use --weights DIR, --cache-dir DIR for another cache, or start pi05:tiny, which needs no download"


def resolve_weights(
    folder: Path | None = None,
    cache_dir: Path | None = None,
    progress: WeightProgress | None = None,
    *,
    hub: WeightHub | None = None,
) -> Path:
    """Return the folder of a complete checkpoint.

    folder: the operator's own, used as it is. cache_dir: replaces the hub's default cache. progress: called with (bytes
    so far, total bytes, file). Raises WeightsError naming the missing or damaged file and what to try.
    """
    if folder is not None:
        return checked(folder)
    source = hub or HuggingFace(cache_dir)
    checkpoint = _checkpoint(source, progress)
    if find_tokenizer(checkpoint) is not None:
        return checkpoint
    tokenizer = _tokenizer(source, progress)
    links = {path.name: path for path in checkpoint.iterdir()} | {TOKENIZERS[0]: tokenizer}
    return linked_folder(links, source.cache / "mstar-pi05")


def checked(folder: Path) -> Path:
    """Check config and weight files of a checkpoint and return `folder`. Tensors are not read. Raises WeightsError."""
    return checked_folder(folder, read_sizes)


def find_tokenizer(folder: Path) -> str | None:
    """Return the name of the tokenizer file in a folder, if it has one."""
    return next((name for name in TOKENIZERS if (folder / name).is_file()), None)


def _checkpoint(hub: WeightHub, progress: WeightProgress | None) -> Path:
    """Return the cached folder of the checkpoint. Missing or incomplete files are downloaded."""
    needed = {CONFIG: "config", "model*.safetensors": "weights"}
    find = partial(cached_checkpoint, hub, WEIGHTS_REPO, (CONFIG,), checked, WAYS)
    choose = partial(chosen_files, WEIGHTS_REPO, patterns=WANTED, needed=needed, ways=WAYS)
    return cached_or_fetched(hub, WEIGHTS_REPO, find, choose, WAYS, progress)


def _tokenizer(hub: WeightHub, progress: WeightProgress | None) -> Path:
    """Return PaliGemma's tokenizer file. Raises WeightsError with alternatives."""
    name = TOKENIZERS[0]
    path = hub.cached(TOKENIZER_REPO, name)
    if path is not None:
        return path
    if hub.is_offline:
        detail = f"looked in {hub.cache}; downloads are disabled (HF_HUB_OFFLINE)"
        raise WeightsError(f"the files of {TOKENIZER_REPO} are not on this machine", detail, WAYS, file=TOKENIZER_REPO)
    try:
        listed = hub.files(TOKENIZER_REPO)
        fetch_files(hub, TOKENIZER_REPO, {name: listed.get(name, 0)}, progress)
    except WeightsError as error:
        hint = f"{error.hint}; or put {name}, or openpi's {TOKENIZERS[2]}, beside the weights and use --weights DIR"
        raise WeightsError(error.title, error.detail, hint, **error.facts) from error
    path = hub.cached(TOKENIZER_REPO, name)
    assert path is not None, "it was fetched into the cache just now"
    return path
