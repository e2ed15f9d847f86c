"""The decoder: token ids to logits. One forward for prefill, decode and captured steps; run by the KV engine.

Modules are nested like the checkpoint's keys, so weight names need no mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from torch import nn
from torch.nn.functional import normalize

from mstar_core.layers import (
    Attention,
    AttentionSpec,
    DecoderBlock,
    GatedMLP,
    Head,
    MoESpec,
    RMSNorm,
    Rotary,
    RotarySpec,
    SparseMoE,
    TokenEmbedding,
)
from mstar_core.parallel.shards import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView
    from mstar_llm.checkpoint.config import DecoderConfig


class Block(Protocol):
    """A decoder block that runs between norms: see `DecoderBlock.forward_chained`."""

    input_layernorm: RMSNorm

    def forward_chained(
        self, x: Tensor, normed: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor], next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]: ...


class SandwichBlock(nn.Module):
    """Block whose attention and MLP have a norm before and one behind, before the addition. Source: Gemma 3."""

    def __init__(self, config: DecoderConfig, layer: int, shard: Shard = WHOLE) -> None:
        super().__init__()
        width, eps = config.width, config.norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(attention_spec(config), layer, shard)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.mlp, activation=config.architecture.activation, shard=shard)
        self.post_feedforward_layernorm = RMSNorm(width, eps)

    def forward_chained(
        self, x: Tensor, normed: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor], next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Return the output and its norm by the next block's first norm, [T, width] each. normed: x after the first."""
        attended = self.post_attention_layernorm(self.self_attn(normed, kv, rotation))
        x, inner = self.pre_feedforward_layernorm.after_add(x, attended)
        return next_norm.after_add(x, self.post_feedforward_layernorm(self.mlp(inner)))


def attention_spec(config: DecoderConfig) -> AttentionSpec:
    """Return the attention of every layer. Windows are the engine's: see `KVSpec.windows`."""
    return AttentionSpec(
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        bias=config.bias,
        norm_eps=config.norm_eps if config.architecture.has_head_norms else None,
        scale=config.score_size**-0.5,
    )


def decoder_block(config: DecoderConfig, layer: int, shard: Shard) -> Block:
    """Build one layer of an architecture."""
    if config.architecture.has_sandwich_norms:
        return SandwichBlock(config, layer, shard)
    inner: int | SparseMoE = config.mlp
    if config.experts:
        spec = MoESpec(
            width=config.width,
            inner=config.mlp,
            experts=config.experts,
            experts_per_token=config.experts_per_token,
            normalizes=config.normalizes_experts,
        )
        inner = SparseMoE(spec, shard)
    return DecoderBlock(attention_spec(config), inner, layer, config.norm_eps, shard)


class Decoder(nn.Module):
    """Token ids to normalized hidden states."""

    def __init__(self, config: DecoderConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(config.vocab, config.width, shard)
        self.layers = nn.ModuleList(
            cast("nn.Module", decoder_block(config, layer, shard)) for layer in range(config.layers)
        )
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.rotary, self.local_rotary = (
            Rotary(RotarySpec.from_config({"rope_parameters": rope}, config.head_dim))
            for rope in (config.rope, config.local_rope)
        )
        self._windows = config.windows or (0,) * config.layers
        self._embedding_scale = config.width**0.5 if config.architecture.scales_embeddings else None

    def forward(self, tokens: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        """Return [T, width]. tokens, positions: int64 [T], all sequences of the step packed."""
        rotation = local = self.rotary(positions)
        if any(self._windows):
            local = self.local_rotary(positions)
        x = self.embed_tokens(tokens)
        if self._embedding_scale is not None:
            # Rounded to the weights' dtype first, as in the reference.
            x = x * x.new_tensor(self._embedding_scale)
        # Fusing each block's last addition with the next norm saves one kernel per block on a GPU.
        blocks = cast("list[Block]", list(self.layers))
        norms = [*(block.input_layernorm for block in blocks), self.norm]
        normed: Tensor = norms[0](x)
        for block, window, next_norm in zip(blocks, self._windows, norms[1:], strict=True):
            x, normed = block.forward_chained(x, normed, kv, local if window else rotation, next_norm)
        return normed


class LanguageModel(nn.Module):
    """Token ids to logits.

    has_head: the head has its own weight; otherwise it shares the embedding's. shard: heads, inner widths and
    vocabulary are divided among the ranks of a group.
    """

    def __init__(self, config: DecoderConfig, *, has_head: bool, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.model = Decoder(config, shard)
        self._is_embedding = config.is_embedding
        self.lm_head = Head(config.width, config.vocab, None if has_head else self.model.embed_tokens, shard)

    def forward(self, *, kv: KVView, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return {"hidden": [T, width]}, normalized. tokens, positions: int64 [T], all sequences of the step packed.

        Embedding models also return {"embedding": float32 [T, width]}, vectors of length 1.
        """
        hidden = self.model(tokens, positions, kv)
        return {"hidden": hidden} | ({"embedding": normalize(hidden.float(), dim=-1)} if self._is_embedding else {})

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] in the weights' dtype. hidden: [n, width]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
