"""Linear weights and their products: Triton kernels for few rows, the library's GEMM for more. Used by layers.

The kernel depends on the shape and the number of rows alone, so eager and captured steps agree. This module also
fuses projections of one input into a single weight; the worker calls that for CUDA once the weights are loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import nn
from torch.nn.functional import gelu, linear, silu

from mstar_core.layers import float8

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kernels.small_m_gemm import GemmTiling

SMALL_M: Final = 64
"""Most rows for which the small-M GEMM is at least as fast as cuBLAS: bench/results/gpu/linear_h100.json."""

FEWEST_GATED: Final = 100
"""A gated GEMM with fewer programs uses blocks of half the size, to fill an H100."""

Activation = Literal["silu", "gelu_tanh"]
"""Activation of a gate."""

SPLIT_K_PROGRAMS: Final = 210
"""Programs of a split-K GEMM with few outputs: 1.6 for each multiprocessor of an H100."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """Weight of a linear layer without bias. Owned by the layer.

    values: [outputs, inputs], a floating dtype, or float8_e4m3fn with scale: float32 [outputs].
    rounds_inputs: the inputs of a float8 weight are rounded to float8 too, token by token. Products of few rows on
    CUDA keep them: they are bound by the bytes of the weight.
    """

    values: Tensor
    scale: Tensor | None = None
    rounds_inputs: bool = False

    def after(self, first: int) -> LinearWeight:
        """Return the weight of the outputs from `first` on."""
        scale = None if self.scale is None else self.scale[first:]
        return LinearWeight(self.values[first:], scale, self.rounds_inputs)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight as one tensor of this dtype."""
        if self.scale is None:
            return self.values.to(dtype)
        if self.values.is_cuda and dtype in (torch.bfloat16, torch.float16):
            weight: Tensor = elementwise_kernels().dequantize(self.values, self.scale, dtype)
            return weight
        return (self.values.float() * self.scale[:, None]).to(dtype)


def weight_of(layer: nn.Module) -> LinearWeight | None:
    """Return the weight of a linear layer, quantized or not; None if it has a bias or is another kind of module."""
    bias: Tensor | None = layer.bias if isinstance(layer, QuantizedLinear | nn.Linear) else None
    return None if bias is not None else _weight_beside_bias(layer)


def _weight_beside_bias(layer: nn.Module) -> LinearWeight | None:
    if isinstance(layer, QuantizedLinear):
        return LinearWeight(layer.weight, layer.scale, layer.rounds_inputs)
    return LinearWeight(layer.weight) if isinstance(layer, nn.Linear) else None


class QuantizedLinear(nn.Module):
    """A linear layer with float8 e4m3 weights and one float32 scale per output. Made by `quantize`.

    rounds_inputs: see LinearWeight.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, rounds_inputs: bool = False
    ) -> None:
        super().__init__()
        self.rounds_inputs = rounds_inputs
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., outputs] in x's dtype. x: [..., inputs]."""
        weight = LinearWeight(self.weight, self.scale, self.rounds_inputs)
        out = project(x.reshape(-1, self.in_features), weight)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def project(x: Tensor, weight: LinearWeight) -> Tensor:
    """Return x @ weight.T: [T, outputs] in x's dtype. x: [T, inputs]."""
    if uses_small_m(x, weight):
        out: Tensor = _small_m_gemm().gemm_partials(x, weight.values, weight.scale, tiling_of(weight, is_whole=True))[0]
        return out
    return library_gemm(x, weight)


def project_partial(x: Tensor, weight: LinearWeight) -> Tensor:
    """Return x @ weight.T in x's dtype [T, outputs], or as split-K partial sums, float32 [S, T, outputs]."""
    if not uses_small_m(x, weight):
        return library_gemm(x, weight)
    partials: Tensor = _small_m_gemm().gemm_partials(x, weight.values, weight.scale, tiling_of(weight))
    return partials if partials.shape[0] > 1 else partials[0]


def library_gemm(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias from the library: [T, outputs] in x's dtype. x: [T, inputs]."""
    if weight.scale is not None and weight.rounds_inputs:
        return float8.gemm(x, weight.values, weight.scale, bias)
    return linear(x, weight.values if weight.scale is None else weight.dequantized(x.dtype), bias)


def sum_partials(partials: Tensor, like: Tensor) -> Tensor:
    """Reduce the result of `project_partial` to the dimensions and dtype of `like`."""
    return partials if partials.dim() == like.dim() else partials.sum(0).to(like.dtype)


def project_gated(x: Tensor, weight: LinearWeight, activation: Activation = "silu") -> Tensor:
    """Return act(gate) * up: [T, inner]. weight: [2 * inner, inputs], gate first. x: [T, inputs]."""
    is_gelu = activation == "gelu_tanh"
    if uses_small_m(x, weight):
        tiling = tiling_of(weight, is_gated=True)
        out: Tensor = _small_m_gemm().gated_gemm(x, weight.values, weight.scale, tiling, is_gelu=is_gelu)
        return out
    return gated(library_gemm(x, weight), activation)


def gated(pair: Tensor, activation: Activation = "silu") -> Tensor:
    """Return act(gate) * up: [T, inner]. pair: [T, 2 * inner], gate first."""
    if pair.is_cuda and uses_fused_kernels(pair):
        fused: Tensor = elementwise_kernels().gated_activation(pair, is_gelu=activation == "gelu_tanh")
        return fused
    gate, up = pair.chunk(2, dim=-1)
    return activate(gate, activation) * up


def project_gated_down(x: Tensor, weight: LinearWeight, down: LinearWeight, activation: Activation) -> Tensor | None:
    """Return (act(gate) * up) @ down.T of many tokens, where one kernel computes the activation and rounds it.

    weight: [2 * inner, inputs], gate first; down: [outputs, inner]. Returns [T, outputs], or None if other kernels
    compute it: on the CPU, of few tokens, and without rounded inputs.
    """
    if down.scale is None or not down.rounds_inputs or x.dim() != 2 or x.shape[0] <= SMALL_M:
        return None
    if not x.is_cuda or not uses_fused_kernels(x):
        return None
    pair = library_gemm(x, weight)
    rows: tuple[Tensor, Tensor] = elementwise_kernels().gated_rounded(pair, is_gelu=activation == "gelu_tanh")
    return float8.gemm_rounded(rows, down.values, down.scale, x.dtype)


def activate(gate: Tensor, activation: Activation) -> Tensor:
    """Apply the activation of a gate."""
    return gelu(gate, approximate="tanh") if activation == "gelu_tanh" else silu(gate)


def uses_small_m(x: Tensor, weight: LinearWeight) -> bool:
    """Return whether the small-M GEMM computes this product: few rows, half precision, enough shared memory."""
    if not x.is_cuda or not 0 < x.shape[0] <= SMALL_M or not uses_fused_kernels(x):
        return False
    known = (x.dtype, torch.float8_e4m3fn) if weight.scale is not None else (x.dtype,)
    is_aligned = weight.values.is_contiguous() and weight.values.shape[1] % tiling_of(weight).step == 0
    launch = importlib.import_module("mstar_core.layers.kernels.launch")
    return is_aligned and weight.values.dtype in known and bool(launch.has_large_shared_memory(x.device))


def tiling_of(weight: LinearWeight, *, is_whole: bool = False, is_gated: bool = False) -> GemmTiling:
    """Return the tiling of the small-M GEMM. is_whole: no split-K, so that no caller has to reduce.

    The tiling does not depend on the number of rows, so a row's bits do not depend on its batch.
    """
    from mstar_core.layers.kernels.small_m_gemm import GemmTiling

    outputs, inputs = weight.values.shape
    if is_gated and weight.scale is None:
        if outputs < 128 * FEWEST_GATED:
            return GemmTiling(block=64, step=128, stages=6, prefetch_bytes=512)
        return GemmTiling(block=128, step=128, stages=4, prefetch_bytes=512)
    can_split = not is_whole and not is_gated
    splits = max(1, min(round(SPLIT_K_PROGRAMS * 64 / outputs), inputs // 256)) if can_split else 1
    if weight.scale is not None:
        return GemmTiling(block=64, step=128, stages=8, splits=splits, prefetch_bytes=512)
    return GemmTiling(block=64, step=128, stages=3 if splits > 3 else 5, splits=splits)


def uses_fused_kernels(x: Tensor) -> bool:
    """Return whether the elementwise kernels can process this CUDA tensor."""
    return bool(elementwise_kernels().supports(x))


def elementwise_kernels() -> ModuleType:
    """Import the elementwise kernels. They need triton, which comes with CUDA builds of torch."""
    return importlib.import_module("mstar_core.layers.kernels.elementwise")


class PreparedLayer(nn.Module):
    """Layer that is prepared for a GPU once its weights are loaded."""

    @property
    def traced_as(self) -> object:
        """Sizes. Of layers of one type and equal sizes, which launch the same kernels, one is traced."""
        return None

    def first_weight(self) -> Tensor | None:
        """Return a weight that tells its device and dtype; None if it has none."""
        return next(self.parameters(recurse=True), None)

    def fuse_projections(self) -> bool:
        """Fuse its projections into one weight. Returns whether they are fused."""
        return False

    def unfuse(self) -> bool:
        """Drop the fused weight, which `quantize` replaces. Returns whether there was one."""
        return False

    def trace(self) -> None:
        """Launch its kernels for every range of tokens, where they are compiled instead of run."""


class QuantizableLayer(nn.Module):
    """A layer of a plugin whose linear layers `quantize` converts, those of its children included.

    They are called as modules, or read by `weight_of` and `join_with_biases` of this module, which know both kinds.
    A layer that joins them is also a PreparedLayer with `unfuse`. `Attention` and `GatedMLP` need no such base.
    """


def fuse_projections(module: nn.Module) -> int:
    """Call `fuse_projections` of every layer on CUDA in half precision. Return how many fused.

    Called once after loading; on the CPU it changes nothing.
    """
    count = 0
    for layer in module.modules():
        if not isinstance(layer, PreparedLayer):
            continue
        first = layer.first_weight()
        if first is not None and first.is_cuda and first.dtype != torch.float32:
            count += layer.fuse_projections()
    return count


def concatenate_weights(layers: list[nn.Module]) -> LinearWeight | None:
    """Concatenate linear layers into one weight [sum of outputs, inputs]; the layers' own weights become views of it.

    Returns None if a layer has a bias.
    """
    candidates = [weight_of(layer) for layer in layers]
    weights = [weight for weight in candidates if weight is not None]
    return None if len(weights) < len(layers) else _concatenated(layers, weights)


def concatenate_with_biases(layers: Sequence[nn.Module]) -> tuple[LinearWeight, Tensor]:
    """Concatenate linear layers, quantized or not, into one weight and one bias, of which their own become views."""
    weights = [weight for layer in layers if (weight := _weight_beside_bias(layer)) is not None]
    biases = [layer.bias for layer in layers if isinstance(layer.bias, torch.Tensor)]
    assert len(weights) == len(biases) == len(layers), "each layer is linear and has a bias"
    bias = torch.cat([each.detach() for each in biases])
    for own, part in zip(biases, bias.split([len(each) for each in biases]), strict=True):
        own.data = part
    return _concatenated(layers, weights), bias


def _concatenated(layers: Sequence[nn.Module], weights: Sequence[LinearWeight]) -> LinearWeight:
    scales = [weight.scale for weight in weights if weight.scale is not None]
    # As bytes, because not every device concatenates float8.
    values = torch.cat([weight.values.detach().view(torch.uint8) for weight in weights]).view(weights[0].values.dtype)
    scale = torch.cat(scales) if scales else None
    start = 0
    for layer, weight in zip(layers, weights, strict=True):
        end = start + weight.values.shape[0]
        if isinstance(layer, QuantizedLinear) and scale is not None:
            layer.weight, layer.scale = values[start:end], scale[start:end]
        elif isinstance(layer, nn.Linear):
            layer.weight.data = values[start:end]
        start = end
    return LinearWeight(values, scale, all(weight.rounds_inputs for weight in weights))


def join_with_biases(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor]:
    """Join linear layers into one weight and one bias, zero for layers without; their own become views of them."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = torch.cat(
        [
            layer.bias.detach() if layer.bias is not None else layer.weight.new_zeros(layer.out_features)
            for layer in layers
        ]
    )
    outputs = [layer.out_features for layer in layers]
    for layer, part, shift in zip(layers, weight.split(outputs), bias.split(outputs), strict=True):
        layer.weight.data = part
        if layer.bias is not None:
            layer.bias.data = shift
    return weight, bias


def _small_m_gemm() -> ModuleType:
    return importlib.import_module("mstar_core.layers.kernels.small_m_gemm")
