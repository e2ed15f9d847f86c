"""The Llama decoder behind the node `LLM`. Run by the KV engine: one forward for prefill, decode and captured steps.

The modules are nested as the checkpoint's keys are, so that its names need no table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from torch import nn

from mstar_core.layers import DecoderBlock, Head, RMSNorm, Rotary, TokenEmbedding
from mstar_orpheus.llama_config import LlamaConfig

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView

HEAD_KEY: Final = "lm_head.weight"


class Decoder(nn.Module):
    """Ids to normed hidden states."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(config.vocab, config.attention.width)
        blocks = (DecoderBlock(config.attention, config.mlp, layer, config.norm_eps) for layer in range(config.layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.attention.width, config.norm_eps)
        self.rotary = Rotary(config.rotary)

    def forward(self, tokens: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        rotation = self.rotary(positions)
        x = self.embed_tokens(tokens)
        # Each block's last addition goes together with the norm after it: one kernel less per block on a GPU.
        blocks = cast("list[DecoderBlock]", list(self.layers))
        norms = [*(block.input_layernorm for block in blocks), self.norm]
        normed: Tensor = norms[0](x)
        for block, next_norm in zip(blocks, norms[1:], strict=True):
            x, normed = block.chained(x, normed, kv, rotation, next_norm)
        return normed


class Llama(nn.Module):
    """Ids to logits.

    has_head: the head is a matrix of its own, as when the checkpoint brings one and its config does not tie;
    otherwise it is the embedding matrix.
    """

    def __init__(self, config: LlamaConfig, *, has_head: bool) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = Head(config.attention.width, config.vocab, tied_to=None if has_head else self.model.embed_tokens)

    def forward(self, *, kv: KVView, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """tokens, positions: int64 [T], all rows of the step packed. Returns {"hidden": [T, width]}, normed."""
        return {"hidden": self.model(tokens, positions, kv)}

    def head(self, hidden: Tensor) -> Tensor:
        """hidden: [n, width]. Returns logits [n, vocab] in the weights' dtype; fewer columns for a restricted head."""
        logits: Tensor = self.lm_head(hidden)
        return logits
