"""Linear layers of the blocks, and what is left of one for the sum behind it. Used by `blocks` and `pooler`.

On CUDA in half precision own kernels take the products of one frame, those of `multicast_gemm` on Hopper and else those
of `gemm`; the library takes others.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_vjepa2.nodes.rotary import Rotation

log = logging.getLogger(__name__)

MAX_ROWS: Final = 300
"""Rows up to which own kernels win: those of one frame."""

SWITCH: Final = "MSTAR_MULTICAST"
"""Environment variable that turns the kernels of `multicast_gemm` off: `0`."""


@dataclass(frozen=True, slots=True)
class Branch:
    """What a residual layer adds: values [..., width], or float32 slices of them [S, ..., width], and a bias."""

    values: Tensor
    bias: Tensor | None = None

    def added(self, x: Tensor) -> Tensor:
        """x with it. x: [..., width]."""
        values = self.values if self.values.dim() == x.dim() else self.values.sum(0)
        return x + (values if self.bias is None else values + self.bias).to(x.dtype)


def linear(x: Tensor, layer: nn.Linear, act: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """act(layer(x)). x: [..., inputs]. Returns [..., outputs]."""
    is_gelu = act is functional.gelu
    if is_small(x, layer) and (act is None or is_gelu):
        few: Tensor = _kernels(x, layer).linear(x, layer.weight, layer.bias, is_gelu=is_gelu)
        return few
    out: Tensor = layer(x)
    return out if act is None else act(out)


def linear_into(out: Tensor, x: Tensor, layer: nn.Linear) -> None:
    """Write layer(x) into a part of something larger. x: [..., inputs]; out: [..., outputs]."""
    if is_small(x, layer) and out.is_contiguous():
        _kernels(x, layer).linear(x, layer.weight, layer.bias, out=out)
    else:
        out.copy_(layer(x))


def qkv_rotary(x: Tensor, layer: nn.Linear, rotation: Rotation, heads: int, target: tuple[Tensor, Tensor]) -> Tensor:
    """Turned queries of joined projections [T, heads, head_dim]; keys, turned, and values go to their places.

    x: [T, inputs] on CUDA; target: a layer's pool and places, as `PlacedView.places` gives them.
    """
    lanes = rotation[0].shape[-1]
    for kernels in (_kernels(x, layer), _gemm_kernels()) if is_small(x, layer) else ():
        if kernels.can_rotate(layer.weight, target[0], lanes):
            few: Tensor = kernels.qkv_rotary(x, layer.weight, layer.bias, rotation, *target)
            return few
    apart: Tensor = importlib.import_module("mstar_vjepa2.kernels.rotary").rotate_append(
        *target, layer(x), rotation, heads
    )
    return apart


def branch_of(x: Tensor, layer: nn.Linear) -> Branch:
    """layer(x), as far as it is computed before the sum. x: [..., inputs]."""
    if is_small(x, layer):
        return Branch(_kernels(x, layer).split_k(x, layer.weight), layer.bias)
    return Branch(layer(x))


def is_small(x: Tensor, layer: nn.Linear) -> bool:
    """Whether the kernels of `gemm` take this product."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous():
        return False
    return 0 < x.numel() // x.shape[-1] <= MAX_ROWS and bool(_gemm_kernels().supports(layer.weight))


def _kernels(x: Tensor, layer: nn.Linear) -> ModuleType:
    """Those of `multicast_gemm` where they run, for whole frames on Hopper; else those of `gemm`."""
    found = _multicast_kernels()
    return found if found is not None and found.supports(x, layer.weight) else _gemm_kernels()


@cache
def _multicast_kernels() -> ModuleType | None:
    """The kernels whose tiles are multicast, where the environment leaves them on and what they import is there."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        return importlib.import_module("mstar_vjepa2.kernels.multicast_gemm")
    except ImportError as error:
        log.info("products go without multicast: %s", error)
        return None


def _gemm_kernels() -> ModuleType:
    """The kernels; importing them needs triton, which only a CUDA build of torch brings."""
    return importlib.import_module("mstar_vjepa2.kernels.gemm")
