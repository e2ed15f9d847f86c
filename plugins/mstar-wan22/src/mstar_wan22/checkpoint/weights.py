"""Places of the checkpoint's tensors in the nodes, and their loading. Names in the modules are those of the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.layers import Checkpoint, NameMap, load_weights
from mstar_core.weights.files import weight_files
from mstar_core.weights.random_fill import fill_randomly, random_seed
from mstar_wan22.checkpoint.config import FILES, HIGH, LOW, TEXT, TEXT_FILES, VAE

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.plugin.model import WeightProgress

PLACES: Final = {
    "text_encoder": (TEXT, TEXT_FILES, ("",)),
    "transformer": (HIGH, FILES, ("",)),
    "transformer_2": (LOW, FILES, ("",)),
    "vae_encoder": (VAE, FILES, ("encoder.", "quant_conv.")),
    "vae_decoder": (VAE, FILES, ("decoder.", "post_quant_conv.")),
}
"""Folder, file names and prefixes of the tensors of each node."""

EMBEDDING: Final = "shared.weight"
TIED: Final = "encoder.embed_tokens.weight"
"""A second name of the text encoder's table, in place of the first one or beside it."""

UNUSED: Final = "norm_added_q"


def load(module: nn.Module, node: str, folder: Path, progress: WeightProgress | None) -> None:
    """Fill a node's module. Raises WeightsError with file and key for a missing or unknown tensor of the node."""
    seed = random_seed(folder)
    if seed is not None:
        fill_randomly(module, seed)
        return
    part, names, prefixes = PLACES[node]
    files = Checkpoint.of_files(weight_files(folder / part, names))
    kept = {
        name: path
        for name, path in files.file_of.items()
        if name.startswith(prefixes) and UNUSED not in name and not (name == TIED and EMBEDDING in files.file_of)
    }
    load_weights(module, replace(files, file_of=kept), NameMap(prefixes={TIED: EMBEDDING}), progress)
