"""Llama decoder of the shared layers: ids to logits, or to hidden states for vectors in place of ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from mstar_core.layers import AttentionSpec, DecoderBlock, Head, RMSNorm, Rotary, RotarySpec, TokenEmbedding
from mstar_core.parallel.shards import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.families.llama_sizes import LlamaSizes
    from mstar_core.layers.kv_view import KVView


class LlamaStack(nn.Module):
    """Blocks between embedding and last norm. Parameters are named as below `model.` in a checkpoint."""

    def __init__(self, sizes: LlamaSizes, shard: Shard = WHOLE) -> None:
        super().__init__()
        attention = AttentionSpec(
            width=sizes.width, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim
        )
        self.embed_tokens = TokenEmbedding(sizes.vocab, sizes.width, shard)
        self.layers = nn.ModuleList(
            DecoderBlock(attention, sizes.inner, layer, sizes.norm_eps, shard) for layer in range(sizes.layers)
        )
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.rotary = Rotary(RotarySpec(width=sizes.head_dim, base=sizes.rope_base))

    def forward(self, x: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        """Return normalized hidden states, [T, width]. x: [T, width]; positions: int64 [T]."""
        rotation = self.rotary(positions)
        for block in self.layers:
            x = block(x, kv, rotation)
        hidden: Tensor = self.norm(x)
        return hidden


class LlamaDecoder(nn.Module):
    """The node of a language model. Parameters are named as in a checkpoint of `LlamaForCausalLM`.

    Inputs other than ids are vectors of the stack's width: override `forward` to take them, see `LlamaStack`.
    """

    def __init__(self, sizes: LlamaSizes, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.model = LlamaStack(sizes, shard)
        self.lm_head = Head(sizes.width, sizes.vocab, self.model.embed_tokens if sizes.ties else None, shard)

    def forward(self, *, kv: KVView, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return {"hidden": [T, width]}. tokens, positions: int64 [T], all sequences of the step packed."""
        return {"hidden": self.model(self.model.embed_tokens(tokens), positions, kv)}

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab]. hidden: [n, width]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
