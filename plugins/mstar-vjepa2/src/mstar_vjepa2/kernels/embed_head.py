"""Triton kernels before the first block of a frame and after the last. Used on CUDA by `ac_predictor` and `encoder`.

Small kernels run one after the other between two frames of a rollout. Independent work is fused into one kernel:
conditions, angles, the frame in the dtype of the GEMMs, and the next pose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.launch import launch_options, supports_pdl, warps_for
from mstar_vjepa2.kernels.rotary import angles_of
from mstar_vjepa2.nodes.poses import POLE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_vjepa2.nodes.rotary import Rotary3D, Rotation

WIDE: Final = 128
"""Outputs of a condition per program."""

_POLE: Final = tl.constexpr(POLE)


@triton.jit
def _condition(pose, values, weight, bias, out, to, width, padded: tl.constexpr, wide: tl.constexpr):
    """Compute some outputs of a float32 layer with few inputs."""
    lane = to + tl.arange(0, wide)
    at = tl.arange(0, padded)
    given = tl.load(pose + at, mask=at < values, other=0.0)
    known = (lane < width)[:, None] & (at < values)[None, :]
    part = tl.load(weight + lane[:, None] * values + at[None, :], mask=known, other=0.0)
    total = tl.sum(part * given[None, :], axis=1) + tl.load(bias + lane, mask=lane < width, other=0.0)
    tl.store(out + lane, total.to(out.dtype.element_ty), mask=lane < width)


@triton.jit
def _at(values, lane, number: tl.constexpr):
    """Select one of eight numbers."""
    return tl.sum(tl.where(lane == number, values, 0.0), axis=0)


@triton.jit
def _first_rows(cos, sin, lane, start: tl.constexpr):
    """Return Rz(c) Ry(b) Rx(a) in row order, for three angles whose cosines and sines start at lane `start`."""
    ca, cb, cc = _at(cos, lane, start), _at(cos, lane, start + 1), _at(cos, lane, start + 2)
    sa, sb, sc = _at(sin, lane, start), _at(sin, lane, start + 1), _at(sin, lane, start + 2)
    return (
        cc * cb,
        cc * sb * sa - sc * ca,
        cc * sb * ca + sc * sa,
        sc * cb,
        sc * sb * sa + cc * ca,
        sc * sb * ca - cc * sa,
        -sb,
        cb * sa,
        cb * ca,
    )


@triton.jit
def _move(state, action, following):
    """Compute `poses.moved` of one sequence in float64. The angles share lanes because trigonometric code is long."""
    lane = tl.arange(0, 8)
    inside = lane < 7
    start = tl.load(state + lane, mask=inside, other=0.0).to(tl.float64)
    change = tl.load(action + lane, mask=inside, other=0.0).to(tl.float64)
    known = lane % 4 < 3
    turning = tl.load(action + 3 + lane % 4, mask=known & (lane < 4), other=0.0)
    turning += tl.load(state + 3 + lane % 4, mask=known & (lane >= 4), other=0.0)
    angle = turning.to(tl.float64)
    cos, sin = tl.cos(angle), tl.sin(angle)
    l00, l01, l02, l10, l11, l12, l20, l21, l22 = _first_rows(cos, sin, lane, 0)
    r00, r01, r02, r10, r11, r12, r20, r21, r22 = _first_rows(cos, sin, lane, 4)
    t00 = l00 * r00 + l01 * r10 + l02 * r20
    t10 = l10 * r00 + l11 * r10 + l12 * r20
    t20 = l20 * r00 + l21 * r10 + l22 * r20
    t11 = l10 * r01 + l11 * r11 + l12 * r21
    t21 = l20 * r01 + l21 * r11 + l22 * r21
    t12 = l10 * r02 + l11 * r12 + l12 * r22
    t22 = l20 * r02 + l21 * r12 + l22 * r22
    cosine = tl.sqrt(t00 * t00 + t10 * t10)
    is_pole = cosine < _POLE
    above = tl.where(lane == 3, tl.where(is_pole, -t12, t21), tl.where(lane == 4, -t20, tl.where(is_pole, 0.0, t10)))
    beside = tl.where(lane == 3, tl.where(is_pole, t11, t22), tl.where(lane == 4, cosine, tl.where(is_pole, 1.0, t00)))
    moved = tl.where((lane >= 3) & (lane < 6), libdevice.atan2(above, beside), start + change)
    moved = tl.where(lane == 6, tl.minimum(tl.maximum(moved, 0.0), 1.0), moved)
    tl.store(following + lane, moved.to(following.dtype.element_ty), mask=inside)


# racecheck: sums over few inputs are kept by several threads, which write the same value to the same place.
@triton.jit
def _embed_frame_kernel(
    latents,
    action,
    state,
    camera,
    action_stride,
    state_stride,
    camera_stride,
    action_weight,
    action_bias,
    state_weight,
    state_bias,
    camera_weight,
    camera_bias,
    time,
    row_ids,
    column_ids,
    frequencies,
    x,
    given,
    cosine,
    sine,
    following,
    tokens,
    width,
    inner,
    half,
    head_dim,
    conditions: tl.constexpr,
    poses: tl.constexpr,
    cameras: tl.constexpr,
    padded: tl.constexpr,
    wide: tl.constexpr,
    block: tl.constexpr,
    lanes: tl.constexpr,
    is_rounded: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute part of a condition of a sequence, its next pose, or one of its tokens, per program.

    The kernel lets the next one launch early but does not launch early itself. Thus everything that earlier frames
    appended is visible to later kernels, which may read those pages before they wait (see StaticAttention).
    """
    if overlaps:
        gdc_launch_dependents()
    tiles = tl.cdiv(width, wide)
    parts = conditions * tiles + 1
    row = (tl.program_id(0) // (parts + tokens)).to(tl.int64)
    part = tl.program_id(0) % (parts + tokens)
    if part < conditions * tiles:
        number = part // tiles
        to = part % tiles * wide
        into = x + (row * tokens + number) * width
        if number == 0:
            pose = action + row * action_stride
            _condition(pose, poses, action_weight, action_bias, into, to, width, padded, wide)
        elif number == 1:
            pose = state + row * state_stride
            _condition(pose, poses, state_weight, state_bias, into, to, width, padded, wide)
        else:
            pose = camera + row * camera_stride
            _condition(pose, cameras, camera_weight, camera_bias, into, to, width, padded, wide)
    elif part == conditions * tiles:
        _move(state + row * state_stride, action + row * action_stride, following + row * poses)
    else:
        token = part - parts
        own = row * tokens + token
        angle = angles_of(time + own, row_ids + token, column_ids + token, frequencies, half, lanes)
        lane = tl.arange(0, lanes)
        tl.store(cosine + own * head_dim + lane, tl.cos(angle), mask=lane < head_dim)
        tl.store(sine + own * head_dim + lane, tl.sin(angle), mask=lane < head_dim)
        if is_rounded:
            if token >= conditions:
                at = (row * (tokens - conditions) + token - conditions) * inner + tl.arange(0, block)
                inside = tl.arange(0, block) < inner
                value = tl.load(latents + at, mask=inside, other=0.0)
                tl.store(given + at, value.to(given.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedFrame:
    """Inputs of the first block. x: [R, T, P], with the conditions filled in; given: latents [R, S, width] in its
    dtype; rotation: of all tokens, as from `Rotary3D`; next_state: [R, 7].
    """

    x: Tensor
    given: Tensor
    rotation: Rotation
    next_state: Tensor


def embed_frame(
    latents: Tensor,
    conditions: Sequence[tuple[nn.Linear, Tensor]],
    positions: Tensor,
    places: tuple[Tensor, Tensor],
    rotary: Rotary3D,
    dtype: torch.dtype,
) -> EmbeddedFrame:
    """Embed a frame of each sequence.

    latents: float32 [R, S, width]; conditions: float32 layers with their inputs, float32 [R, inputs]: action, state,
    and the camera if used; positions: int64 [R * T]; places: row and column of each token, int64 [T].
    """
    rows, patches, inner = latents.shape
    (to_action, action), (to_state, state) = conditions[:2]
    to_camera, camera = conditions[-1]
    width, tokens, head_dim = to_action.out_features, patches + len(conditions), rotary.head_dim
    x = torch.empty((rows, tokens, width), dtype=dtype, device=latents.device)
    latents = latents.contiguous()
    rounded = latents if latents.dtype == dtype else torch.empty(latents.shape, dtype=dtype, device=latents.device)
    cosine, sine = torch.empty((2, rows * tokens, 1, head_dim), dtype=torch.float32, device=latents.device).unbind()
    following = torch.empty((rows, state.shape[1]), dtype=torch.float32, device=latents.device)
    frequencies = rotary.frequencies.float()
    parts = len(conditions) * triton.cdiv(width, WIDE) + 1
    _embed_frame_kernel[(rows * (parts + tokens),)](
        latents,
        action,
        state,
        camera,
        action.stride(0),
        state.stride(0),
        camera.stride(0),
        to_action.weight,
        to_action.bias,
        to_state.weight,
        to_state.bias,
        to_camera.weight,
        to_camera.bias,
        positions,
        *places,
        frequencies,
        x,
        rounded,
        cosine,
        sine,
        following,
        tokens,
        width,
        inner,
        len(frequencies),
        head_dim,
        conditions=len(conditions),
        poses=state.shape[1],
        cameras=camera.shape[1],
        padded=8,
        wide=WIDE,
        block=triton.next_power_of_2(inner),
        lanes=triton.next_power_of_2(head_dim),
        is_rounded=rounded is not latents,
        overlaps=supports_pdl(latents.device),
        num_warps=4,
    )
    return EmbeddedFrame(x=x, given=rounded, rotation=(cosine, sine), next_state=following)


@triton.jit
def _latents_kernel(
    values,
    bias,
    wanted,
    out,
    wanted_stride,
    part_stride,
    tokens,
    first,
    kept,
    width,
    eps,
    parts: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    own = tl.program_id(0).to(tl.int64)
    row = own // kept
    at = tl.arange(0, block)
    inside = at < width
    value = tl.zeros((block,), tl.float32)
    if has_bias:
        value = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    source = values + (row * tokens + first + own % kept) * width
    for part in tl.static_range(parts):
        value += tl.load(source + part * part_stride + at, mask=inside, other=0.0).to(tl.float32)
    if tl.load(wanted + row * wanted_stride) != 0:
        centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
        value = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    tl.store(out + own * width + at, value, mask=inside)


def latents(values: Tensor, bias: Tensor | None, wanted: Tensor, eps: float, skip: int = 0) -> Tensor:
    """Compute `encoder.latents_of` from split-K slices of a layer.

    values: [N, R, T, width], N slices, contiguous; wanted: [R], bool or numbers; skip: leading tokens of each sequence
    to drop. Returns float32 [R, T - skip, width].
    """
    slices, rows, tokens, width = values.shape
    kept, block = tokens - skip, triton.next_power_of_2(width)
    out = torch.empty((rows, kept, width), dtype=torch.float32, device=values.device)
    _latents_kernel[(rows * kept,)](
        values,
        values if bias is None else bias,
        wanted,
        out,
        wanted.stride(0),
        rows * tokens * width,
        tokens,
        skip,
        kept,
        width,
        eps,
        parts=slices,
        has_bias=bias is not None,
        block=block,
        num_warps=warps_for(block, rows * kept),
        **launch_options(values.device),
    )
    return out
