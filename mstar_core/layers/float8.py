"""Products in float8 e4m3: one scale per output of a weight and one per token of its inputs. Used by `linear`.

On CUDA the library's GEMM with scales of rows and columns computes them. Elsewhere the same rounded values are
multiplied in float32: the reference that tests and judges of miniatures run.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import linear

if TYPE_CHECKING:
    from torch import Tensor

LARGEST: Final = 448.0
"""Largest finite value of float8 e4m3."""

LEAST_SCALE: Final = 1e-30
"""Scale of a row of zeros: above zero, so that the row stays zero."""

ALIGNMENT: Final = 16
"""Outputs and inputs of a product on tensor cores are multiples of this number."""

FAST_INPUTS: Final = 4096
"""Most inputs of a product that tensor cores sum by themselves. They keep fewer bits of a sum than float32, which shows
in long ones; those are added up in float32 every 128 inputs."""

CAPABILITY: Final = (9, 0)
"""Least compute capability of a GEMM with scales of rows and columns."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row in float8 e4m3 with its scale, so that its largest value becomes the largest of the dtype.

    x: [T, inputs], any floating dtype. Returns float8 [T, inputs] and float32 [T]. A row does not depend on others.
    """
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous():
        both: tuple[Tensor, Tensor] = _elementwise().round_rows(x)
        return both
    wide = x.float()
    scale = (wide.abs().amax(dim=1) / LARGEST).clamp(min=LEAST_SCALE)
    return (wide / scale[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale


def can_round_inputs(weight: Tensor, step: int = ALIGNMENT) -> bool:
    """Return whether inputs of a product can be rounded. weight: [..., outputs, inputs], before it is quantized.

    A GPU needs bfloat16, sizes that `step` divides, and `CAPABILITY`; its other products dequantize the weight.
    """
    if not weight.is_cuda:
        return True
    is_aligned = all(size % step == 0 for size in weight.shape[-2:])
    return (
        is_aligned and weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device) >= CAPABILITY
    )


def gemm(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ (values * scale).T + bias in x's dtype, [T, outputs], with x rounded by `round_rows`.

    x: [T, inputs]; values: float8 [outputs, inputs]; scale: float32 [outputs].
    """
    return gemm_rounded(round_rows(x), values, scale, x.dtype, bias)


def gemm_rounded(
    rows: tuple[Tensor, Tensor], values: Tensor, scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """Return the same for rows that are rounded already, with their scales, as `round_rows` gives them."""
    rounded, scales = rows
    if rounded.is_cuda:
        out: Tensor = torch._scaled_mm(
            rounded,
            values.t(),
            scale_a=scales[:, None],
            scale_b=scale[None],
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=values.shape[1] <= FAST_INPUTS,
        )
        return out
    product = linear(rounded.float() * scales[:, None], values.float() * scale[:, None])
    return (product if bias is None else product + bias.float()).to(dtype)


def _elementwise() -> ModuleType:
    return importlib.import_module("mstar_core.layers.kernels.elementwise")
