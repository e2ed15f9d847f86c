"""Prepares layers for CUDA: projections of one input become one matrix, and fused kernels take over where they apply.

`pack` is called by the worker once the weights are loaded; on the CPU it is not called and nothing changes.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.layers.matrix import Matrix


def is_fused(x: Tensor) -> bool:
    """Whether the fused kernels take this CUDA tensor."""
    return bool(kernels().applies(x))


def kernels() -> ModuleType:
    """The fused kernels; importing them needs triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_core.layers.fused")


def pack(module: nn.Module) -> int:
    """Join the weights of every layer that offers it (`pack`), in half precision on CUDA. Returns how many did."""
    packed = 0
    for layer in module.modules():
        joins = getattr(layer, "pack", None)
        first = next(layer.parameters(recurse=True), None)
        if callable(joins) and first is not None and first.is_cuda and first.dtype != torch.float32:
            packed += bool(joins())
    return packed


def join(linears: list[nn.Module]) -> Matrix | None:
    """One matrix [sum of outputs, inputs] of several linear layers, whose own weights become views of it.

    None where one of them has a bias.
    """
    from mstar_core.layers.matrix import Matrix, QuantizedLinear, matrix_of

    found = [matrix_of(linear) for linear in linears]
    whole = [matrix for matrix in found if matrix is not None]
    if len(whole) < len(linears):
        return None
    scales = [matrix.scale for matrix in whole if matrix.scale is not None]
    # Joined as bytes: not every device concatenates float8.
    values = torch.cat([matrix.values.detach().view(torch.uint8) for matrix in whole]).view(whole[0].values.dtype)
    scale = torch.cat(scales) if scales else None
    start = 0
    for linear, matrix in zip(linears, whole, strict=True):
        end = start + matrix.values.shape[0]
        if isinstance(linear, QuantizedLinear) and scale is not None:
            linear.weight, linear.scale = values[start:end], scale[start:end]
        else:
            linear.weight.data = values[start:end]
        start = end
    return Matrix(values, scale)
