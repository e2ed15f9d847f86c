"""The action expert: one transformer block per block of the language model, whose cache it reads. Part of `LLM`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from mstar_core.layers import Attention, GatedMLP
from mstar_pi05.nodes.gemma import Rotation, attention_spec

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from mstar_core.layers.kv_view import KVView
    from mstar_pi05.checkpoint.config import Sizes, Tower
    from mstar_pi05.nodes.flow import TimeTable


class AdaNorm(nn.Module):
    """x / rms(x) * (1 + scale) + shift in float32; scale, shift and a gate come from the flow time.

    dense: from the time's vector to [scale, shift, gate]. It is dropped once a table stands in for it.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.dense: nn.Linear | None = nn.Linear(width, 3 * width, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """x, scale, shift: float32 [T, width]. Returns the same shape."""
        scaled = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return torch.addcmul(shift, scaled, 1.0 + scale)


class ExpertBlock(nn.Module):
    """x + gate * attention(norm(x)), then x + gate * mlp(norm(x)): its parts, which `Expert` runs.

    On Hopper, few rows go through products that hold their weights before the rows are there.
    """

    def __init__(self, tower: Tower, layer: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = AdaNorm(tower.width, eps)
        self.self_attn = Attention(attention_spec(tower), layer)
        self.post_attention_layernorm = AdaNorm(tower.width, eps)
        self.mlp = GatedMLP(tower.width, tower.mlp, activation="gelu_tanh")
        self._tower = tower

    def attended(self, normed: Tensor, kv: KVView, rotation: Rotation) -> Tensor:
        """The attention's branch: [T, width], or slices of it to be summed, float32 [S, T, width]."""
        attention, gemm = self.self_attn, self._small_gemm(normed)
        joined = attention.fused_weight
        if gemm is None or joined is None:
            return attention.branch(normed, kv, rotation)
        query, key, value = gemm.qkv_rotary(normed, joined.values, rotation, self._tower.heads, self._tower.kv_heads)
        mixed = kv.attend(attention.layer, query, key, value, attention.spec.scale)
        branch: Tensor = gemm.split_k(mixed.reshape(len(normed), -1), attention.o_proj.weight)
        return branch

    def fed(self, normed: Tensor) -> Tensor:
        """The feed-forward part's branch, likewise."""
        gemm, joined = self._small_gemm(normed), self.mlp.fused_weight
        if gemm is None or joined is None:
            return self.mlp.branch(normed)
        branch: Tensor = gemm.split_k(gemm.gate_up_gelu(normed, joined.values), self.mlp.down_proj.weight)
        return branch

    def _small_gemm(self, normed: Tensor) -> ModuleType | None:
        """The kernels that hold their weights, where they take these rows."""
        tower, weight = self._tower, self.mlp.down_proj.weight
        if not normed.is_cuda or weight.dtype != normed.dtype:
            return None
        gemm = _gemm_kernels()
        if gemm is None or not gemm.supports(normed, tower.mlp, tower.heads * tower.head_dim, tower.head_dim):
            return None
        return gemm


@dataclass(frozen=True, slots=True)
class Modulation:
    """What the norms of one step read. Made by `Policy` for each step.

    rows: int64 [T], places in the table. dtype: what the branches compute in, whatever their weights are gemm in.
    """

    table: TimeTable
    rows: Tensor
    dtype: torch.dtype

    def normed(self, x: Tensor, branch: Tensor | None, norm: AdaNorm, number: int) -> tuple[Tensor, Tensor]:
        """x + gate * branch, and its norm, which is float32 where it is the last one. x: float32 [T, width].

        branch: what stood behind the norm before, whose gate it gets: [T, width], or slices to be summed
        [S, T, width]; None at the beginning. number: the norm's, in the order in which they are met.
        """
        out = torch.float32 if number + 1 == len(self.table.modulations) else self.dtype
        if x.is_cuda:
            kernels, dtypes = importlib.import_module("mstar_pi05.kernels.adaptive_norm"), (self.dtype, out)
            both: tuple[Tensor, Tensor] = kernels.modulate(
                x, branch, self.table.modulations, number, self.rows, norm.eps, dtypes
            )
            return both
        return self.normed_plain(x, branch, norm, number, out)

    def normed_plain(
        self, x: Tensor, branch: Tensor | None, norm: AdaNorm, number: int, out: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The same in plain operations: on the CPU, and what the kernel is gemm to."""
        if branch is not None:
            whole = branch if branch.dim() == 2 else branch.sum(0).to(self.dtype)
            x = torch.addcmul(x, self.table.gate(number - 1, self.rows), whole.float())
        normed: Tensor = norm(x, *self.table.norm(number, self.rows))
        return x, normed.to(out)


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

    def forward(self, x: Tensor, modulation: Modulation, kv: KVView, rotation: Rotation) -> Tensor:
        """x: float32 [T, width], all rows packed. Returns float32 [T, width]."""
        first = cast("ExpertBlock", self.layers[0]).input_layernorm
        x, normed = modulation.normed(x, None, first, 0)
        x, branch = self.between(x, normed, modulation, kv, rotation)
        return modulation.normed(x, branch, self.norm, 2 * len(self.layers))[1]

    def between(
        self, x: Tensor, normed: Tensor, modulation: Modulation, kv: KVView, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """From the first norm to what the last one reads: the sum before the last branch, and that branch.

        x: float32 [T, width]; normed: its first norm. Returns float32 [T, width], and [T, width] or slices to be
        summed [S, T, width].
        """
        branch: Tensor | None = None
        for number, block in enumerate(cast("list[ExpertBlock]", list(self.layers))):
            if branch is not None:
                x, normed = modulation.normed(x, branch, block.input_layernorm, 2 * number)
            branch = block.attended(normed, kv, rotation)
            x, normed = modulation.normed(x, branch, block.post_attention_layernorm, 2 * number + 1)
            branch = block.fed(normed)
        assert branch is not None, "a tower has blocks"
        return x, branch


def _gemm_kernels() -> ModuleType | None:
    """The kernels that hold their weights; none where another triton than theirs is installed."""
    found: ModuleType | None = importlib.import_module("mstar_core.layers.kernels.gluon").gluon_kernels(
        "mstar_pi05.kernels.small_gemm", "flows of one request"
    )
    return found
