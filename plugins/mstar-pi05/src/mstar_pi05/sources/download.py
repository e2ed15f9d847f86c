"""Lookup and download of the official weights: a given folder, the hub's cache, or a download with byte
progress.

Called by the fetching process before any worker starts. A repository may have lerobot's layout or openpi's. The
tokenizer is in a separate repository that requires a login.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.errors import WeightsError
from mstar_core.weights.files import INDEX, check_whole, weight_files
from mstar_core.weights.sources import HuggingFace, WeightHub, cached_or_fetched, fetch_files, linked_folder
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
        check_files(folder)
        return folder
    source = hub or HuggingFace(cache_dir)
    checkpoint = _part(WEIGHTS_REPO, source, progress)
    if find_tokenizer(checkpoint) is not None:
        return checkpoint
    tokenizer = _tokenizer(source, progress)
    links = {path.name: path for path in checkpoint.iterdir()} | {TOKENIZERS[0]: tokenizer}
    return linked_folder(links, source.cache / "mstar-pi05")


def check_files(folder: Path) -> None:
    """Raise WeightsError unless config and weight files in `folder` are complete. Tensors are not read."""
    read_sizes(folder)
    for path in weight_files(folder):
        check_whole(path)


def find_tokenizer(folder: Path) -> str | None:
    """Return the name of the tokenizer file in a folder, if it has one."""
    return next((name for name in TOKENIZERS if (folder / name).is_file()), None)


def needed_files(listed: Mapping[str, int], repo: str) -> dict[str, int]:
    """Return the repository files to fetch with their sizes. Raises WeightsError for a repository without weights."""
    files = {
        name: size for name, size in listed.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in WANTED)
    }
    for name, what in ((CONFIG, "config"), ("model*.safetensors", "weights")):
        if not fnmatch.filter(files, name):
            raise WeightsError(
                f"{repo} contains no {what}", f"it lists {len(listed)} files and no {name}", WAYS, file=name
            )
    return files


def _part(repo: str, hub: WeightHub, progress: WeightProgress | None) -> Path:
    """Return the cached folder of the checkpoint. Missing or incomplete files are fetched."""
    return cached_or_fetched(hub, repo, lambda: _cached(repo, hub), partial(needed_files, repo=repo), WAYS, progress)


def _cached(repo: str, hub: WeightHub) -> Path:
    config = hub.cached(repo, CONFIG)
    if config is None:
        raise WeightsError(f"{CONFIG} of {repo} is missing", hint=WAYS, file=CONFIG)
    check_files(config.parent)
    return config.parent


def _tokenizer(hub: WeightHub, progress: WeightProgress | None) -> Path:
    """Return PaliGemma's tokenizer file. Raises WeightsError with alternatives."""
    name = TOKENIZERS[0]
    path = hub.cached(TOKENIZER_REPO, name)
    if path is not None:
        return path
    if hub.is_offline:
        raise _offline(TOKENIZER_REPO, hub, None)
    try:
        listed = hub.files(TOKENIZER_REPO)
        fetch_files(hub, TOKENIZER_REPO, {name: listed.get(name, 0)}, progress)
    except WeightsError as error:
        hint = f"{error.hint}; or put {name}, or openpi's {TOKENIZERS[2]}, beside the weights and use --weights DIR"
        raise WeightsError(error.title, error.detail, hint, **error.facts) from error
    path = hub.cached(TOKENIZER_REPO, name)
    assert path is not None, "it was fetched into the cache just now"
    return path


def _offline(repo: str, hub: WeightHub, missing: WeightsError | None) -> WeightsError:
    why = f"{missing.title}; " if missing is not None else ""
    detail = f"{why}looked in {hub.cache}; downloads are disabled (HF_HUB_OFFLINE)"
    return WeightsError(f"the files of {repo} are not on this machine", detail, WAYS, file=repo)
