"""The model's only node, built from a checkpoint once per worker."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.layers import Checkpoint, NameMap, RMSNorm, load_weights
from mstar_core.layers.moe import expert_parts
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.weights.building import building
from mstar_llm.checkpoint.config import read_config
from mstar_llm.decoder import LanguageModel

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext

HEAD_KEY: Final = "lm_head.weight"
TEXT_PREFIX: Final = "language_model."
"""Of the text model, in checkpoints that have models for images beside it."""

EMBEDDING_KEY: Final = "embed_tokens.weight"


class Llm:
    """Model of one worker. Raises WeightsError for a missing or incomplete checkpoint folder."""

    def __init__(self, ctx: ModelContext) -> None:
        folder = checkpoint_folder(ctx.folder, "llm")
        self._ctx = ctx
        self._folder = folder
        self._config = read_config(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build the decoder with its weights, in the context's dtype and on its device."""
        ctx, config = self._ctx, self._config
        files = Checkpoint.find(self._folder)
        names = name_map(files.file_of)
        has_head = HEAD_KEY in map(names.target, files.file_of) and not config.ties
        deferred = None if config.architecture.has_offset_norms else ctx.deferred
        with building(ctx.device, ctx.dtype, deferred):
            module = LanguageModel(config, has_head=has_head, shard=ctx.shard)
        if not has_head:
            names = replace(names, ignore=(*names.ignore, HEAD_KEY, TEXT_PREFIX + HEAD_KEY))
        load_weights(module, files, names, ctx.progress, expert_parts(module), deferred)
        if config.architecture.has_offset_norms:
            add_norm_offsets(module)
        return module.eval().requires_grad_(False)

    def vocab_size(self, node: NodeSpec) -> int:
        """Return the size of the vocabulary."""
        return self._config.vocab


def name_map(published: Collection[str]) -> NameMap:
    """Return the mapping from the published names of a checkpoint to those of the decoder."""
    if any(name.startswith(TEXT_PREFIX) for name in published):
        others = {name for name in published if not name.startswith(TEXT_PREFIX)}
        return NameMap(prefixes={TEXT_PREFIX: ""}, ignore=tuple(sorted(others)))
    # Embedding models are published without the part that holds the head.
    return NameMap(prefixes={"": "model."} if EMBEDDING_KEY in published else {})


def add_norm_offsets(module: nn.Module) -> None:
    """Add one to the weights of all norms. Gemma stores them less one, so that weight decay draws them to one."""
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, RMSNorm):
                layer.weight.add_(1)
