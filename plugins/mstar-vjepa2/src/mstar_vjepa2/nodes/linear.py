"""Linear layers of the blocks, and pending branches of the residual stream. Used by `blocks` and `ac_predictor`.

On CUDA in half precision, GEMMs of one frame run in own kernels: `multicast_gemm` on Hopper, otherwise `gemm`. cuBLAS
computes the others.
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
"""Maximum rows of the own kernels: those of one frame. cuBLAS is faster with more."""

SWITCH: Final = "MSTAR_MULTICAST"
"""Environment variable that disables the `multicast_gemm` kernels: `0`."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Addend of the residual stream: values [..., width], or float32 split-K slices [S, ..., width], and a bias."""

    values: Tensor
    bias: Tensor | None = None

    def added(self, x: Tensor) -> Tensor:
        """Return x plus the branch. x: [..., width]."""
        values = self.values if self.values.dim() == x.dim() else self.values.sum(0)
        return x + (values if self.bias is None else values + self.bias).to(x.dtype)


def linear(x: Tensor, layer: nn.Linear, act: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return act(layer(x)), [..., outputs]. x: [..., inputs]."""
    is_gelu = act is functional.gelu
    if is_small(x, layer) and (act is None or is_gelu):
        few: Tensor = _kernels(x, layer).linear(x, layer.weight, layer.bias, is_gelu=is_gelu)
        return few
    out: Tensor = layer(x)
    return out if act is None else act(out)


def linear_into(out: Tensor, x: Tensor, layer: nn.Linear) -> None:
    """Write layer(x) into `out`, which may be a view. x: [..., inputs]; out: [..., outputs]."""
    if is_small(x, layer) and out.is_contiguous():
        _kernels(x, layer).linear(x, layer.weight, layer.bias, out=out)
    else:
        out.copy_(layer(x))


def qkv_rotary(x: Tensor, layer: nn.Linear, rotation: Rotation, heads: int, target: tuple[Tensor, Tensor]) -> Tensor:
    """Project x, apply the rotary embedding, and append keys and values. Returns queries [T, heads, head_dim].

    x: [T, inputs] on CUDA; target: KV pool and slots of a layer, as `PlacedView.places` returns them.
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
    """Return layer(x) as a branch, before split-K slices and bias are added. x: [..., inputs]."""
    if is_small(x, layer):
        return Branch(_kernels(x, layer).split_k(x, layer.weight), layer.bias)
    return Branch(layer(x))


def is_small(x: Tensor, layer: nn.Linear) -> bool:
    """Whether the `gemm` kernels compute this product."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or not x.is_contiguous():
        return False
    return 0 < x.numel() // x.shape[-1] <= MAX_ROWS and bool(_gemm_kernels().supports(layer.weight))


def _kernels(x: Tensor, layer: nn.Linear) -> ModuleType:
    """Return the `multicast_gemm` kernels if they support this product, else the `gemm` kernels."""
    module = _multicast_kernels()
    return module if module is not None and module.supports(x, layer.weight) else _gemm_kernels()


@cache
def _multicast_kernels() -> ModuleType | None:
    """Import the multicast kernels. None if the environment disables them or an import is missing."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        return importlib.import_module("mstar_vjepa2.kernels.multicast_gemm")
    except ImportError as error:
        log.info("multicast GEMM kernels are not available: %s", error)
        return None


def _gemm_kernels() -> ModuleType:
    """Import the Triton kernels. Triton comes with CUDA builds of torch only."""
    return importlib.import_module("mstar_vjepa2.kernels.gemm")
