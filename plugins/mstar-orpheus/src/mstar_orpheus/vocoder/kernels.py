"""Triton kernels of the vocoder on CUDA, channels last: [windows, steps, channels] float32. Used by `fused_decoder`.

GEMMs run on the tensor cores in three passes over operands that are split into two TF32 halves, and are accumulated in
float32 outside. Their error is that of float32, not of TF32. Kernels are not specialized on sizes that depend on the
batch, so a new batch size compiles nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(-7046029254386353131)
_MIX_1 = tl.constexpr(-4658895280553007687)
_MIX_2 = tl.constexpr(-7723592293110705685)
_STREAM = tl.constexpr(-3372029247567499371)
_UNIT = tl.constexpr(1.0 / (1 << 53))
_TWO_PI = tl.constexpr(6.283185307179586)
_LOW_34 = tl.constexpr((1 << 34) - 1)
_LOW_37 = tl.constexpr((1 << 37) - 1)
_LOW_33 = tl.constexpr((1 << 33) - 1)
_LOW_53 = tl.constexpr((1 << 53) - 1)


@triton.jit
def _snake(x, slope, inverse):
    """Return x + sin(slope x)**2 * inverse. The square has period pi: one reduction and six terms, exact to 2e-8."""
    angle = slope * x
    turns = (angle * 0.3183098861837907 + 12582912.0) - 12582912.0  # adding 1.5 * 2**23 rounds to an integer
    rest = tl.fma(turns, -3.1415927410125732, angle)
    rest = tl.fma(turns, 8.742277657347586e-08, rest)
    rest = tl.minimum(tl.maximum(rest, -1.5707964), 1.5707964)  # beyond 4 million turns, rounding leaves no angle
    z = rest * rest
    wave = -2.3889778821839514e-08
    wave = tl.fma(z, wave, 2.752530442490242e-06)
    wave = tl.fma(z, wave, -0.0001984086192670792)
    wave = tl.fma(z, wave, 0.008333330980794034)
    wave = tl.fma(z, wave, -0.16666666617018683)
    wave = tl.fma(z, wave, 1.0)
    wave = wave * rest
    return tl.fma(wave * wave, inverse, x)


@triton.jit
def _product(total, a, high, low, at, inside, precision: tl.constexpr):
    """Return total + a @ w with w = high + low at `at`. `split`: three TF32 passes, small terms first."""
    w = tl.load(high + at, mask=inside, other=0.0)
    if precision == "split":
        rest = tl.load(low + at, mask=inside, other=0.0)
        bits = a.to(tl.int32, bitcast=True)
        top = ((bits + 0x1000) & -8192).to(tl.float32, bitcast=True)
        part = tl.dot(a - top, w, input_precision="tf32")
        part = tl.dot(top, rest, part, input_precision="tf32")
        # Tensor cores truncate sums instead of rounding them, so long sums are accumulated outside.
        return total + tl.dot(top, w, part, input_precision="tf32")
    else:
        return tl.dot(a, w, total, input_precision=precision)


@triton.jit(do_not_specialize=["offset", "book"])
def latent_kernel(
    ids,
    tables,
    taps,
    bias,
    out,
    offset,
    book,
    width: tl.constexpr,
    steps: tl.constexpr,
    slots: tl.constexpr,
    block: tl.constexpr,
):
    """Look up the latent of codes and apply the decoder's depthwise entry of seven taps. tables: [3, book, width]."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.program_id(2) * block + tl.arange(0, block)
    inside = channel < width
    total = tl.load(bias + channel, mask=inside, other=0.0)
    for tap in tl.static_range(7):
        step = at + tap - 3
        if (step >= 0) & (step < steps):
            quarter = step % 4
            start = ids + row * slots + step // 4 * 7
            coarse = (tl.load(start) - offset) % book
            middle = (tl.load(start + tl.where(quarter < 2, 1, 4)) - offset) % book
            fine = (tl.load(start + quarter + 2 + (quarter >= 2).to(tl.int32)) - offset) % book
            value = tl.load(tables + coarse * width + channel, mask=inside, other=0.0)
            value += tl.load(tables + (book + middle) * width + channel, mask=inside, other=0.0)
            value += tl.load(tables + (2 * book + fine) * width + channel, mask=inside, other=0.0)
            total += value * tl.load(taps + tap * width + channel, mask=inside, other=0.0)
    tl.store(out + (row * steps + at) * width + channel, total, mask=inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["noise"])
def pointwise_kernel(
    x,
    high,
    low,
    bias,
    noise,
    slope,
    inverse,
    wide,
    bent,
    rows,
    inner,
    outer,
    is_noisy: tl.constexpr,
    precision: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
):
    """Convolve [rows, inner] with one tap. With noise, wide = x + noise * (W x); else W x + bias, which is not stored.

    bent: the snake of the result, [rows, outer].
    """
    m = tl.program_id(0) * bm + tl.arange(0, bm)
    n = tl.program_id(1) * bn + tl.arange(0, bn)
    is_row, is_column = m < rows, n < outer
    m = m.to(tl.int64)
    total = tl.zeros((bm, bn), tl.float32)
    for start in range(0, inner, bk):
        k = start + tl.arange(0, bk)
        is_inner = k < inner
        a = tl.load(x + m[:, None] * inner + k[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        inside = is_inner[:, None] & is_column[None, :]
        total = _product(total, a, high, low, n[None, :] * inner + k[:, None], inside, precision)
    at, inside = m[:, None] * outer + n[None, :], is_row[:, None] & is_column[None, :]
    if is_noisy:
        loud = tl.load(noise + m, mask=is_row, other=0.0)
        total = tl.load(x + at, mask=inside, other=0.0) + loud[:, None] * total
        tl.store(wide + at, total, mask=inside)
    else:
        total += tl.load(bias + n, mask=is_column, other=0.0)[None, :]
    a1 = tl.load(slope + n, mask=is_column, other=0.0)
    a2 = tl.load(inverse + n, mask=is_column, other=0.0)
    tl.store(bent + at, _snake(total, a1[None, :], a2[None, :]), mask=inside)


@triton.jit(do_not_specialize=["rows", "first", "count", "length", "rate"])
def upsample_kernel(
    x,
    high,
    low,
    bias,
    slope,
    inverse,
    out,
    bent,
    rows,
    first,
    count,
    length,
    rate,
    inner,
    outer,
    is_bent: tl.constexpr,
    precision: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
):
    """Compute a transposed convolution of stride `rate`, 2 * rate taps and padding rate // 2 as one GEMM.

    x: [windows, length, inner], of which `count` steps from `first` are used. Each output depends on two inputs: row i
    of the GEMM has steps i and i - 1 side by side, and its columns are `rate` outputs of `outer` channels.
    out: [windows, count * rate, outer]; bent: its snake, if `is_bent`.
    """
    m = tl.program_id(0) * bm + tl.arange(0, bm)
    n = tl.program_id(1) * bn + tl.arange(0, bn)
    is_row, is_column = m < rows, n < rate * outer
    window, step = (m // (count + 1)).to(tl.int64), m % (count + 1)
    total = tl.zeros((bm, bn), tl.float32)
    for half in tl.static_range(2):
        here = step - half
        is_step = is_row & (here >= 0) & (here < count)
        source = (window * length + first + here) * inner
        for start in range(0, inner, bk):
            k = start + tl.arange(0, bk)
            is_inner = k < inner
            a = tl.load(x + source[:, None] + k[None, :], mask=is_step[:, None] & is_inner[None, :], other=0.0)
            at = n[None, :] * (2 * inner) + half * inner + k[:, None]
            total = _product(total, a, high, low, at, is_inner[:, None] & is_column[None, :], precision)
    channel = n % outer
    total += tl.load(bias + channel, mask=is_column, other=0.0)[None, :]
    place = (step[:, None] * rate - rate // 2) * outer + n[None, :]
    inside = is_row[:, None] & is_column[None, :] & (place >= 0) & (place < count * rate * outer)
    at = window[:, None] * (count * rate * outer) + place
    tl.store(out + at, total, mask=inside)
    if is_bent:
        a1 = tl.load(slope + channel, mask=is_column, other=0.0)
        a2 = tl.load(inverse + channel, mask=is_column, other=0.0)
        tl.store(bent + at, _snake(total, a1[None, :], a2[None, :]), mask=inside)


@triton.jit(do_not_specialize=["length", "dilation", "is_kept"])
def unit_kernel(
    bent,
    wide,
    taps,
    tap_bias,
    inner_slope,
    inner_inverse,
    high,
    low,
    bias,
    slope,
    inverse,
    out,
    length,
    dilation,
    is_kept,
    channels,
    precision: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
):
    """Compute a residual unit after its first snake: depthwise taps, snake, GEMM, sum, and the next layer's snake.

    bent: [windows, length, channels], the snake of wide. wide receives the sum in place if `is_kept`; out: the sum's
    snake with the next layer's slopes. taps: [7, channels].
    """
    tiles = tl.cdiv(length, bm)
    base = (tl.program_id(0) // tiles).to(tl.int64) * length
    step = tl.program_id(0) % tiles * bm + tl.arange(0, bm)
    n = tl.program_id(1) * bn + tl.arange(0, bn)
    is_row, is_column = step < length, n < channels
    total = tl.zeros((bm, bn), tl.float32)
    for start in range(0, channels, bk):
        k = start + tl.arange(0, bk)
        is_inner = k < channels
        a = tl.zeros((bm, bk), tl.float32) + tl.load(tap_bias + k, mask=is_inner, other=0.0)[None, :]
        for tap in tl.static_range(7):
            here = step + (tap - 3) * dilation
            is_here = (here >= 0) & (here < length)
            value = tl.load(
                bent + (base + here)[:, None] * channels + k[None, :],
                mask=is_here[:, None] & is_inner[None, :],
                other=0.0,
            )
            a += value * tl.load(taps + tap * channels + k, mask=is_inner, other=0.0)[None, :]
        a1 = tl.load(inner_slope + k, mask=is_inner, other=0.0)
        a2 = tl.load(inner_inverse + k, mask=is_inner, other=0.0)
        a = _snake(a, a1[None, :], a2[None, :])
        inside = is_inner[:, None] & is_column[None, :]
        total = _product(total, a, high, low, n[None, :] * channels + k[:, None], inside, precision)
    at = (base + step)[:, None] * channels + n[None, :]
    inside = is_row[:, None] & is_column[None, :]
    total += tl.load(bias + n, mask=is_column, other=0.0)[None, :] + tl.load(wide + at, mask=inside, other=0.0)
    if is_kept != 0:
        tl.store(wide + at, total, mask=inside)
    a1 = tl.load(slope + n, mask=is_column, other=0.0)
    a2 = tl.load(inverse + n, mask=is_column, other=0.0)
    tl.store(out + at, _snake(total, a1[None, :], a2[None, :]), mask=inside)


@triton.jit(do_not_specialize=["length", "first", "count"])
def output_kernel(
    bent,
    taps,
    bias,
    out,
    length,
    first,
    count,
    channels: tl.constexpr,
    padded: tl.constexpr,
    is_pcm: tl.constexpr,
    block: tl.constexpr,
):
    """Apply the last convolution (seven taps to one channel), tanh and the conversion to 16 bits to `count` steps."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    k = tl.arange(0, padded)
    total = tl.zeros((block, padded), tl.float32)
    for tap in tl.static_range(7):
        here = first + at + tap - 3
        inside = ((here >= 0) & (here < length) & (at < count))[:, None] & (k < channels)[None, :]
        value = tl.load(bent + (row * length + here)[:, None] * channels + k[None, :], mask=inside, other=0.0)
        total += value * tl.load(taps + tap * channels + k, mask=k < channels, other=0.0)[None, :]
    x = tl.sum(total, axis=1) + tl.load(bias)
    size = tl.exp(-2.0 * tl.abs(x))
    wave = tl.div_rn(1.0 - size, 1.0 + size)
    # Cancellation: small samples use the series of tanh instead.
    wave = tl.where(tl.abs(x) < 0.05, tl.abs(x) * (1.0 - x * x * (0.33333334 - x * x * 0.13333334)), wave)
    wave = tl.where(x < 0, -wave, wave)
    if is_pcm:
        tl.store(out + row * count + at, (wave * 32767.0).to(tl.int16), mask=at < count)
    else:
        tl.store(out + row * count + at, wave, mask=at < count)


@triton.jit
def _mix(state):
    state = (state ^ ((state >> 30) & _LOW_34)) * _MIX_1
    state = (state ^ ((state >> 27) & _LOW_37)) * _MIX_2
    return state ^ ((state >> 31) & _LOW_33)


@triton.jit
def _uniform(state, counter):
    bits = _mix(state + (counter + 1) * _GOLDEN)
    return ((bits >> 11) & _LOW_53).to(tl.float64) * _UNIT


@triton.jit(do_not_specialize=["rows", "salt", "blocks"])
def noise_kernel(noise_params, spans, out, rows, salt, blocks, seeded_mode: tl.constexpr, block: tl.constexpr):
    """Generate the seeded noise of a batch (zeros for other modes): `rng.normal` of each row's seed and window.

    noise_params: int64 [3, rows], mode, seed, window. spans: int64 [blocks, 3], first index, count, sum of the counts
    before. out: the blocks in order, each float32 [rows, count].
    """
    row, number = tl.program_id(0), tl.program_id(2)
    first, count = tl.load(spans + number * 3), tl.load(spans + number * 3 + 1)
    at = tl.program_id(1) * block + tl.arange(0, block)
    seed = tl.load(noise_params + rows + row) + salt
    counter = tl.load(noise_params + 2 * rows + row) * blocks + number
    state = _mix(_mix(seed * _STREAM + _GOLDEN) + (counter + 1) * _GOLDEN)
    index = first + at
    radius = tl.sqrt(-2.0 * tl.log(1.0 - _uniform(state, 2 * index)))
    value = (radius * tl.cos(_TWO_PI * _uniform(state, 2 * index + 1))).to(tl.float32)
    value = tl.where(tl.load(noise_params + row) == seeded_mode, value, 0.0)
    before = tl.load(spans + number * 3 + 2)
    tl.store(out + before * rows + row * count + at, value, mask=at < count)
