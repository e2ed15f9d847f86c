"""The action expert of the node `LLM`: one transformer block per block of the language model, whose cache it reads."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from mstar_core.layers import Attention, GatedMLP
from mstar_core.parallel.shards import WHOLE, Shard
from mstar_pi05.nodes.gemma import Rotation, attention_spec

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from mstar_core.layers.kv_view import KVView
    from mstar_pi05.checkpoint.config import Sizes, Tower
    from mstar_pi05.nodes.flow import TimeTable


class AdaNorm(nn.Module):
    """x / rms(x) * (1 + scale) + shift in float32; scale, shift and a gate depend on the flow time.

    dense: from the time embedding to [scale, shift, gate]. It is freed once a table replaces it.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.dense: nn.Linear | None = nn.Linear(width, 3 * width, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Return x's shape. x, scale, shift: float32 [T, width]."""
        scaled = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return torch.addcmul(shift, scaled, 1.0 + scale)


class ExpertBlock(nn.Module):
    """x + gate * attention(norm(x)), then x + gate * mlp(norm(x)). `Expert` runs its parts.

    On Hopper, GEMMs of few rows load their weights before their inputs are available.
    """

    def __init__(self, tower: Tower, layer: int, eps: float, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.input_layernorm = AdaNorm(tower.width, eps)
        self.self_attn = Attention(attention_spec(tower), layer, shard)
        self.post_attention_layernorm = AdaNorm(tower.width, eps)
        self.mlp = GatedMLP(tower.width, tower.mlp, activation="gelu_tanh", shard=shard)
        self._tower = tower
        self._is_whole = shard.is_whole

    def attended(self, normed: Tensor, kv: KVView, rotation: Rotation) -> Tensor:
        """Return the attention branch: [T, width], or split-K slices float32 [S, T, width]."""
        attention, gemm = self.self_attn, self._small_gemm(normed)
        joined = attention.fused_weight
        if gemm is None or joined is None:
            return attention.branch(normed, kv, rotation)
        query, key, value = gemm.qkv_rotary(normed, joined.values, rotation, self._tower.heads, self._tower.kv_heads)
        mixed = kv.attend(attention.layer, query, key, value, attention.spec.scale)
        branch: Tensor = gemm.split_k(mixed.reshape(len(normed), -1), attention.o_proj.weight)
        return branch

    def fed(self, normed: Tensor) -> Tensor:
        """Return the MLP branch: [T, width], or split-K slices float32 [S, T, width]."""
        gemm, joined = self._small_gemm(normed), self.mlp.fused_weight
        if gemm is None or joined is None:
            return self.mlp.branch(normed)
        branch: Tensor = gemm.split_k(gemm.gate_up_gelu(normed, joined.values), self.mlp.down_proj.weight)
        return branch

    def _small_gemm(self, normed: Tensor) -> ModuleType | None:
        """Return the small-M GEMM kernels if they support these rows."""
        tower, weight = self._tower, self.mlp.down_proj.weight
        if not self._is_whole or not normed.is_cuda or weight.dtype != normed.dtype:
            return None
        gemm = _gemm_kernels()
        if gemm is None or not gemm.supports(normed, tower.mlp, tower.heads * tower.head_dim, tower.head_dim):
            return None
        return gemm


@dataclass(frozen=True, slots=True)
class Modulation:
    """Inputs of the norms of one flow step. Created by `Policy` for each step.

    rows: int64 [T], rows of the table. dtype: compute dtype of the branches.
    """

    table: TimeTable
    rows: Tensor
    dtype: torch.dtype

    def normed(self, x: Tensor, branch: Tensor | None, norm: AdaNorm, number: int) -> tuple[Tensor, Tensor]:
        """Return x + gate * branch, and its norm; the last norm is float32. x: float32 [T, width].

        branch: the output after the previous norm, multiplied by that norm's gate: [T, width], or slices to be summed
        [S, T, width]; None before the first block. number: index of the norm.
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
        """Compute `normed` in plain torch operations: the CPU path and the kernel's reference."""
        if branch is not None:
            whole = branch if branch.dim() == 2 else branch.sum(0).to(self.dtype)
            x = torch.addcmul(x, self.table.gate(number - 1, self.rows), whole.float())
        normed: Tensor = norm(x, *self.table.norm(number, self.rows))
        return x, normed.to(out)


class Expert(nn.Module):
    """The action expert: action tokens to their final hidden states, at one flow step.

    shard: heads and inner widths are divided among the ranks of a group.
    """

    def __init__(self, sizes: Sizes, shard: Shard = WHOLE) -> None:
        super().__init__()
        tower = sizes.expert
        blocks = (ExpertBlock(tower, layer, sizes.norm_eps, shard) for layer in range(tower.layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = AdaNorm(tower.width, sizes.norm_eps)

    @property
    def norms(self) -> list[AdaNorm]:
        """All norms in order of use: two per block, then the last one."""
        blocks = cast("list[ExpertBlock]", list(self.layers))
        pairs = [(block.input_layernorm, block.post_attention_layernorm) for block in blocks]
        return [*(norm for pair in pairs for norm in pair), self.norm]

    def modulations(self, conditions: Tensor) -> Tensor:
        """Return scale, shift and gate of all norms, [norms, times, 3 * width]. conditions: float32 [times, width]."""
        denses = [norm.dense for norm in self.norms]
        return torch.stack([dense(conditions) for dense in denses if dense is not None])

    def forget_dense(self) -> None:
        """Free the dense layers that the table replaces: 0.47 GB at full size."""
        for norm in self.norms:
            norm.dense = None

    def forward(self, x: Tensor, modulation: Modulation, kv: KVView, rotation: Rotation) -> Tensor:
        """Return final hidden states float32 [T, width]. x: float32 [T, width], all sequences packed."""
        first = cast("ExpertBlock", self.layers[0]).input_layernorm
        x, normed = modulation.normed(x, None, first, 0)
        x, branch = self.between(x, normed, modulation, kv, rotation)
        return modulation.normed(x, branch, self.norm, 2 * len(self.layers))[1]

    def between(
        self, x: Tensor, normed: Tensor, modulation: Modulation, kv: KVView, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        """Run all blocks after the first norm, and return the inputs of the last norm: residual and branch.

        x: float32 [T, width]; normed: its first norm. Returns float32 [T, width], and [T, width] or slices to be summed
        [S, T, width].
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
    """Import the small-M GEMM kernels; None if the installed Triton does not support them."""
    module: ModuleType | None = importlib.import_module("mstar_core.layers.kernels.gluon").gluon_kernels(
        "mstar_pi05.kernels.small_gemm", "flows of one request"
    )
    return module
