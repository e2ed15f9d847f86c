"""Triton kernels of a flow step: gated sums with their adaptive norm, and the step's end. Used by `expert` and `policy`
on CUDA; importing it needs triton.

In plain torch a norm with its gate is some fifteen passes over 200 kB: 1.7 us of launch each, 37 norms a step. What a
norm reads of the flow's time is taken from the table inside of the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.fused import launch, summed_slices, warps

if TYPE_CHECKING:
    from torch import Tensor

Dtypes = tuple[torch.dtype, torch.dtype]

_DTYPES: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["number"])
def _modulate_kernel(
    x, branch, table, rows, summed, out, number, times, width, eps,
    parts: tl.constexpr, dtype: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    time = tl.load(rows + token)
    value = tl.load(x + token * width + at, mask=inside, other=0.0)
    if parts > 0:
        # The gate of a branch comes with the norm in front of it: scale, shift, gate.
        before = table + ((number - 1) * times + time) * 3 * width + 2 * width
        gate = tl.load(before + at, mask=inside, other=0.0)
        stride = tl.num_programs(0).to(tl.int64) * width
        value += gate * summed_slices(branch + token * width, stride, at, inside, parts, dtype)
        tl.store(summed + token * width + at, value, mask=inside)
    own = table + (number * times + time) * 3 * width
    scale = tl.load(own + at, mask=inside, other=0.0)
    shift = tl.load(own + width + at, mask=inside, other=0.0)
    scaled = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    tl.store(out + token * width + at, (scaled * (1.0 + scale) + shift).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _land_kernel(
    actions, velocity, num_steps, stride, scale, offset, moved, robot, size, width,
    block: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < size
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    steps = tl.load(num_steps + at // width * stride, mask=inside, other=1).to(tl.float32)
    value = tl.load(actions + at, mask=inside, other=0.0)
    value += tl.load(velocity + at, mask=inside, other=0.0) * (-1.0 / steps)
    tl.store(moved + at, value, mask=inside)
    factor = tl.load(scale + at, mask=inside, other=0.0)
    tl.store(robot + at, tl.load(offset + at, mask=inside, other=0.0) + value * factor, mask=inside)


def modulate(
    x: Tensor, branch: Tensor | None, modulations: Tensor, number: int, rows: Tensor, eps: float, dtypes: Dtypes
) -> tuple[Tensor, Tensor]:
    """x + gate * branch, and its adaptive norm. All are contiguous; without a branch the sum is x itself.

    x: float32 [T, width]; branch: [T, width], or slices to be summed [S, T, width]. modulations: float32
    [norms, times, 3 * width]; rows: int64 [T], times. The norm is that of `number`, the gate that of the norm before.
    dtypes: what the branch is rounded to once it is summed, and what the norm is made in. Returns float32 [T, width]
    and the norm [T, width].
    """
    tokens, width = x.shape
    inner, outer = dtypes
    out = torch.empty(x.shape, dtype=outer, device=x.device)
    parts = 0 if branch is None else branch.shape[0] if branch.dim() == 3 else 1
    summed = x if branch is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _modulate_kernel[(tokens,)](
        x, x if branch is None else branch, modulations, rows, summed, out, number, modulations.shape[1], width, eps,
        parts=parts, dtype=_DTYPES[inner], block=block, num_warps=warps(block), **launch(x.device),
    )  # fmt: skip
    return summed, out


def land(actions: Tensor, velocity: Tensor, num_steps: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The end of a step: actions - velocity / num_steps, and that times scale plus offset.

    actions, velocity, scale, offset: float32 [T, 32]; num_steps: int64 [T], one value for many where that is how it
    came. Returns float32 [T, 32] twice.
    """
    actions, velocity, scale, offset = (value.contiguous() for value in (actions, velocity, scale, offset))
    moved, robot, block = torch.empty_like(actions), torch.empty_like(actions), 1024
    _land_kernel[(triton.cdiv(actions.numel(), block),)](
        actions, velocity, num_steps, num_steps.stride(0), scale, offset, moved, robot, actions.numel(),
        actions.shape[1], block=block, **launch(actions.device),
    )  # fmt: skip
    return moved, robot
