"""The nodes of the model, built from a checkpoint once per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import nn

from mstar_core.engine.cuda_graphs.cache import GraphCache
from mstar_core.layers import Checkpoint, NameMap, load_weights
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.weights.building import building
from mstar_whisper.checkpoint.config import read_config
from mstar_whisper.nodes.decoder import SpeechDecoder
from mstar_whisper.nodes.encoder import Encoder, Spectrogram
from mstar_whisper.nodes.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Collection

    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext

ENCODER: Final = "model.encoder."
DECODER: Final = "model.decoder."
HEAD: Final = "proj_out.weight"
"""Stored by some checkpoints, always equal to the embedding."""


class Whisper:
    """Model of one worker. Raises WeightsError for a missing or incomplete checkpoint folder."""

    def __init__(self, ctx: ModelContext) -> None:
        folder = checkpoint_folder(ctx.folder, "whisper")
        self._ctx = ctx
        self._folder = folder
        self._config = read_config(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build a node with its weights, in the context's dtype and on its device."""
        match node.name:
            case "spectrogram":
                return Spectrogram(self._config).eval()
            case "transcript":
                return Transcript().eval()
            case "encoder":
                return self._loaded(Encoder, ENCODER, "")
            case _:
                return self._loaded(SpeechDecoder, DECODER, "decoder.")

    def _loaded(self, kind: type[Encoder | SpeechDecoder], prefix: str, into: str) -> nn.Module:
        ctx = self._ctx
        with building(ctx.device, ctx.dtype):
            module = kind(self._config)
        files = Checkpoint.find(self._folder)
        load_weights(module, files, name_map(files.file_of, prefix, into), ctx.progress)
        module.join()
        if ctx.device.type == "cuda" and isinstance(module, Encoder):
            module.capture(GraphCache(ctx.device, name="encoder"))
        return module.eval().requires_grad_(False)

    def vocab_size(self, node: NodeSpec) -> int:
        """Return the size of the vocabulary."""
        return self._config.vocab if node.sampling is not None else 0


def name_map(published: Collection[str], prefix: str, into: str) -> NameMap:
    """Return the mapping of one half of a checkpoint to the module of its node."""
    others = tuple(sorted(name for name in published if not name.startswith(prefix)))
    return NameMap(prefixes={prefix: into}, ignore=others)
