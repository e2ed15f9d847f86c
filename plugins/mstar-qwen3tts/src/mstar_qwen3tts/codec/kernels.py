"""Triton kernels of the codec: attention within a window, steps behind a state, depthwise convolution with its norm.

Each reads the state of a piece and writes its successor in the layout of the layers in torch. Float32; a stream's bits
do not depend on its batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor, nn

CARRIED: Final = 1024
"""Values of a state that one program moves."""


@triton.jit(do_not_specialize=["count", "before_apart", "after_apart"])
def attend_kernel(
    packed,
    seen,
    before,
    after,
    cosine,
    sine,
    out,
    count,
    before_apart,
    after_apart,
    scale,
    heads: tl.constexpr,
    half: tl.constexpr,
    past: tl.constexpr,
    block: tl.constexpr,
):
    """Attend from one frame to itself and `past` frames before it, in one head.

    Rotation depends on distances alone: the tables hold the angles of distance 0 to `past`, and the state keys before
    rotation. The program of the last frame writes the state, because its window holds all of it.
    """
    stream = (tl.program_id(0) // count).to(tl.int64)
    step, head = tl.program_id(0) % count, tl.program_id(1)
    width: tl.constexpr = heads * 2 * half
    at, back = tl.arange(0, half)[None, :], tl.arange(0, block)
    place = step + back  # of a key, counted from the oldest one of the state
    is_key = back <= past
    is_old, is_new = (is_key & (place < past))[:, None], (is_key & (place >= past))[:, None]
    row = packed + (stream * count + step) * 3 * width + head * 2 * half
    old = before + stream * before_apart + place[:, None] * width + head * 2 * half + at
    new = packed + (stream * count + place - past)[:, None] * 3 * width + width + head * 2 * half + at
    key1 = tl.load(old, mask=is_old, other=0.0) + tl.load(new, mask=is_new, other=0.0)
    key2 = tl.load(old + half, mask=is_old, other=0.0) + tl.load(new + half, mask=is_new, other=0.0)
    query1, query2 = tl.load(row + at), tl.load(row + half + at)
    angle = (past - back)[:, None] * half + at
    c = tl.load(cosine + angle, mask=is_key[:, None], other=0.0)
    s = tl.load(sine + angle, mask=is_key[:, None], other=0.0)
    parts = c * (query1 * key1 + query2 * key2) + s * (query1 * key2 - query2 * key1)
    known = is_key & (place >= past - tl.load(seen + stream * before_apart))
    score = tl.where(known, tl.sum(parts, axis=1) * scale, float("-inf"))
    share = tl.exp(score - tl.max(score, axis=0))
    share = (share / tl.sum(share, axis=0))[:, None]
    old += past * width
    new += width
    value1 = tl.load(old, mask=is_old, other=0.0) + tl.load(new, mask=is_new, other=0.0)
    value2 = tl.load(old + half, mask=is_old, other=0.0) + tl.load(new + half, mask=is_new, other=0.0)
    into = out + (stream * count + step) * width + head * 2 * half + tl.arange(0, half)
    tl.store(into, tl.sum(share * value1, axis=0))
    tl.store(into + half, tl.sum(share * value2, axis=0))
    if step == count - 1:
        left = after + stream * after_apart + (back - 1)[:, None] * width + head * 2 * half + at
        is_left = (is_key & (back > 0))[:, None]
        tl.store(left, key1, mask=is_left)
        tl.store(left + half, key2, mask=is_left)
        tl.store(left + past * width, value1, mask=is_left)
        tl.store(left + past * width + half, value2, mask=is_left)


@triton.jit(do_not_specialize=["steps", "before_apart", "after_apart"])
def carry_kernel(
    joined, before, after, steps, before_apart, after_apart, reach, channels: tl.constexpr, block: tl.constexpr
):
    """Put the state, [channels, reach], in front of `steps` new steps, and store the last steps of both as a state."""
    stream = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels * reach
    step, channel = at // channels, at % channels
    row, old = joined + stream * (reach + steps) * channels, before + stream * before_apart + channel * reach + step
    tl.store(row + at, tl.load(old, mask=inside, other=0.0), mask=inside)
    is_new = step + steps >= reach
    new = tl.load(row + steps * channels + at, mask=inside & is_new, other=0.0)
    kept = tl.load(old + steps, mask=inside & (is_new == 0), other=0.0)
    tl.store(after + stream * after_apart + channel * reach + step, tl.where(is_new, new, kept), mask=inside)


@triton.jit(do_not_specialize=["steps"])
def mix_kernel(
    joined, weight, bias, gain, shift, out, steps, eps, width: tl.constexpr, taps: tl.constexpr, block: tl.constexpr
):
    """Convolve each channel and normalize one step. joined: [B, taps - 1 + steps, width]; weight: [taps, width]."""
    stream, step = (tl.program_id(0) // steps).to(tl.int64), tl.program_id(0) % steps
    at = tl.arange(0, block)
    inside = at < width
    first = joined + (stream * (steps + taps - 1) + step) * width + at
    total = tl.load(bias + at, mask=inside, other=0.0)
    for tap in tl.static_range(taps):
        factor = tl.load(weight + tap * width + at, mask=inside, other=0.0)
        total += tl.load(first + tap * width, mask=inside, other=0.0) * factor
    centred = tl.where(inside, total - tl.sum(total, axis=0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    factor, offset = tl.load(gain + at, mask=inside, other=0.0), tl.load(shift + at, mask=inside, other=0.0)
    tl.store(out + (stream * steps + step) * width + at, centred * scale * factor + offset, mask=inside)


def attend(
    packed: Tensor, seen: Tensor, state: tuple[Tensor, Tensor], table: tuple[Tensor, Tensor], heads: int
) -> Tensor:
    """Return what the frames attend to, [B * n, width], and write the next state.

    packed: queries, keys and values, [B * n, 3 * width]; seen: [B, 1], frames of a stream that its state holds; state:
    before and after, [B, 2 * past * width] each; table: cosine and sine by distance, [past + 1, head_dim / 2].
    """
    rows, width = len(packed), packed.shape[1] // 3
    before, after = state
    window, half = table[0].shape
    out = packed.new_empty(rows, width)
    attend_kernel[(rows, heads)](
        packed,
        seen,
        before,
        after,
        *table,
        out,
        rows // len(before),
        before.stride(0),
        after.stride(0),
        (2 * half) ** -0.5,
        heads=heads,
        half=half,
        past=window - 1,
        block=triton.next_power_of_2(window),
        num_warps=8,
    )
    return out


def carry(joined: Tensor, reach: int, state: tuple[Tensor, Tensor]) -> None:
    """Fill the first `reach` steps from a state, and write the next one. joined: [B, reach + steps, channels].

    state: before and after, [B, channels * reach] each.
    """
    batch, steps, channels = joined.shape
    before, after = state
    carry_kernel[(batch, triton.cdiv(channels * reach, CARRIED))](
        joined,
        before,
        after,
        steps - reach,
        before.stride(0),
        after.stride(0),
        reach,
        channels=channels,
        block=CARRIED,
    )


def mixed(joined: Tensor, weight: Tensor, bias: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Return the norm of a depthwise convolution. joined: [B, taps - 1 + steps, width]; weight: [taps, width]."""
    taps, width = weight.shape
    batch, steps = joined.shape[0], joined.shape[1] - taps + 1
    out = joined.new_empty(batch, steps, width)
    block = triton.next_power_of_2(width)
    mix_kernel[(batch * steps,)](
        joined, weight, bias, norm.weight, norm.bias, out, steps, norm.eps, width=width, taps=taps, block=block
    )
    return out
