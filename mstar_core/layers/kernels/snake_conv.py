"""Triton kernels of convolutions with SnakeBeta, channels last: [windows, steps, channels]. Used by `snake_conv`.

One kernel computes every convolution as a GEMM over taps and channels, with bias, residual and the next SnakeBeta in
its epilogue. Sums are float32 in one order, which does not depend on the batch. Kernels are not specialized on sizes
that depend on the batch or the window, so a new shape compiles nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INVERSE_PI = tl.constexpr(0.3183098861837907)
_PI_HIGH = tl.constexpr(3.140625)
_PI_LOW = tl.constexpr(0.0009676535897932384)


@triton.jit
def _snake(x, slope, height):
    """Return x + sin(slope * x)^2 * height in float32. The square has period pi: one reduction and a Taylor sum."""
    angle = x * slope
    turns = tl.floor(angle * _INVERSE_PI + 0.5)
    rest = angle - turns * _PI_HIGH - turns * _PI_LOW
    rest = tl.minimum(tl.maximum(rest, -1.5707964), 1.5707964)  # beyond 2^20 turns, rounding leaves no angle
    z = rest * rest
    wave = z * (-1.0 / 39916800.0) + 1.0 / 362880.0
    wave = wave * z - 1.0 / 5040.0
    wave = wave * z + 1.0 / 120.0
    wave = wave * z - 1.0 / 6.0
    wave = (wave * z + 1.0) * rest
    return x + wave * wave * height


@triton.jit
def _stored(x, dtype: tl.constexpr):
    """Round to a dtype; float16 saturates."""
    if dtype == tl.float16:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    return x.to(dtype)


@triton.jit(do_not_specialize=["taken", "made", "tiles", "reach", "dilation"])
def conv_kernel(
    x,
    weight,
    bias,
    residual,
    slope,
    height,
    wide,
    bent,
    taken,
    made,
    tiles,
    reach,
    dilation,
    apart,
    inner: tl.constexpr,
    outer: tl.constexpr,
    taps: tl.constexpr,
    has_residual: tl.constexpr,
    keeps_wide: tl.constexpr,
    precision: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
):
    """Convolve [windows, taken, inner] to [windows, made, outer].

    Output step t reads input steps t + tap * dilation - reach, zeros outside. weight: [taps, outer, inner]; bias,
    slope, height: float32 [outer]. wide: the sum with bias and residual; bent: its SnakeBeta, of
    windows that lie `apart`.
    """
    window = (tl.program_id(0) // tiles).to(tl.int64)
    step = (tl.program_id(0) % tiles) * bm + tl.arange(0, bm)
    column = tl.program_id(1) * bn + tl.arange(0, bn)
    is_step, is_column = step < made, column < outer
    first, pieces = window * taken, (inner + bk - 1) // bk
    total = tl.zeros((bm, bn), tl.float32)
    for piece in range(0, taps * pieces):
        tap, k = piece // pieces, (piece % pieces) * bk + tl.arange(0, bk)
        at, is_inner = step + tap * dilation - reach, k < inner
        seen = is_step & (at >= 0) & (at < taken)
        a = tl.load(x + (first + at)[:, None] * inner + k[None, :], mask=seen[:, None] & is_inner[None, :], other=0.0)
        line = (tap * outer + column)[None, :] * inner + k[:, None]
        w = tl.load(weight + line, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(a, w, total, input_precision=precision)
    total += tl.load(bias + column, mask=is_column, other=0.0)[None, :]
    within = step[:, None] * outer + column[None, :]
    place = window * made * outer + within
    inside = is_step[:, None] & is_column[None, :]
    if has_residual:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if keeps_wide:
        tl.store(wide + place, _stored(total, wide.dtype.element_ty), mask=inside)
    a1 = tl.load(slope + column, mask=is_column, other=0.0)[None, :]
    a2 = tl.load(height + column, mask=is_column, other=0.0)[None, :]
    tl.store(bent + window * apart + within, _stored(_snake(total, a1, a2), bent.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["steps"])
def output_kernel(
    x,
    weight,
    bias,
    out,
    steps,
    channels: tl.constexpr,
    padded: tl.constexpr,
    taps: tl.constexpr,
    is_pcm: tl.constexpr,
    block: tl.constexpr,
):
    """Convolve [windows, steps, channels] causally to one channel in [-1, 1], or int16. weight: [taps, channels]."""
    first = tl.program_id(0).to(tl.int64) * steps
    step = tl.program_id(1) * block + tl.arange(0, block)
    channel = tl.arange(0, padded)
    is_channel = channel < channels
    total = tl.zeros((block,), tl.float32) + tl.load(bias)
    for tap in range(0, taps):
        at = step + tap - (taps - 1)
        inside = ((at >= 0) & (at < steps))[:, None] & is_channel[None, :]
        a = tl.load(x + (first + at)[:, None] * channels + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + tap * channels + channel, mask=is_channel, other=0.0)
        total += tl.sum(a * w[None, :], axis=1)
    total = tl.minimum(tl.maximum(total, -1.0), 1.0)
    if is_pcm:
        total = tl.floor(total * 32767.0 + 0.5)
    tl.store(out + first + step, total.to(out.dtype.element_ty), mask=step < steps)
