"""Triton kernels of a flow step before and after the transformer blocks. Used on CUDA by `policy`.

In plain torch these are some twenty kernels per step, most of them float32 GEMMs of 32 values. Here a program processes
one token: it reads the small projection from L2, and everything else of its row once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.launch import launch_options
from mstar_pi05.kernels.adaptive_norm import DTYPES, adapted, gated_sum, slices_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_pi05.nodes.flow import TimeTable

WARPS: Final = 8
"""Warps of a program: each thread holds 32 values of a projection tile."""

CHUNK: Final = 8
"""Action values that are projected at a time."""


@triton.jit
def _embed_kernel(
    actions,
    weight,
    bias,
    table,
    places,
    num_steps,
    step,
    positions,
    frequencies,
    x,
    out,
    rows,
    cosine,
    sine,
    steps_stride,
    step_stride,
    most_steps,
    width,
    eps,
    half_width,
    values: tl.constexpr,
    chunk: tl.constexpr,
    block: tl.constexpr,
    half: tl.constexpr,
    overlaps: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    if overlaps:
        # In this order, kernels launched early by this one also see the results of all earlier kernels.
        gdc_wait()
        gdc_launch_dependents()
    steps = tl.load(num_steps + token * steps_stride)
    time = tl.load(places + steps * most_steps + tl.load(step + token * step_stride))
    tl.store(rows + token, time)
    value = tl.load(bias + at, mask=inside, other=0.0)
    for start in tl.static_range(0, values, chunk):
        column = start + tl.arange(0, chunk)
        known = inside[:, None] & (column < values)[None, :]
        tile = tl.load(weight + at[:, None] * values + column[None, :], mask=known, other=0.0)
        given = tl.load(actions + token * values + column, mask=column < values, other=0.0)
        value += tl.sum(tile * given[None, :], axis=1)
    tl.store(x + token * width + at, value, mask=inside)
    normed = adapted(value, table + time * 3 * width, at, inside, width, eps)
    tl.store(out + token * width + at, normed.to(out.dtype.element_ty), mask=inside)
    pair = tl.arange(0, half)
    turns = pair < half_width
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + pair, mask=turns, other=0.0)
    c, s, into = tl.cos(angle), tl.sin(angle), token * 2 * half_width + pair
    tl.store(cosine + into, c, mask=turns)
    tl.store(cosine + half_width + into, c, mask=turns)
    tl.store(sine + into, s, mask=turns)
    tl.store(sine + half_width + into, s, mask=turns)


@triton.jit(do_not_specialize=["number"])
def _head_kernel(
    x,
    branch,
    table,
    rows,
    weight,
    bias,
    actions,
    num_steps,
    scale,
    offset,
    moved,
    robot,
    number,
    times,
    width,
    eps,
    steps_stride,
    parts: tl.constexpr,
    dtype: tl.constexpr,
    values: tl.constexpr,
    chunk: tl.constexpr,
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
    steps = tl.load(num_steps + token * steps_stride).to(tl.float32)
    before = table + ((number - 1) * times + time) * 3 * width + 2 * width
    value = gated_sum(x, branch, before, token, at, inside, width, parts, dtype)
    normed = adapted(value, table + (number * times + time) * 3 * width, at, inside, width, eps)
    for start in tl.static_range(0, values, chunk):
        line = start + tl.arange(0, chunk)
        known = line < values
        tile = tl.load(weight + line[:, None] * width + at[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        velocity = tl.load(bias + line, mask=known, other=0.0) + tl.sum(tile * normed[None, :], axis=1)
        own = token * values + line
        value_at = tl.load(actions + own, mask=known, other=0.0) + velocity * (-1.0 / steps)
        tl.store(moved + own, value_at, mask=known)
        factor = tl.load(scale + own, mask=known, other=0.0)
        tl.store(robot + own, tl.load(offset + own, mask=known, other=0.0) + value_at * factor, mask=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Inputs of a flow step. actions, scale, offset: float32 [T, 32]; step, num_steps: int64 [T], possibly expanded
    from one value.
    """

    actions: Tensor
    scale: Tensor
    offset: Tensor
    step: Tensor
    num_steps: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """Weights of both kernels. into, out_of: float32 projections of actions and of velocities.

    frequencies: float32 [head_dim / 2]; eps: of the norms; dtype: compute dtype of the blocks.
    """

    into: nn.Linear
    out_of: nn.Linear
    table: TimeTable
    frequencies: Tensor
    eps: float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedStep:
    """Inputs of the first block. x: float32 [T, width]; normed: its first norm; rows: int64 [T], rows of the time
    table; rotation: cosine and sine, float32 [T, 1, head_dim].
    """

    x: Tensor
    normed: Tensor
    rows: Tensor
    rotation: tuple[Tensor, Tensor]


def embed(weights: StepWeights, inputs: StepInputs, positions: Tensor) -> EmbeddedStep:
    """Compute rows of the time table, rotary angles, projected actions and their first norm. positions: int64 [T]."""
    actions, width, device = inputs.actions.contiguous(), weights.into.out_features, inputs.actions.device
    tokens, values, half = *actions.shape, len(weights.frequencies)
    x = torch.empty((tokens, width), dtype=torch.float32, device=device)
    normed, rows = torch.empty_like(x, dtype=weights.dtype), torch.empty(tokens, dtype=torch.int64, device=device)
    cosine, sine = torch.empty((2, tokens, 1, 2 * half), dtype=torch.float32, device=device).unbind()
    table = weights.table
    _embed_kernel[(tokens,)](
        actions,
        weights.into.weight,
        weights.into.bias,
        table.modulations,
        table.rows,
        inputs.num_steps,
        inputs.step,
        positions.contiguous(),
        weights.frequencies,
        x,
        normed,
        rows,
        cosine,
        sine,
        inputs.num_steps.stride(0),
        inputs.step.stride(0),
        table.rows.shape[1],
        width,
        weights.eps,
        half,
        values=values,
        chunk=CHUNK,
        block=triton.next_power_of_2(width),
        half=triton.next_power_of_2(half),
        num_warps=WARPS,
        **launch_options(device),
    )
    return EmbeddedStep(x=x, normed=normed, rows=rows, rotation=(cosine, sine))


def head(weights: StepWeights, inputs: StepInputs, rows: Tensor, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the last gated sum, its norm, the velocity, and actions - velocity / num_steps.

    rows: int64 [T], rows of the time table; x: float32 [T, width]; branch: [T, width], or slices to be summed [S, T,
    width]. Returns the actions, and actions * scale + offset: float32 [T, 32] each.
    """
    actions, scale, offset = (value.contiguous() for value in (inputs.actions, inputs.scale, inputs.offset))
    moved, robot, (tokens, width) = torch.empty_like(actions), torch.empty_like(actions), x.shape
    table = weights.table.modulations
    _head_kernel[(tokens,)](
        x,
        branch,
        table,
        rows,
        weights.out_of.weight,
        weights.out_of.bias,
        actions,
        inputs.num_steps,
        scale,
        offset,
        moved,
        robot,
        len(table) - 1,
        table.shape[1],
        width,
        weights.eps,
        inputs.num_steps.stride(0),
        parts=slices_of(branch),
        dtype=DTYPES[weights.dtype],
        values=actions.shape[1],
        chunk=CHUNK,
        block=triton.next_power_of_2(width),
        num_warps=WARPS,
        **launch_options(x.device),
    )
    return moved, robot
