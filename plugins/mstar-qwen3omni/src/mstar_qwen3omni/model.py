"""Nodes of Qwen3-Omni, built from a checkpoint. Created once per worker."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.engine.module import CapturesFunction
from mstar_core.errors import StartError, WeightsError
from mstar_core.layers import Checkpoint
from mstar_core.parallel.shards import WHOLE, Shard
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.weights.building import building
from mstar_qwen3omni.checkpoint.config import OmniConfig, read_config
from mstar_qwen3omni.checkpoint.weights import load, own_tensors

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext

MODULES: Final = {
    "audio_encoder": "mstar_qwen3omni.encoders.audio:AudioEncoder",
    "vision_encoder": "mstar_qwen3omni.encoders.vision:VisionEncoder",
    "Thinker": "mstar_qwen3omni.thinker.thinker:Thinker",
    "Talker": "mstar_qwen3omni.talker.talker:Talker",
    "Code2Wav": "mstar_qwen3omni.vocoder.code2wav:Code2Wav",
}
"""Module and class of each node."""

SPEECH: Final = ("Talker", "Code2Wav")
"""Nodes that a checkpoint without speech does not have."""


class Qwen3Omni:
    """Qwen3-Omni on one worker. Raises WeightsError if the checkpoint folder is missing or of another model."""

    def __init__(self, ctx: ModelContext) -> None:
        folder = checkpoint_folder(ctx.folder, "qwen3_omni")
        self._ctx = ctx
        self._config = read_config(folder)
        self._files = Checkpoint.find(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build a node with its weights, in the context's dtype and on its device.

        Raises StartError for an unknown node, WeightsError for a node without tensors, and ConfigError if the ranks of
        a tensor-parallel group cannot divide it.
        """
        ctx = self._ctx
        if node.name not in MODULES:
            hint = f"its nodes are {', '.join(MODULES)}"
            raise StartError(f"qwen3_omni has no node {node.name!r}", hint=hint, phase="weights")
        if node.name in SPEECH and not self._config.has_speech:
            raise WeightsError(
                f"{self._files.folder} has no speech",
                f"{node.name} needs the talker's tensors",
                "use the Instruct checkpoint, or serve text only",
                file=str(self._files.folder),
            )
        tensors = own_tensors(self._files, node.name)
        with building(ctx.device, ctx.dtype, ctx.deferred):
            module = new_module(node.name, self._config, ctx.shard)
        load(module, tensors, node.name, ctx.progress, ctx.deferred)
        module.eval().requires_grad_(False)
        if ctx.device.type == "cuda" and isinstance(module, CapturesFunction):
            module.capture(GraphCache(ctx.device, name=node.name))
        return module

    def vocab_size(self, node: NodeSpec) -> int:
        """Return the size of the node's vocabulary; 0 for a node that does not sample."""
        if node.sampling is None:
            return 0
        return {"Thinker": self._config.thinker.vocab, "Talker": self._config.talker.vocab}[node.name]


def new_module(name: str, config: OmniConfig, shard: Shard = WHOLE) -> nn.Module:
    """Return a node without weights, or one rank's part of it. Imports only that node's modules."""
    place, _, kind = MODULES[name].partition(":")
    cls = getattr(importlib.import_module(place), kind)
    module: nn.Module = cls(config) if shard.is_whole else cls(config, shard)
    return module
