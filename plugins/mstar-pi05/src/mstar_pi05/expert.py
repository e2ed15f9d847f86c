"""The action expert: one transformer block per block of the language model, whose cache it reads. Part of `LLM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from mstar_core.layers import Attention
from mstar_pi05.gemma import GeluMLP, Rotation, attention_spec

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.engine.kv_view import KVView
    from mstar_pi05.flow import TimeTable
    from mstar_pi05.sizes import Sizes, Tower


class AdaNorm(nn.Module):
    """x / rms(x) * (1 + scale) + shift in float32; scale, shift and a gate come from the flow time.

    dense: from the time's vector to [scale, shift, gate]. It is dropped once a table stands in for it.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.dense: nn.Linear | None = nn.Linear(width, 3 * width, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
        """x: float32 [T, width]; modulation: float32 [T, 3 * width]. Returns the norm and the gate, [T, width] each."""
        scale, shift, gate = modulation.chunk(3, dim=-1)
        scaled = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return torch.addcmul(shift, scaled, 1.0 + scale), gate


class ExpertBlock(nn.Module):
    """x + gate * attention(norm(x)), then x + gate * mlp(norm(x)); the residual stays in float32."""

    def __init__(self, tower: Tower, layer: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = AdaNorm(tower.width, eps)
        self.self_attn = Attention(attention_spec(tower), layer)
        self.post_attention_layernorm = AdaNorm(tower.width, eps)
        self.mlp = GeluMLP(tower.width, tower.mlp)

    def forward(self, x: Tensor, first: Tensor, second: Tensor, kv: KVView, rotation: Rotation) -> Tensor:
        """x: float32 [T, width]. first, second: modulations of both norms. Returns x's shape."""
        dtype = self.mlp.gate_proj.weight.dtype
        normed, gate = self.input_layernorm(x, first)
        x = torch.addcmul(x, gate, self.self_attn(normed.to(dtype), kv, rotation).float())
        normed, gate = self.post_attention_layernorm(x, second)
        return torch.addcmul(x, gate, self.mlp(normed.to(dtype)).float())


class Expert(nn.Module):
    """Action tokens to their final hidden states, at one flow step."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        tower = sizes.expert
        blocks = (ExpertBlock(tower, layer, sizes.norm_eps) for layer in range(tower.layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = AdaNorm(tower.width, sizes.norm_eps)

    @property
    def norms(self) -> list[AdaNorm]:
        """Every norm in the order in which it is met: two per block, then the last one."""
        blocks = cast("list[ExpertBlock]", list(self.layers))
        pairs = [(block.input_layernorm, block.post_attention_layernorm) for block in blocks]
        return [*(norm for pair in pairs for norm in pair), self.norm]

    def modulations(self, conditions: Tensor) -> Tensor:
        """All norms' scale, shift and gate. conditions: float32 [times, width]. Returns [norms, times, 3 * width]."""
        denses = [norm.dense for norm in self.norms]
        return torch.stack([dense(conditions) for dense in denses if dense is not None])

    def forget_dense(self) -> None:
        """Free what a table stands in for: 0.47 GB at full size."""
        for norm in self.norms:
            norm.dense = None

    def forward(self, x: Tensor, table: TimeTable, rows: Tensor, kv: KVView, rotation: Rotation) -> Tensor:
        """x: float32 [T, width], all rows packed; rows: int64 [T], places in the table. Returns float32 [T, width]."""
        for number, block in enumerate(self.layers):
            x = block(x, table.norm(2 * number, rows), table.norm(2 * number + 1, rows), kv, rotation)
        normed: Tensor = self.norm(x, table.norm(2 * len(self.layers), rows))[0]
        return normed
