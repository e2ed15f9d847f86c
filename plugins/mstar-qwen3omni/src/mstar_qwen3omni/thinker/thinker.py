"""Thinker: the mixture-of-experts text model that reads text, sound and images. Run by the KV engine.

Modules are nested like the checkpoint's keys without the prefix `thinker.`, so weight names need no mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import nn

from mstar_core.layers import (
    AttentionSpec,
    DecoderBlock,
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
    from collections.abc import Iterable

    from torch import Tensor

    from mstar_core.layers.kv_view import KVView
    from mstar_qwen3omni.checkpoint.config import DecoderSizes, OmniConfig


def attention_spec(sizes: DecoderSizes) -> AttentionSpec:
    """Return the attention of a decoder: queries and keys are normalized per head (section 4)."""
    return AttentionSpec(
        width=sizes.width, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, norm_eps=sizes.norm_eps
    )


def rotary_spec(sizes: DecoderSizes) -> RotarySpec:
    """Return the rotary embedding of a decoder (section 4)."""
    return RotarySpec(width=sizes.head_dim, base=sizes.rope_base, sections=sizes.mrope)


def moe_spec(sizes: DecoderSizes) -> MoESpec:
    """Return the mixture of experts of a decoder (section 4)."""
    return MoESpec(
        width=sizes.width,
        inner=sizes.mlp,
        experts=sizes.experts,
        experts_per_token=sizes.experts_per_token,
        normalizes=sizes.normalizes_experts,
        shared_inner=sizes.shared_mlp,
    )


def moe_blocks(sizes: DecoderSizes, shard: Shard = WHOLE) -> Iterable[DecoderBlock]:
    """Return the decoder blocks of a mixture-of-experts decoder: heads and every expert's width are divided."""
    for layer in range(sizes.layers):
        yield DecoderBlock(attention_spec(sizes), SparseMoE(moe_spec(sizes), shard), layer, sizes.norm_eps, shard)


class ThinkerDecoder(nn.Module):
    """Token ids or given vectors to normalized hidden states."""

    def __init__(self, sizes: DecoderSizes, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(sizes.vocab, sizes.width, shard)
        self.layers = nn.ModuleList(moe_blocks(sizes, shard))
        self.norm = RMSNorm(sizes.width, sizes.norm_eps)
        self.rotary = Rotary(rotary_spec(sizes))

    def forward(
        self, x: Tensor, positions: Tensor, kv: KVView, deepstack: Tensor | None, accept_layer: int
    ) -> tuple[Tensor, Tensor]:
        """Return the normalized hidden states and those that enter `accept_layer`, [T, width] each.

        x: [T, width], the embeddings; positions: float32 [T] or [3, T]; deepstack: [levels, T, width], whose level i is
        added to the output of layer i.
        """
        rotation = self.rotary(positions)
        blocks = cast("list[DecoderBlock]", list(self.layers))
        norms = [*(block.input_layernorm for block in blocks), self.norm]
        normed: Tensor = norms[0](x)
        accepted = x
        for layer, (block, next_norm) in enumerate(zip(blocks, norms[1:], strict=True)):
            if layer == accept_layer:
                accepted = x
            if deepstack is not None and layer < deepstack.shape[0]:
                x = block(x, kv, rotation) + deepstack[layer].to(x.dtype)
                normed = next_norm(x)
            else:
                # Fusing each block's last addition with the next norm saves one kernel per block on a GPU.
                x, normed = block.forward_chained(x, normed, kv, rotation, next_norm)
        return normed, accepted


class Thinker(nn.Module):
    """Text, sound and images to logits of text, and to the hidden states that the talker reads."""

    rounds_inputs = True

    def __init__(self, config: OmniConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        sizes = config.thinker
        self.accept_layer = config.accept_layer
        self.model = ThinkerDecoder(sizes, shard)
        self.lm_head = Head(sizes.width, sizes.vocab, shard=shard)

    def forward(
        self,
        *,
        kv: KVView,
        positions: Tensor,
        tokens: Tensor,
        embeds: Tensor | None = None,
        deepstack: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return {"hidden": [T, width]}, normalized, and with `embeds` also {"states": [T, width]}.

        tokens: int64 [T], all sequences of the step packed; positions: float32 [T], or [3, T] for time, height and
        width. embeds: [T, width], used instead of the tokens' embeddings. deepstack: [levels, T, width], the feature
        maps of section 6, zero where a token is not of an image. states: hidden states that enter the layer
        `accept_layer`, section 9.
        """
        x = self.model.embed_tokens(tokens) if embeds is None else embeds.to(self.model.embed_tokens.weight.dtype)
        hidden, states = self.model(x, positions, kv, deepstack, self.accept_layer)
        return {"hidden": hidden} if embeds is None else {"hidden": hidden, "states": states}

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] in the weights' dtype. hidden: [n, width]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
