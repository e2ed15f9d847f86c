"""Sparse mixture-of-experts layer: router, fused experts and an optional shared expert. Used by model plugins.

On CUDA the layer runs as Triton kernels, elsewhere as plain PyTorch. No token is ever dropped, and the sum over a
token's experts has a fixed order, so a token's result does not depend on its batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import sigmoid, silu

from mstar_core.layers.linear import LinearWeight, PreparedLayer, library_gemm, project_partial, sum_partials
from mstar_core.layers.transformer import GatedMLP
from mstar_core.parallel.shards import WHOLE, Shard, Slice

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Sizes of a mixture of experts. inner: width of an expert's MLP.

    normalizes: divide the weights of a token's experts by their sum. shared_inner: width of the expert that every
    token uses, 0 without one.
    """

    width: int
    inner: int
    experts: int
    experts_per_token: int
    normalizes: bool = True
    shared_inner: int = 0

    @property
    def shared_parts(self) -> int:
        """Experts of width `inner` that the shared expert is equal to; 0 if it cannot be divided."""
        return self.shared_inner // self.inner if self.shared_inner % self.inner == 0 else 0


class Experts(nn.Module):
    """Weights of all experts. gate_up_proj: [E, 2 * inner, width], gate rows first; down_proj: [E, width, inner].

    Behind `quantize` both are float8 e4m3, with one float32 scale per output: gate_up_scale [E, 2 * inner] and
    down_scale [E, width]. rounds_inputs: see `LinearWeight`.
    """

    gate_up_scale: Tensor | None
    down_scale: Tensor | None

    def __init__(self, spec: MoESpec) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(spec.experts, 2 * spec.inner, spec.width))
        self.down_proj = nn.Parameter(torch.empty(spec.experts, spec.width, spec.inner))
        self.register_buffer("gate_up_scale", None)
        self.register_buffer("down_scale", None)
        self.rounds_inputs = False
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs of the chosen experts: [T, k, width]. x: [T, width]; chosen: int64 [T, k]."""
        out = x.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            token, place = torch.where(chosen == expert)
            gate, up = library_gemm(x[token], self.gate_up(expert)).chunk(2, dim=-1)
            out[token, place] = library_gemm(silu(gate) * up, self.down(expert))
        return out

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales of both weights; None before `replace`."""
        if self.gate_up_scale is None or self.down_scale is None:
            return None
        return self.gate_up_scale, self.down_scale

    def gate_up(self, expert: int) -> LinearWeight:
        """Return the first weight of an expert."""
        scale = None if self.gate_up_scale is None else self.gate_up_scale[expert]
        return LinearWeight(self.gate_up_proj[expert], scale, self.rounds_inputs)

    def down(self, expert: int) -> LinearWeight:
        """Return the second weight of an expert."""
        scale = None if self.down_scale is None else self.down_scale[expert]
        return LinearWeight(self.down_proj[expert], scale, self.rounds_inputs)

    def replace(
        self, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor], *, rounds_inputs: bool = False
    ) -> None:
        """Take float8 weights, each with its scales, in place of the parameters. Called by `quantize`."""
        del self.gate_up_proj, self.down_proj
        for name, (values, scale) in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_proj", values)
            self.register_buffer(f"{name}_scale", scale)
        self.rounds_inputs = rounds_inputs


def expert_parts(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the views of each expert in the fused weights of a module, as `load_weights` takes them.

    Their names are those of Qwen's checkpoints: `experts.5.gate_proj.weight` and so on.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, experts in module.named_modules():
        if isinstance(experts, Experts):
            pairs = (pair.chunk(2) for pair in experts.gate_up_proj.detach())
            parts[f"{name}.gate_up_proj"] = {
                f"{name}.{expert}.{kind}_proj.weight": view
                for expert, pair in enumerate(pairs)
                for kind, view in zip(("gate", "up"), pair, strict=True)
            }
            parts[f"{name}.down_proj"] = {
                f"{name}.{expert}.down_proj.weight": view for expert, view in enumerate(experts.down_proj.detach())
            }
    return parts


class SparseMoE(PreparedLayer):
    """Weighted sum of the experts that a router chooses for each token. Parameters are named as in Qwen's checkpoints.

    p = softmax of the router's logits over all experts, in float32. The k greatest of p are the weights, after division
    by their sum, in the model's dtype. A shared expert adds sigmoid(shared_expert_gate(x)) * shared_expert(x).
    Source: Qwen3-MoE, and Qwen2-MoE for the shared expert.
    shard: the inner width of every expert is divided among the ranks of a group, and the outputs are summed. spec: with
    the widths of this rank.
    """

    def __init__(self, spec: MoESpec, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.shard = shard
        self._inner = shard.part(spec.inner, "inner values of an expert")
        self._shared_inner = shard.part(spec.shared_inner, "inner values of the shared expert")
        self.spec = spec = replace(spec, inner=len(self._inner), shared_inner=len(self._shared_inner))
        self.gate = nn.Linear(spec.width, spec.experts, bias=False)
        self.experts = Experts(spec)
        if spec.shared_inner:
            self.shared_expert = GatedMLP(spec.width, spec.shared_inner)
            self.shared_expert_gate = nn.Linear(spec.width, 1, bias=False)
        self._router: LinearWeight | None = None

    def fuse_projections(self) -> bool:
        """Append the shared expert to the routed ones, as experts that every token uses. Returns whether it is there.

        SwiGLU is a sum over its inner width, so an expert of twice the width equals the sum of two experts. Called once
        after loading on CUDA; the shared expert's own weights stay.
        """
        spec = self.spec
        if self._router is None and spec.shared_parts:
            shared, experts = self.shared_expert, self.experts
            halves = [layer.weight.view(-1, spec.inner, spec.width) for layer in (shared.gate_proj, shared.up_proj)]
            down = shared.down_proj.weight.view(spec.width, -1, spec.inner).transpose(0, 1)
            with torch.no_grad():
                experts.gate_up_proj.data = torch.cat([experts.gate_up_proj, torch.cat(halves, dim=1)])
                experts.down_proj.data = torch.cat([experts.down_proj, down])
                self._router = LinearWeight(torch.cat([self.gate.weight, self.shared_expert_gate.weight]))
        return self._router is not None

    def forward(self, x: Tensor) -> Tensor:
        """Return x's shape. x: [T, width]."""
        return sum_partials(self.branch(x), x)

    def branch(self, x: Tensor) -> Tensor:
        """Return the same, or the terms of the weighted sum, [S, T, width], for the next norm to add."""
        return self._own(x) if self.shard.is_whole else self.shard.reduce(sum_partials(self._own(x), x))

    def slices(self) -> Mapping[str, Slice]:
        """Return the parts of this rank's weights. Routed experts have the names of `expert_parts`."""
        if self.shard.is_whole:
            return {}
        inner, size = self._inner, self.shard.size
        slices = {
            f"experts.{expert}.{kind}_proj.weight": Slice.part(int(kind == "down"), inner, len(inner) * size)
            for expert in range(self.spec.experts)
            for kind in ("gate", "up", "down")
        }
        shared = self._shared_inner if self.spec.shared_inner else ()
        return slices | {
            f"shared_expert.{kind}_proj.weight": Slice.part(int(kind == "down"), self._shared_inner, len(shared) * size)
            for kind in (("gate", "up", "down") if shared else ())
        }

    def _own(self, x: Tensor) -> Tensor:
        """Return the output of this rank's part of the experts, as `branch` does."""
        experts = self.experts
        if x.is_cuda and _kernels().supports(x, experts.gate_up_proj, experts.down_proj, experts.scales):
            return self.terms(x)
        weights, chosen = self.route(x)
        return self._shared(x, _weighted_sum(self.experts(x, chosen), weights))

    def terms(self, x: Tensor) -> Tensor:
        """Return the result of `branch` from the Triton kernels. x: [T, width], contiguous."""
        spec, experts = self.spec, self.experts
        logits = project_partial(x, self._router or LinearWeight(self.gate.weight))
        terms: Tensor = _kernels().expert_terms(
            x,
            logits,
            experts.gate_up_proj,
            experts.down_proj,
            spec.experts_per_token,
            shared=spec.shared_parts if self._router is not None else 0,
            normalizes=spec.normalizes,
            scales=experts.scales,
            rounds_inputs=experts.rounds_inputs,
        )
        return terms if self._router is not None or not spec.shared_inner else self._shared(x, sum_partials(terms, x))

    @property
    def traced_as(self) -> MoESpec:
        """Return what the kernels of this layer depend on, so that equal layers are traced once."""
        return self.spec

    def trace(self) -> None:
        """Launch the kernels of every number of tokens that has kernels of its own, so that they are compiled."""
        weight = self.gate.weight
        if not weight.is_cuda:
            return
        spec, shared = self.spec, self.spec.shared_parts if self._router is not None else 0
        x = weight.new_empty(1, spec.width)
        for tokens in _kernels().token_ranges(x, spec.inner, spec.experts_per_token + shared, spec.experts + shared):
            self._own(x.new_zeros(tokens, spec.width))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights in x's dtype and the experts, int64, of each token: [T, k], the greatest weight first."""
        spec = self.spec
        shares = torch.softmax(self.gate(x).float(), dim=-1)
        weights, chosen = shares.topk(spec.experts_per_token, dim=-1)
        if spec.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def _shared(self, x: Tensor, total: Tensor) -> Tensor:
        if not self.spec.shared_inner:
            return total
        shared: Tensor = sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return total + shared


def _kernels() -> ModuleType:
    """Import the kernels. They need triton, which comes with CUDA builds of torch."""
    return importlib.import_module("mstar_core.layers.kernels.moe")


def _weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over k in order: [T, width]. outputs: [T, k, width]; weights: [T, k]."""
    total = outputs[:, 0] * weights[:, :1]
    for place in range(1, weights.shape[1]):
        total = total + outputs[:, place] * weights[:, place : place + 1]
    return total
