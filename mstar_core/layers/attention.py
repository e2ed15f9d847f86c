"""Self-attention over the paged cache, and the decoder block around it. Used by model plugins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from mstar_core.layers.kv_view import KeepingView, PackedView
from mstar_core.layers.matrix import matrix_of, parts, project, summed
from mstar_core.layers.mlp import GatedMLP
from mstar_core.layers.norm import RMSNorm
from mstar_core.layers.packing import is_fused, join, kernels
from mstar_core.layers.rotary import rotate

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView
    from mstar_core.layers.matrix import Matrix


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
        self._joined: Matrix | None = None

    def pack(self) -> bool:
        """Make the three input projections one matrix where nothing stands between them and the rotation.

        Once: captured graphs read the matrix where it lies.
        """
        if self._joined is None and self.spec.norm_eps is None:
            self._joined = join([self.q_proj, self.k_proj, self.v_proj])
        return self._joined is not None

    @property
    def joined(self) -> Matrix | None:
        """The projections of the input as one matrix, once `pack` made it."""
        return self._joined

    def unpack(self) -> bool:
        """Forget the joined matrix, whose parts the projections still are. Returns whether there was one."""
        joined, self._joined = self._joined, None
        return joined is not None

    def forward(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x: [T, width]; rotation: cosine and sine [T, 1, head_dim]. Returns [T, width]."""
        return summed(self.branch(x, kv, rotation), x)

    def branch(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The same, in slices where that is what the output projection leaves: see `matrix.parts`."""
        spec, tokens = self.spec, x.shape[0]
        if self._joined is not None and rotation[0].shape[-1] == spec.head_dim and is_fused(x):
            packed = parts(x, self._joined)
            if isinstance(kv, PackedView):
                together = kv.attend_packed(self.layer, packed, rotation, spec.heads, spec.scale)
                if together is not None:
                    return self._output(together.view(tokens, -1))
            query, key, value = kernels().rotate_pair(packed, spec.heads, spec.kv_heads, *rotation, x.dtype)
            mixed = kv.attend(self.layer, query, key, value, spec.scale)
            return self._output(mixed.reshape(tokens, -1))
        query = self.q_proj(x).view(tokens, spec.heads, spec.head_dim)
        key = self.k_proj(x).view(tokens, spec.kv_heads, spec.head_dim)
        value = self.v_proj(x).view(tokens, spec.kv_heads, spec.head_dim)
        if spec.norm_eps is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        mixed = kv.attend(self.layer, query, key, value, spec.scale)
        return self._output(mixed.reshape(tokens, -1))

    def leave(self, x: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor]) -> None:
        """Only put keys and values in the cache: for a last layer of which nothing else is wanted. As `forward`."""
        spec, tokens = self.spec, x.shape[0]
        if not isinstance(kv, KeepingView) or self.spec.norm_eps is not None:
            self.branch(x, kv, rotation)
            return
        if self._joined is not None and rotation[0].shape[-1] == spec.head_dim and is_fused(x):
            both = project(x, self._joined.after(spec.heads * spec.head_dim))  # it begins with the queries
            _, key, value = kernels().rotate_pair(both, 0, spec.kv_heads, *rotation, x.dtype)
        else:
            key = rotate(self.k_proj(x).view(tokens, spec.kv_heads, spec.head_dim), *rotation)
            value = self.v_proj(x).view(tokens, spec.kv_heads, spec.head_dim)
        kv.keep(self.layer, key, value)

    def _output(self, mixed: Tensor) -> Tensor:
        matrix = matrix_of(self.o_proj)
        if matrix is not None:
            return parts(mixed, matrix)
        out: Tensor = self.o_proj(mixed)
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
        branch = self.self_attn.branch(self.input_layernorm(x), kv, rotation)
        x, normed = self.post_attention_layernorm.after_add(x, branch)
        out: Tensor = x + self.mlp(normed)
        return out

    def chained(
        self, x: Tensor, normed: Tensor, kv: KVView, rotation: tuple[Tensor, Tensor], next_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """The same block between norms: `normed` is x after this block's first norm; the last addition is done
        together with the norm that follows. Returns [T, width] twice: the sum, and its norm.
        """
        x, inner = self.post_attention_layernorm.after_add(x, self.self_attn.branch(normed, kv, rotation))
        return next_norm.after_add(x, self.mlp.branch(inner))
