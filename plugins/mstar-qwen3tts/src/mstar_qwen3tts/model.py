"""Nodes of Qwen3-TTS, built from a checkpoint. Created once per worker."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import nn

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.module import CapturesFunction
from mstar_core.errors import StartError
from mstar_core.layers import load_weights
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.weights.building import building
from mstar_qwen3tts.checkpoint.config import read_config
from mstar_qwen3tts.checkpoint.weights import NAMES, own_tensors

if TYPE_CHECKING:
    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext
    from mstar_qwen3tts.checkpoint.config import TTSConfig
    from mstar_qwen3tts.codec.codec import Codec

MODULES: Final = {
    "TextFeed": "mstar_qwen3tts.request.feed:TextFeed",
    "Talker": "mstar_qwen3tts.talker.talker:Talker",
    "Codec": "mstar_qwen3tts.codec.codec:Codec",
    "VoiceEncoder": "mstar_qwen3tts.voice.nodes:VoiceEncoder",
    "VoicePrompt": "mstar_qwen3tts.voice.nodes:VoicePrompt",
}
"""Module and class of each node."""


class Qwen3TTS:
    """Qwen3-TTS on one worker. Raises WeightsError if the checkpoint folder is missing or of another model."""

    def __init__(self, ctx: ModelContext) -> None:
        folder = checkpoint_folder(ctx.folder, "qwen3_tts")
        self._ctx, self._folder = ctx, folder
        self._config = read_config(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build a node with its weights: the talker in the context's dtype, the others in float32.

        With a talker in half precision, the codec's decoder on CUDA keeps its activations in float16.
        Raises StartError for an unknown node, WeightsError for missing or unknown tensors.
        """
        ctx = self._ctx
        if node.name not in MODULES:
            hint = f"its nodes are {', '.join(MODULES)}"
            raise StartError(f"qwen3_tts has no node {node.name!r}", hint=hint, phase="weights")
        with building(ctx.device, ctx.dtype if node.name == "Talker" else torch.float32):
            module = new_module(node.name, self._config)
        if node.name == "Codec":
            cast("Codec", module).has_half_decoder = ctx.dtype != torch.float32
        if node.name in NAMES:
            load_weights(module, own_tensors(self._folder, node.name), NAMES[node.name], ctx.progress)
        module.eval().requires_grad_(False)
        if ctx.device.type == "cuda" and isinstance(module, CapturesFunction):
            module.capture(GraphCache(ctx.device, name=node.name))
        return module

    def vocab_size(self, node: NodeSpec) -> int:
        """Return the size of the talker's vocabulary; 0 for other nodes."""
        return self._config.talker.vocab if node.sampling is not None else 0


def new_module(name: str, config: TTSConfig) -> nn.Module:
    """Return a node without weights. Imports only that node's modules."""
    place, _, kind = MODULES[name].partition(":")
    module: nn.Module = getattr(importlib.import_module(place), kind)(config)
    return module
