"""PaliGemma's language model, which prefills cameras and prompt. Part of the node `LLM`.

Modules are nested like the checkpoint's keys, so that names need no mapping.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.functional import embedding

from mstar_core.layers import Attention, AttentionSpec, GatedMLP
from mstar_core.layers.linear import elementwise_kernels, sum_partials, uses_fused_kernels
from mstar_core.parallel.shards import WHOLE, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView
    from mstar_pi05.checkpoint.config import Sizes, Tower

Rotation = tuple["Tensor", "Tensor"]


def attention_spec(tower: Tower) -> AttentionSpec:
    """Return the attention spec of a transformer, with the default scale."""
    return AttentionSpec(width=tower.width, heads=tower.heads, kv_heads=tower.kv_heads, head_dim=tower.head_dim)


class GemmaNorm(nn.Module):
    """x / rms(x) * (1 + weight), computed in float32 and rounded to the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and uses_fused_kernels(x):
            fused: Tensor = elementwise_kernels().rms_norm(x, self.weight, self.eps, is_offset=True)
            return fused
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (scaled * (1.0 + self.weight)).to(x.dtype)

    def after_add(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + branch, and its norm. branch: x's shape, or slices of it to be summed."""
        if x.is_cuda and uses_fused_kernels(x):
            both: tuple[Tensor, Tensor] = elementwise_kernels().add_rms_norm(
                x, branch, self.weight, self.eps, is_offset=True
            )
            return both
        total = x + sum_partials(branch, x)
        return total, self(total)


class PrefixBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, tower: Tower, layer: int, eps: float, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.input_layernorm = GemmaNorm(tower.width, eps)
        self.self_attn = Attention(attention_spec(tower), layer, shard)
        self.post_attention_layernorm = GemmaNorm(tower.width, eps)
        self.mlp = GatedMLP(tower.width, tower.mlp, activation="gelu_tanh", shard=shard)

    def forward(
        self, x: Tensor, normed: Tensor, kv: KVView, rotation: Rotation, after: GemmaNorm
    ) -> tuple[Tensor, Tensor]:
        """Run the block between norms: `normed` is x after `input_layernorm`; `after` norms the last sum.

        Returns the sum and its norm, [T, width] each.
        """
        x, inner = self.post_attention_layernorm.after_add(x, self.self_attn.branch(normed, kv, rotation))
        return after.after_add(x, self.mlp.branch(inner))


class Language(nn.Module):
    """The language model. Only tests use `norm` and the output of the last block.

    shard: heads and inner widths are divided among the ranks of a group; the embedding is whole on each.
    """

    def __init__(self, sizes: Sizes, shard: Shard = WHOLE) -> None:
        super().__init__()
        tower = sizes.language
        self.embed_tokens = nn.Embedding(sizes.vocab, tower.width)
        blocks = (PrefixBlock(tower, layer, sizes.norm_eps, shard) for layer in range(tower.layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = GemmaNorm(tower.width, sizes.norm_eps)
        self.scale = math.sqrt(tower.width)

    def embed(self, tokens: Tensor, embeds: Tensor) -> Tensor:
        """Embed the prefix: text scaled by the square root of the width, camera vectors unscaled.

        tokens: int64 [T], negative at camera vectors. embeds: [T, width]. Returns [T, width].
        """
        text = (embedding(tokens.clamp(min=0), self.embed_tokens.weight).float() * self.scale).to(embeds.dtype)
        return torch.where((tokens < 0)[:, None], embeds, text)

    def read(self, x: Tensor, kv: KVView, rotation: Rotation) -> None:
        """Fill the cache of all layers. The output of the last block is not computed.

        x: [T, width] of all sequences packed.
        """
        *blocks, last = cast("list[PrefixBlock]", list(self.layers))
        normed = self._through(blocks, x, last.input_layernorm, kv, rotation)
        last.self_attn.append_only(normed, kv, rotation)

    def hidden(self, x: Tensor, kv: KVView, rotation: Rotation) -> Tensor:
        """Run `read` including the last block and norm: hidden states [T, width]. Used by tests."""
        return self._through(cast("list[PrefixBlock]", list(self.layers)), x, self.norm, kv, rotation)

    def _through(
        self, blocks: list[PrefixBlock], x: Tensor, after: GemmaNorm, kv: KVView, rotation: Rotation
    ) -> Tensor:
        """Run blocks from before the first norm to after the norm `after`: [T, width]."""
        norms = [*(block.input_layernorm for block in blocks), after]
        normed: Tensor = norms[0](x)
        for block, following in zip(blocks, norms[1:], strict=True):
            x, normed = block(x, normed, kv, rotation, following)
        return normed
