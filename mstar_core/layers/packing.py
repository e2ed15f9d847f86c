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


def join(linears: list[nn.Linear]) -> Tensor | None:
    """One weight [sum of outputs, inputs] of several linears, whose own weights become views of it.

    None where one of them has a bias.
    """
    if any(linear.bias is not None for linear in linears):
        return None
    joined = torch.cat([linear.weight.detach() for linear in linears])
    start = 0
    for linear in linears:
        linear.weight.data = joined[start : start + linear.out_features]
        start += linear.out_features
    return joined
