"""Places of the checkpoint's tensors in the nodes, and their loading. Used by `model` and `published`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from mstar_bagel.checkpoint.config import MODEL_FILE, VAE_FILE
from mstar_core.errors import WeightsError
from mstar_core.layers import Checkpoint, NameMap, load_weights
from mstar_core.weights.random_fill import fill_randomly, random_seed

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.plugin.model import DeferredReads, WeightProgress

log = logging.getLogger(__name__)

LATENT: Final = ("vae2llm.", "time_embedder.", "latent_pos_embed.")
PREFIXES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "LLM": {MODEL_FILE: ("language_model.", "llm2vae.", *LATENT)},
    "vit_encoder": {MODEL_FILE: ("vit_model.", "connector.", "vit_pos_embed.")},
    "vae_encoder": {MODEL_FILE: LATENT, VAE_FILE: ("encoder.",)},
    "vae_decoder": {VAE_FILE: ("decoder.",)},
}
"""Prefixes of the tensors of each node, by file. Names in the modules are those of the files."""

PATCHES: Final = "vit_model.vision_model.embeddings.patch_embedding.weight"


def load(
    module: nn.Module,
    node: str,
    folder: Path,
    progress: WeightProgress | None,
    deferred: DeferredReads | None = None,
) -> None:
    """Fill a node's module, or leave that to `deferred`.

    Raises WeightsError with file and key for a missing or unknown tensor of the node.
    """
    seed = random_seed(folder)
    if seed is not None:
        fill_randomly(module, seed, deferred)
        return
    file_of: dict[str, Path] = {}
    for file, prefixes in PREFIXES[node].items():
        path = folder / file
        if not path.is_file():
            raise WeightsError(f"{path} is missing", hint="download the whole repository", file=str(path))
        file_of |= {name: path for name in Checkpoint.of_files([path]).file_of if name.startswith(prefixes)}
    files = Checkpoint(folder, file_of)
    shape = module.state_dict(keep_vars=True).get(PATCHES)
    if shape is not None and _is_convolution(files):
        files = _load_patches(files, shape)
        load_weights(module, files, NameMap(optional=frozenset({PATCHES})), progress)
        return
    load_weights(module, files, None, progress, deferred=deferred)


def _is_convolution(files: Checkpoint) -> bool:
    if PATCHES not in files.file_of:
        return False
    ((_, value),) = files.tensors([PATCHES])
    return value.dim() == 4


def _load_patches(files: Checkpoint, target: torch.Tensor) -> Checkpoint:
    """Load a patch embedding that is stored as a convolution, and return the other tensors."""
    ((_, value),) = files.tensors([PATCHES])
    with torch.no_grad():
        target.copy_(value.permute(0, 2, 3, 1).flatten(1))
    return replace(files, file_of={name: path for name, path in files.file_of.items() if name != PATCHES})
