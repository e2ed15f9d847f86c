"""Triton kernels of a flow step's gated sums and adaptive norms. Used on CUDA by `expert` and `embed_head`.

In plain torch, a norm with its gate is some fifteen launches of 1.7 us, and a step has 37 norms. The kernel reads
scale, shift and gate from the time table itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.elementwise import sum_partials
from mstar_core.layers.kernels.launch import launch_options, warps_for

if TYPE_CHECKING:
    from torch import Tensor

Dtypes = tuple[torch.dtype, torch.dtype]

DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def gated_sum(x, branch, gates, token, at, inside, width, parts: tl.constexpr, dtype: tl.constexpr):
    """Return x + gate * branch in float32. The branch's slices are summed and rounded to dtype. gates:
    those of one norm.
    """
    value = tl.load(x + token * width + at, mask=inside, other=0.0)
    gate = tl.load(gates + at, mask=inside, other=0.0)
    stride = tl.num_programs(0).to(tl.int64) * width
    return value + gate * sum_partials(branch + token * width, stride, at, inside, parts, dtype)


@triton.jit
def adapted(value, own, at, inside, width, eps):
    """Return the adaptive norm of a row in float32. own: scale, then shift, of this norm and time."""
    scale = tl.load(own + at, mask=inside, other=0.0)
    shift = tl.load(own + width + at, mask=inside, other=0.0)
    scaled = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    return scaled * (1.0 + scale) + shift


@triton.jit(do_not_specialize=["number"])
def _modulate_kernel(
    x,
    branch,
    table,
    rows,
    summed,
    out,
    number,
    times,
    width,
    eps,
    parts: tl.constexpr,
    dtype: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    time = tl.load(rows + token)
    if parts > 0:
        # A branch is multiplied by the gate of the norm before it. Layout: scale, shift, gate.
        before = table + ((number - 1) * times + time) * 3 * width + 2 * width
        value = gated_sum(x, branch, before, token, at, inside, width, parts, dtype)
        tl.store(summed + token * width + at, value, mask=inside)
    else:
        value = tl.load(x + token * width + at, mask=inside, other=0.0)
    normed = adapted(value, table + (number * times + time) * 3 * width, at, inside, width, eps)
    tl.store(out + token * width + at, normed.to(out.dtype.element_ty), mask=inside)


def modulate(
    x: Tensor, branch: Tensor | None, modulations: Tensor, number: int, rows: Tensor, eps: float, dtypes: Dtypes
) -> tuple[Tensor, Tensor]:
    """Return x + gate * branch, and its adaptive norm. Tensors are contiguous; without a branch the sum is
    x itself.

    x: float32 [T, width]; branch: [T, width], or slices to be summed [S, T, width]. modulations: float32 [norms, times,
    3 * width]; rows: int64 [T], times. number: index of the norm; the gate is that of the norm before. dtypes: of the
    summed branch, and of the norm. Returns float32 [T, width] and the norm [T, width].
    """
    tokens, width = x.shape
    inner, outer = dtypes
    out = torch.empty(x.shape, dtype=outer, device=x.device)
    summed = x if branch is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _modulate_kernel[(tokens,)](
        x,
        x if branch is None else branch,
        modulations,
        rows,
        summed,
        out,
        number,
        modulations.shape[1],
        width,
        eps,
        parts=0 if branch is None else slices_of(branch),
        dtype=DTYPES[inner],
        block=block,
        num_warps=warps_for(block, tokens),
        **launch_options(x.device),
    )
    return summed, out


def slices_of(branch: Tensor) -> int:
    """Return the number of slices of a branch: 1 for [T, width], S for [S, T, width]."""
    return branch.shape[0] if branch.dim() == 3 else 1
