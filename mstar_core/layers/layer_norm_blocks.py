"""Transformer blocks with LayerNorm, biases and learned positions: encoders, and decoders that read an encoder.

Parameters are named as in BART and Whisper. Source: Vaswani et al. 2017 (norms behind the additions), GPT-2 (in front).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal

from torch import nn
from torch.nn.functional import gelu, linear, relu, scaled_dot_product_attention

from mstar_core.layers.linear import elementwise_kernels, join_with_biases

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from mstar_core.layers.kv_view import KVView, MemoryView

BlockActivation = Literal["gelu", "gelu_tanh", "relu"]

_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "relu": relu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """Sizes of one block.

    inner: width of the MLP. norm_first: norms come before attention and MLP, as in Whisper and GPT-2; otherwise behind
    the additions, as in BERT and BART. key_bias: of the projection of keys, which Whisper does not have.
    """

    width: int
    heads: int
    inner: int
    activation: BlockActivation = "gelu"
    eps: float = 1e-5
    norm_first: bool = True
    key_bias: bool = True


class HeadProjections(nn.Module):
    """Projections of one attention without rotary. Heads are the last axis but one: [..., heads, head_dim]."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self._heads = spec.heads
        self.q_proj = nn.Linear(spec.width, spec.width)
        self.k_proj = nn.Linear(spec.width, spec.width, bias=spec.key_bias)
        self.v_proj = nn.Linear(spec.width, spec.width)
        self.out_proj = nn.Linear(spec.width, spec.width)
        self._joined: tuple[Tensor, Tensor] | None = None

    def join(self) -> None:
        """Join the projections of `all_three` into one matrix multiplication. Called once the weights are loaded."""
        self._joined = join_with_biases([self.q_proj, self.k_proj, self.v_proj])

    def all_three(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of one input, [..., heads, head_dim] each. x: [..., width]."""
        if self._joined is None:
            return self.queries(x), *self.keys_and_values(x)
        query, key, value = linear(x, *self._joined).unflatten(-1, (3, self._heads, -1)).unbind(-3)
        return query, key, value

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries, [..., heads, head_dim]. x: [..., width]."""
        queries: Tensor = self.q_proj(x).unflatten(-1, (self._heads, -1))
        return queries

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, [..., heads, head_dim] each. x: [..., width]."""
        return self.k_proj(x).unflatten(-1, (self._heads, -1)), self.v_proj(x).unflatten(-1, (self._heads, -1))

    def output(self, attended: Tensor) -> Tensor:
        """Return the output, [..., width]. attended: [..., heads, head_dim]."""
        result: Tensor = self.out_proj(attended.flatten(-2))
        return result


class _Block(nn.Module):
    """Base of a block: self-attention's projections, the MLP, and the place of the norms."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self._norm_first, self._activation = spec.norm_first, _ACTIVATIONS[spec.activation]
        self.self_attn = HeadProjections(spec)
        self.self_attn_layer_norm = nn.LayerNorm(spec.width, spec.eps)
        self.fc1 = nn.Linear(spec.width, spec.inner)
        self.fc2 = nn.Linear(spec.inner, spec.width)
        self.final_layer_norm = nn.LayerNorm(spec.width, spec.eps)

    def _through(self, x: Tensor, *branches: tuple[nn.LayerNorm, Callable[[Tensor], Tensor]]) -> Tensor:
        """Return x with these branches added one after the other, each with its norm in front or behind."""
        if not self._norm_first:
            for norm, branch in branches:
                x = norm(x + branch(x))
            return x
        normed = branches[0][0](x)
        for (_, branch), (norm, _) in pairwise(branches):
            x, normed = _summed(x, branch(normed), norm)
        return x + branches[-1][1](normed)

    def _mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self._activation(self.fc1(x)))
        return out


class EncoderBlock(_Block):
    """Self-attention over all positions, then an MLP. Stateless."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return x's shape, [B, n, width]. mask: bool, broadcast to [B, heads, n, n]; False hides a position."""
        attention = self.self_attn_layer_norm, lambda normed: self._attended(normed, mask)
        return self._through(x, attention, (self.final_layer_norm, self._mlp))

    def _attended(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (part.transpose(-2, -3) for part in self.self_attn.all_three(x))
        return self.self_attn.output(scaled_dot_product_attention(query, key, value, mask).transpose(-2, -3))


class CausalBlock(_Block):
    """Self-attention through the engine's cache, then an MLP. Tokens are packed: [T, width]."""

    def __init__(self, spec: BlockSpec, layer: int) -> None:
        super().__init__(spec)
        self._layer = layer

    def forward(self, x: Tensor, kv: KVView) -> Tensor:
        """Return [T, width]. x: [T, width]."""
        attention = self.self_attn_layer_norm, lambda normed: self._attended(normed, kv)
        return self._through(x, attention, (self.final_layer_norm, self._mlp))

    def _attended(self, x: Tensor, kv: KVView) -> Tensor:
        return self.self_attn.output(kv.attend(self._layer, *self.self_attn.all_three(x)))


class CrossBlock(CausalBlock):
    """Self-attention, attention over the memory of the sequence (`KVSpec.memory`), then an MLP."""

    def __init__(self, spec: BlockSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.encoder_attn = HeadProjections(spec)
        self.encoder_attn_layer_norm = nn.LayerNorm(spec.width, spec.eps)

    def forward(self, x: Tensor, kv: MemoryView) -> Tensor:  # type: ignore[override]  # its view has a memory
        """Return [T, width]. x: [T, width]."""
        attention = self.self_attn_layer_norm, lambda normed: self._attended(normed, kv)
        reading = self.encoder_attn_layer_norm, lambda normed: self._read(normed, kv)
        return self._through(x, attention, reading, (self.final_layer_norm, self._mlp))

    def remember(self, states: Tensor, kv: MemoryView) -> None:
        """Store keys and values of encoder states, [T, width], in a pass on the memory's branch."""
        kv.keep(self._layer, *self.encoder_attn.keys_and_values(states))

    def _read(self, x: Tensor, kv: MemoryView) -> Tensor:
        return self.encoder_attn.output(kv.attend_cross(self._layer, self.encoder_attn.queries(x)))


def _summed(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm, on CUDA in half precision by one kernel."""
    if x.is_cuda and x.is_contiguous() and elementwise_kernels().supports(x.flatten(0, -2)):
        both: tuple[Tensor, Tensor] = elementwise_kernels().add_layer_norm(x, branch, norm)
        return both
    x = x + branch
    return x, norm(x)
