"""Orpheus' two nodes, built from a checkpoint once per worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mstar_core.errors import StartError, WeightsError
from mstar_core.layers import Checkpoint, NameMap, load_weights
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.weights.building import building
from mstar_orpheus.checkpoint.config import read_config
from mstar_orpheus.checkpoint.layout import CONFIG, CheckpointLayout
from mstar_orpheus.llama import HEAD_KEY, Llama, LlamaConfig
from mstar_orpheus.vocoder.node import Vocoder
from mstar_orpheus.vocoder.snac import ENCODER, Snac, SnacConfig, decoding_weights

if TYPE_CHECKING:
    from torch import nn

    from mstar_core.graph import NodeSpec
    from mstar_core.plugin.model import ModelContext


class Orpheus:
    """Model of one worker. Raises WeightsError for a missing or incomplete checkpoint folder."""

    def __init__(self, ctx: ModelContext) -> None:
        folder = checkpoint_folder(ctx.folder, "orpheus")
        self._ctx = ctx
        self._config = read_config(folder)
        self._found = CheckpointLayout.find(folder)

    def get_submodule(self, node: NodeSpec) -> nn.Module:
        """Build `LLM` in the context's dtype or `snac_decoder` in float32, with weights, on the context's device."""
        match node.name:
            case "LLM":
                return self._llama(node.sampling.vocabulary if node.sampling is not None else ())
            case "snac_decoder":
                return self._vocoder()
            case name:
                raise StartError(
                    f"orpheus has no node {name!r}", hint="its nodes are LLM and snac_decoder", phase="weights"
                )

    def vocab_size(self, node: NodeSpec) -> int:
        """Return the size of the node's vocabulary; 0 for a node that does not sample."""
        return self._config.vocab_size if node.sampling is not None else 0

    def _llama(self, vocabulary: tuple[range, ...]) -> nn.Module:
        ctx = self._ctx
        files = Checkpoint.find(self._found.lm)
        config = LlamaConfig.read(self._found.lm / CONFIG)
        has_head = HEAD_KEY in files.file_of and not config.ties
        with building(ctx.device, ctx.dtype):
            module = Llama(config, has_head=has_head, shard=ctx.shard)
        load_weights(module, files, NameMap(ignore=() if has_head else (HEAD_KEY,)), ctx.progress)
        if vocabulary:
            module.lm_head.restrict(vocabulary)
        return module.eval().requires_grad_(False)

    def _vocoder(self) -> nn.Module:
        ctx = self._ctx
        files = Checkpoint.find(self._found.snac)
        names = [name for name in files.file_of if not name.startswith(ENCODER)]
        with building(ctx.device, torch.float32):
            snac = Snac(SnacConfig.read(self._found.snac / CONFIG))
            module = Vocoder(snac, self._config.ids.audio_offset)
        fill(snac, decoding_weights(dict(files.tensors(names, ctx.progress))), str(files.files()[0]))
        return module.eval().requires_grad_(False)


def fill(snac: Snac, state: dict[str, torch.Tensor], source: str) -> None:
    """Load folded weights. Raises WeightsError with the first missing, unknown or misshapen tensor."""
    expected = snac.state_dict()
    odd = [*sorted(set(expected) - set(state)), *sorted(set(state) - set(expected))]
    if odd:
        verb = "lacks" if odd[0] in expected else "contains an unknown"
        raise WeightsError(
            f"{source} {verb} {odd[0]}", f"{len(odd)} names differ", "use hubertsiuzdak/snac_24khz", file=source
        )
    for name, value in state.items():
        if value.shape != expected[name].shape:
            detail = f"its config asks for {list(expected[name].shape)}"
            hint = "use config and weights of the same checkpoint"
            raise WeightsError(f"{source}: {name} has shape {list(value.shape)}", detail, hint, file=source)
    snac.load_state_dict(state)
