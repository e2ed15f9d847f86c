"""Self-attention over the paged cache, and the decoder block around it. Used by model plugins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import linear

from mstar_core.layers.mlp import GatedMLP
from mstar_core.layers.norm import RMSNorm
from mstar_core.layers.packing import is_fused, join, kernels
from mstar_core.layers.rotary import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.kv_view import KVView


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Sizes of one attention layer. `bias` is that of the query, key and value projections.

    norm_eps: set where queries and keys are normalised per head before rotation.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    norm_eps: float | None = None
    scale: float | None = None


class Attention(nn.Module):
    """Projects packed tokens, rotates, and lets the engine's KVView append and attend."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.q_proj = nn.Linear(spec.width, spec.heads * spec.head_dim, bias=spec.bias)
        self.k_proj = nn.Linear(spec.width, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.v_proj = nn.Linear(spec.width, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, spec.width, bias=spec.output_bias)
        if spec.norm_eps is not None:
            self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps)
            self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps)
        self._joined: Tensor | None = None

    def pack(self) -> bool:
        """Make the three input projections one matrix where nothing stands between them and the rotation."""
        if self.spec.norm_eps is None:
            self._joined = join([self.q_proj, self.k_proj, self.v_proj])
        return self._joined is not None

    def forward(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: [T, width]; rotation: cosine and sine [T, 1, head_dim]. Returns [T, width]."""
        spec, tokens = self.spec, x.shape[0]
        if self._joined is not None and rotation[0].shape[-1] == spec.head_dim and is_fused(x):
            packed = linear(x, self._joined)
            query, key = kernels().rotate_pair(packed, spec.heads, spec.kv_heads, spec.head_dim, *rotation)
            value = packed[:, (spec.heads + spec.kv_heads) * spec.head_dim :].view(tokens, spec.kv_heads, spec.head_dim)
            mixed = kv.attend(self.layer, query, key, value, spec.scale)
            fused: Tensor = self.o_proj(mixed.reshape(tokens, -1))
            return fused
        query = self.q_proj(x).view(tokens, spec.heads, spec.head_dim)
        key = self.k_proj(x).view(tokens, spec.kv_heads, spec.head_dim)
        value = self.v_proj(x).view(tokens, spec.kv_heads, spec.head_dim)
        if spec.norm_eps is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = kv.attend(self.layer, query, key, value, spec.scale)
        out: Tensor = self.o_proj(mixed.reshape(tokens, -1))
        return out


class DecoderBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)); parameter names of Llama-like checkpoints."""

    def __init__(self, spec: AttentionSpec, inner: int, layer: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.width, eps)
        self.self_attn = Attention(spec, layer)
        self.post_attention_layernorm = RMSNorm(spec.width, eps)
        self.mlp = GatedMLP(spec.width, inner)

    def forward(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: [T, width]. Returns [T, width]."""
        x, normed = self.post_attention_layernorm.after_add(x, self.self_attn(self.input_layernorm(x), kv, rotation))
        out: Tensor = x + self.mlp(normed)
        return out

    def chained(
        self, x: Tensor, normed: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor], next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """The same block between norms: `normed` is x after this block's first norm; the last addition is done
        together with the norm that follows. Returns [T, width] twice: the sum, and its norm.
        """
        x, inner = self.post_attention_layernorm.after_add(x, self.self_attn(normed, kv, rotation))
        return next_norm.after_add(x, self.mlp(inner))
