"""The model's only node, built from a checkpoint once per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from mstar_core.errors import WeightsError
from mstar_core.layers import Checkpoint, NameMap, RMSNorm, load_weights
from mstar_core.layers.moe import expert_parts
from mstar_core.weights.building import building
from mstar_llm.checkpoint.config import read_config
from mstar_llm.decoder import LanguageModel

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext

HEAD_KEY: Final = "lm_head.weight"
EMBEDDING_KEY: Final = "embed_tokens.weight"


class Llm:
    """Model of one worker. Raises WeightsError for a missing or incomplete checkpoint folder."""

    def __init__(self, ctx: ModelContext) -> None:
        if ctx.folder is None:
            raise WeightsError("llm has no checkpoint folder", hint="start it with --weights DIR, or start llm:tiny")
        self._ctx = ctx
        self._folder = ctx.folder
        self._config = read_config(ctx.folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build the decoder with its weights, in the context's dtype and on its device."""
        ctx, config = self._ctx, self._config
        files = Checkpoint.find(self._folder)
        has_head = HEAD_KEY in files.file_of and not config.ties
        with building(ctx.device, ctx.dtype):
            module = LanguageModel(config, has_head=has_head, shard=ctx.shard)
        # Embedding models are published without the part that holds the head.
        prefixes = {"": "model."} if EMBEDDING_KEY in files.file_of else {}
        names = NameMap(prefixes=prefixes, ignore=() if has_head else (HEAD_KEY,))
        load_weights(module, files, names, ctx.progress, expert_parts(module))
        if config.architecture.has_offset_norms:
            add_norm_offsets(module)
        return module.eval().requires_grad_(False)

    def vocab_size(self, node: NodeSpec) -> int:
        """Return the size of the vocabulary."""
        return self._config.vocab


def add_norm_offsets(module: nn.Module) -> None:
    """Add one to the weights of all norms. Gemma stores them less one, so that weight decay draws them to one."""
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, RMSNorm):
                layer.weight.add_(1)
