"""The weights of linear layers and how they are multiplied: few rows by `skinny`, more by the library. Used by layers.

Which kernel runs depends on the shape and the number of rows alone, so an eager step and a captured one agree.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import nn
from torch.nn.functional import gelu, linear, silu

from mstar_core.layers.packing import kernels

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.skinny import Shape

FEW_ROWS: Final = 64
"""Up to this many rows the skinny kernels are at least as fast as cuBLAS: bench/results/gpu/linear_h100.json."""

FEWEST_GATED: Final = 100
"""Programs below which a gated matrix is cut into blocks of half the size, so that they fill an H100."""

Activation = Literal["silu", "gelu_tanh"]
"""What opens a gate."""

SLICED_PROGRAMS: Final = 210
"""Programs that a matrix with few outputs is cut into, along its inputs: 1.6 for each of an H100's multiprocessors."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights of a linear layer without bias. Owned by the layer.

    values: [outputs, inputs], a floating dtype, or float8_e4m3fn with scale: float32 [outputs].
    """

    values: Tensor
    scale: Tensor | None = None

    def after(self, first: int) -> Matrix:
        """The same for the outputs from `first` on."""
        return Matrix(self.values[first:], None if self.scale is None else self.scale[first:])

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The weights as a matrix of this dtype."""
        if self.scale is None:
            return self.values.to(dtype)
        if self.values.is_cuda and dtype in (torch.bfloat16, torch.float16):
            found: Tensor = kernels().widen(self.values, self.scale, dtype)
            return found
        return (self.values.float() * self.scale[:, None]).to(dtype)


def matrix_of(layer: nn.Module) -> Matrix | None:
    """The weights of a linear layer, quantised or not; None where it has a bias or is something else."""
    bias: Tensor | None = layer.bias if isinstance(layer, QuantizedLinear | nn.Linear) else None
    if bias is not None:
        return None
    if isinstance(layer, QuantizedLinear):
        return Matrix(layer.weight, layer.scale)
    return Matrix(layer.weight) if isinstance(layer, nn.Linear) else None


class QuantizedLinear(nn.Module):
    """A linear layer whose weights are float8 e4m3 with one float32 scale per output. Made by `quantize`."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., inputs]. Returns [..., outputs] in x's dtype."""
        out = project(x.reshape(-1, self.in_features), Matrix(self.weight, self.scale))
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def project(x: Tensor, matrix: Matrix) -> Tensor:
    """x @ matrix.T. x: [T, inputs]. Returns [T, outputs] in x's dtype."""
    if is_few(x, matrix):
        whole: Tensor = _skinny().parts(x, matrix.values, matrix.scale, shape_of(matrix, whole=True))[0]
        return whole
    return _many(x, matrix)


def parts(x: Tensor, matrix: Matrix) -> Tensor:
    """The same for a reader that sums: x's dtype [T, outputs], or slices to be summed, float32 [S, T, outputs]."""
    if not is_few(x, matrix):
        return _many(x, matrix)
    found: Tensor = _skinny().parts(x, matrix.values, matrix.scale, shape_of(matrix))
    return found if found.shape[0] > 1 else found[0]


def summed(found: Tensor, like: Tensor) -> Tensor:
    """What `parts` gave for a product of `like`, as one tensor of as many dimensions and of its dtype."""
    return found if found.dim() == like.dim() else found.sum(0).to(like.dtype)


def gated(x: Tensor, matrix: Matrix, activation: Activation = "silu") -> Tensor:
    """act(gate) * up of one matrix [2 * inner, inputs], gate first. x: [T, inputs]. Returns [T, inner]."""
    is_gelu = activation == "gelu_tanh"
    if is_few(x, matrix):
        shape = shape_of(matrix, is_gated=True)
        few: Tensor = _skinny().gated(x, matrix.values, matrix.scale, shape, is_gelu=is_gelu)
        return few
    pair = _many(x, matrix)
    if pair.is_cuda and kernels().applies(pair):
        fused: Tensor = kernels().gated(pair, is_gelu=is_gelu)
        return fused
    gate, up = pair.chunk(2, dim=-1)
    return opened(gate, activation) * up


def opened(gate: Tensor, activation: Activation) -> Tensor:
    """The activation of a gate."""
    return gelu(gate, approximate="tanh") if activation == "gelu_tanh" else silu(gate)


def is_few(x: Tensor, matrix: Matrix) -> bool:
    """Whether the skinny kernels take this product: few rows in half precision on a GPU that holds their tiles."""
    if not x.is_cuda or not 0 < x.shape[0] <= FEW_ROWS or not kernels().applies(x):
        return False
    known = (x.dtype, torch.float8_e4m3fn) if matrix.scale is not None else (x.dtype,)
    aligned = matrix.values.is_contiguous() and matrix.values.shape[1] % shape_of(matrix).step == 0
    return aligned and matrix.values.dtype in known and bool(kernels().holds_tiles(x.device))


def shape_of(matrix: Matrix, *, whole: bool = False, is_gated: bool = False) -> Shape:
    """How the skinny kernels cut this matrix. whole: not along its inputs, whose slices somebody would have to sum.

    Rows do not matter, so that a row's bits do not depend on how many share its batch.
    """
    from mstar_core.layers.skinny import Shape

    outputs, inputs = matrix.values.shape
    if is_gated and matrix.scale is None:
        if outputs < 128 * FEWEST_GATED:
            return Shape(block=64, step=128, stages=6, ahead_bytes=512)
        return Shape(block=128, step=128, stages=4, ahead_bytes=512)
    splits = 1 if whole or is_gated else max(1, min(round(SLICED_PROGRAMS * 64 / outputs), inputs // 256))
    if matrix.scale is not None:
        return Shape(block=64, step=128, stages=8, splits=splits, ahead_bytes=512)
    return Shape(block=64, step=128, stages=3 if splits > 3 else 5, splits=splits)


def _many(x: Tensor, matrix: Matrix) -> Tensor:
    if matrix.scale is None:
        return linear(x, matrix.values)
    return linear(x, matrix.wide(x.dtype))


def _skinny() -> ModuleType:
    """The kernels; importing them needs triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_core.layers.skinny")
