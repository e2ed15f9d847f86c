"""Triton kernels for norms, rotary embedding, gated activations and dequantization, in half precision on CUDA.

Layers call them through `linear.elementwise_kernels`. They compute statistics and products in float32 and round once.
If a linear layer leaves split-K partial sums, the next kernel adds them in a fixed order and rounds as the layer would
have done. With programmatic dependent launch, a kernel starts early and waits only before it reads activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.float8 import LARGEST, LEAST_SCALE
from mstar_core.layers.kernels.launch import launch_options, warps_for

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mstar_core.layers.kv_view import HeadNorms


@triton.jit
def sum_partials(source, stride, at, inside, parts: tl.constexpr, dtype: tl.constexpr):
    """Return the float32 sum of `parts` partial sums that lie `stride` apart, rounded to dtype once."""
    total = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        total += tl.load(source + part * stride + at, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def activation(gate, dtype: tl.constexpr, is_gelu: tl.constexpr):
    """Return silu(gate), or the tanh form of GELU, rounded to dtype once. gate and result: float32."""
    away = -gate
    if is_gelu:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u.
        away = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(away))).to(dtype).to(tl.float32)


@triton.jit
def _add_residual(value, branch, summed, at, inside):
    """Store value + branch, rounded to the dtype of `summed`. Return the rounded sum in float32."""
    rounded = (value + branch).to(summed.dtype.element_ty)
    tl.store(summed + at, rounded, mask=inside)
    return rounded.to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x,
    branch,
    weight,
    summed,
    out,
    width,
    eps,
    parts: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
    is_offset: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if parts > 0:
        stride = tl.num_programs(0).to(tl.int64) * width
        added = sum_partials(branch + row * width, stride, at, inside, parts, summed.dtype.element_ty)
        value = _add_residual(value, added, summed, row * width + at, inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = value * scale
    if is_offset:
        gain += 1.0
    else:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (normed * gain).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm_kernel(
    x,
    branch,
    bias,
    gain,
    shift,
    summed,
    out,
    width,
    eps,
    parts: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    factor = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + at, mask=inside, other=0.0).to(tl.float32)
    added = tl.zeros((block,), tl.float32)
    if has_bias:
        added = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if parts > 0:
        stride = tl.num_programs(0).to(tl.int64) * width
        for part in tl.static_range(parts):
            added += tl.load(branch + part * stride + row * width + at, mask=inside, other=0.0).to(tl.float32)
        # Rounded as the layer that computed the branch would have done.
        added = added.to(summed.dtype.element_ty).to(tl.float32)
        value = _add_residual(value, added, summed, row * width + at, inside)
    centred = tl.where(inside, value - tl.sum(value, axis=0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    tl.store(out + row * width + at, (centred * scale * factor + offset).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(pair, out, width, block: tl.constexpr, overlaps: tl.constexpr, is_gelu: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(pair + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pair + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    activated = activation(gate, out.dtype.element_ty, is_gelu)
    tl.store(out + row * width + at, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated(row, at, inside, width, is_gelu: tl.constexpr):
    """Return act(gate) * up in float32, rounded to the dtype of the pair as `_gate_kernel` does. row: its pointer."""
    dtype: tl.constexpr = row.dtype.element_ty
    gate = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(row + width + at, mask=inside, other=0.0).to(tl.float32)
    return (activation(gate, dtype, is_gelu) * up).to(dtype).to(tl.float32)


@triton.jit
def _store_rounded(value, scale, into, largest, inside):
    """Store value / scale in the float8 dtype of `into`."""
    value = tl.minimum(tl.maximum(value / scale, -largest), largest)
    tl.store(into, value.to(into.dtype.element_ty), mask=inside)


@triton.jit
def _gate_round_kernel(
    pair,
    out,
    scales,
    width,
    largest,
    least,
    block: tl.constexpr,
    is_single: tl.constexpr,
    overlaps: tl.constexpr,
    is_gelu: tl.constexpr,
):
    """Compute the gated activation of one row and round it to float8. is_single: the block holds the row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    given, into = pair + row * 2 * width, out + row * width
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    if is_single:
        value = _gated(given, at, at < width, width, is_gelu)
        scale = tl.maximum(tl.max(tl.abs(value), axis=0) / largest, least)
        _store_rounded(value, scale, into + at, largest, at < width)
    else:
        top = tl.zeros((block,), tl.float32)
        for start in range(0, width, block):
            top = tl.maximum(top, tl.abs(_gated(given, start + at, start + at < width, width, is_gelu)))
        scale = tl.maximum(tl.max(top, axis=0) / largest, least)
        for start in range(0, width, block):
            value = _gated(given, start + at, start + at < width, width, is_gelu)
            _store_rounded(value, scale, into + start + at, largest, start + at < width)
    tl.store(scales + row, scale)


@triton.jit
def scaled(value, scale, gain, dtype: tl.constexpr):
    """Return value * scale * gain, rounded to dtype where an RMSNorm rounds: after each product. Result: float32."""
    rounded = (value * scale).to(dtype).to(tl.float32)
    return (rounded * gain.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rotate_kernel(
    source,
    cosine,
    sine,
    query,
    key,
    value,
    query_gain,
    key_gain,
    row_stride,
    part_stride,
    heads,
    kv_heads,
    width,
    eps,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    parts: tl.constexpr,
    has_norms: tl.constexpr,
    overlaps: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, half)
    inside = at < width // 2
    dtype: tl.constexpr = query.dtype.element_ty
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    start = source + row * row_stride + head * head_dim
    first = sum_partials(start, part_stride, at, inside, parts, dtype)
    second = sum_partials(start + width // 2, part_stride, at, inside, parts, dtype)
    if has_norms:
        if head < heads + kv_heads:
            gain = query_gain
            if head >= heads:
                gain = key_gain
            scale = tl.rsqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / width + eps)
            low = tl.load(gain + at, mask=inside, other=0.0)
            high = tl.load(gain + width // 2 + at, mask=inside, other=0.0)
            first, second = scaled(first, scale, low, dtype), scaled(second, scale, high, dtype)
    if head < heads + kv_heads:
        c = tl.load(cosine + row * width + at, mask=inside, other=0.0)
        s = tl.load(sine + row * width + at, mask=inside, other=0.0)
        rotated = first * c - second * s
        second = second * c + first * s
        first = rotated
    into = query + (row * heads + head) * head_dim
    if head >= heads:
        into = key + (row * kv_heads + head - heads) * head_dim
    if head >= heads + kv_heads:
        into = value + (row * kv_heads + head - heads - kv_heads) * head_dim
    tl.store(into + at, first.to(dtype), mask=inside)
    tl.store(into + width // 2 + at, second.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])  # any number of positions, one compiled kernel
def _angles_kernel(
    positions, frequencies, axes, cosine, sine, half_width, rows, half: tl.constexpr, has_axes: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, half)
    inside = at < half_width
    if has_axes:
        position = tl.load(positions + tl.load(axes + at, mask=inside, other=0) * rows + row).to(tl.float32)
    else:
        position = tl.load(positions + row).to(tl.float32)
    angle = position * tl.load(frequencies + at, mask=inside, other=0.0).to(tl.float32)
    c, s, into = tl.cos(angle), tl.sin(angle), row * 2 * half_width + at
    tl.store(cosine + into, c, mask=inside)
    tl.store(cosine + half_width + into, c, mask=inside)
    tl.store(sine + into, s, mask=inside)
    tl.store(sine + half_width + into, s, mask=inside)


@triton.jit
def _dequantize_kernel(values, scale, out, inputs, block: tl.constexpr, overlaps: tl.constexpr):
    output = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < inputs
    value = tl.load(values + output * inputs + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + output)
    if overlaps:
        # The inputs are weights, but an earlier kernel may still read the memory that this one writes.
        gdc_wait()
    tl.store(out + output * inputs + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _round_rows_kernel(x, out, scales, width, largest, least, block: tl.constexpr, overlaps: tl.constexpr):
    """Round one row to float8 by its largest value. Reads it twice, the second time from the L2 cache."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    top = tl.zeros((block,), tl.float32)
    for start in range(0, width, block):
        value = tl.load(x + row * width + start + at, mask=start + at < width, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(value))
    scale = tl.maximum(tl.max(top, axis=0) / largest, least)
    tl.store(scales + row, scale)
    for start in range(0, width, block):
        inside = start + at < width
        value = tl.load(x + row * width + start + at, mask=inside, other=0.0).to(tl.float32)
        _store_rounded(value, scale, out + row * width + start + at, largest, inside)


GATED_ROW: Final = 16384
"""Widest row of gated values that a program keeps in registers; it reads wider ones twice."""

MANY_ROWS: Final = 1024
"""Rows from which on programs of 4 warps normalize one row each: more of them, and more loads, are in flight."""


def _norm_warps(block: int, rows: int) -> int:
    return 4 if rows >= MANY_ROWS and block <= 4096 else warps_for(block)


def supports(x: Tensor) -> bool:
    """Return whether these kernels can replace the PyTorch operations for `x`."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.dim() == 2 and x.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False) -> Tensor:
    """Return x / rms(x) * weight over the last dimension. x: [T, width], contiguous.

    is_offset: multiply by 1 + weight and round only after that product, as Gemma does.
    """
    out = torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x,
        x,
        weight,
        x,
        out,
        width,
        eps,
        parts=0,
        block=block,
        is_offset=is_offset,
        num_warps=_norm_warps(block, rows),
        **launch_options(x.device),
    )
    return out


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Return x + branch and its RMS norm. x: [T, width]; branch: the same, or partial sums [S, T, width]; contiguous.

    is_offset: see `rms_norm`.
    """
    summed, out = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    block, parts = triton.next_power_of_2(width), branch.shape[0] if branch.dim() == 3 else 1
    _rms_norm_kernel[(rows,)](
        x,
        branch,
        weight,
        summed,
        out,
        width,
        eps,
        parts=parts,
        block=block,
        is_offset=is_offset,
        num_warps=_norm_warps(block, rows),
        **launch_options(x.device),
    )
    return summed, out


def add_layer_norm(
    x: Tensor, branch: Tensor | None, norm: nn.LayerNorm, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return x + branch (+ bias) and its LayerNorm, statistics in float32. Without a branch the sum is x itself.

    x: [..., width]; branch: the same, or float32 partial sums [S, ..., width]; contiguous. Both results have x's shape
    and dtype.
    """
    width, rows = x.shape[-1], x.numel() // x.shape[-1]
    out = torch.empty_like(x)
    parts = 0 if branch is None else branch.shape[0] if branch.dim() > x.dim() else 1
    summed = x if branch is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _layer_norm_kernel[(rows,)](
        x,
        x if branch is None else branch,
        norm.bias if bias is None else bias,
        norm.weight,
        norm.bias,
        summed,
        out,
        width,
        norm.eps,
        parts=parts,
        has_bias=bias is not None,
        block=block,
        num_warps=warps_for(block, rows),
        **launch_options(x.device),
    )
    return summed, out


def gated_activation(pair: Tensor, *, is_gelu: bool = False) -> Tensor:
    """Return silu(gate) * up of pair [T, 2 * width], gate first: [T, width]. is_gelu: the tanh form of GELU."""
    rows, width = pair.shape[0], pair.shape[1] // 2
    out = torch.empty((rows, width), dtype=pair.dtype, device=pair.device)
    block = 1024
    _gate_kernel[(rows, triton.cdiv(width, block))](
        pair, out, width, block=block, is_gelu=is_gelu, **launch_options(pair.device)
    )
    return out


def gated_rounded(pair: Tensor, *, is_gelu: bool = False) -> tuple[Tensor, Tensor]:
    """Return `round_rows(gated_activation(pair))` from one kernel, in the same bits."""
    rows, width = pair.shape[0], pair.shape[1] // 2
    out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=pair.device)
    scales = torch.empty(rows, dtype=torch.float32, device=pair.device)
    if rows:
        whole = max(128, int(triton.next_power_of_2(width)))
        is_single = whole <= GATED_ROW
        _gate_round_kernel[(rows,)](
            pair,
            out,
            scales,
            width,
            LARGEST,
            LEAST_SCALE,
            block=whole if is_single else 4096,
            is_single=is_single,
            is_gelu=is_gelu,
            # Few programs at once, so that the second pass over wide rows reads the L2 cache.
            num_warps=max(4, whole // 1024) if is_single else 16,
            **launch_options(pair.device),
        )
    return out, scales


def dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values * scale, rounded to dtype. values: float8 [outputs, inputs]; scale: float32 [outputs]."""
    outputs, inputs = values.shape
    out = torch.empty((outputs, inputs), dtype=dtype, device=values.device)
    block = 2048
    _dequantize_kernel[(outputs, triton.cdiv(inputs, block))](
        values, scale, out, inputs, block=block, num_warps=4, **launch_options(values.device)
    )
    return out


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row in float8 e4m3 and its scale: see `float8.round_rows`. x: [T, width], contiguous."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = min(4096, max(128, int(triton.next_power_of_2(width))))
        _round_rows_kernel[(rows,)](
            x,
            out,
            scales,
            width,
            LARGEST,
            LEAST_SCALE,
            block=block,
            num_warps=warps_for(block, rows),
            **launch_options(x.device),
        )
    return out, scales


def rotary_angles(positions: Tensor, frequencies: Tensor, axes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each token's angles, repeated for both halves: float32 [T, 1, 2 * pairs].

    positions: int64 or float32 [T], or one row per axis [A, T], contiguous; frequencies: [pairs], radians per token;
    axes: int64 [pairs], the row of positions that each pair reads, the first if None.
    """
    rows, half = positions.shape[-1], len(frequencies)
    angles = [torch.empty((rows, 1, 2 * half), dtype=torch.float32, device=positions.device) for _ in range(2)]
    has_axes = axes is not None and positions.dim() == 2
    _angles_kernel[(rows,)](
        positions,
        frequencies,
        axes if has_axes else positions,
        *angles,
        half,
        rows,
        half=triton.next_power_of_2(half),
        has_axes=has_axes,
        num_warps=1,
    )
    return angles[0], angles[1]


def rotate_qkv(
    packed: Tensor,
    heads: int,
    kv_heads: int,
    cosine: Tensor,
    sine: Tensor,
    dtype: torch.dtype,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated queries, rotated keys and values of a fused QKV projection. Whole heads are rotated.

    norms: of query heads and key heads before rotation.

    packed: [T, (heads + 2 * kv_heads) * head_dim], queries first, or its partial sums [S, T, ...], contiguous;
    cosine, sine: float32 [T, 1, head_dim]. Queries are [T, heads, head_dim], keys and values [T, kv_heads, head_dim].
    """
    rows, across, head_dim = packed.shape[-2], packed.shape[-1], cosine.shape[-1]
    parts = packed.shape[0] if packed.dim() == 3 else 1
    sizes = {"query": heads, "key": kv_heads, "value": kv_heads}
    if parts == 1 and packed.dtype == dtype:
        del sizes["value"]  # a view of `packed` is enough
    outputs = {name: packed.new_empty((rows, size, head_dim), dtype=dtype) for name, size in sizes.items()}
    query_gain, key_gain, eps = norms or (cosine, cosine, 0.0)
    value = outputs.get("value", outputs["key"])
    _rotate_kernel[(rows, sum(sizes.values()))](
        packed,
        cosine,
        sine,
        outputs["query"],
        outputs["key"],
        value,
        query_gain,
        key_gain,
        across,
        rows * across,
        heads,
        kv_heads,
        head_dim,
        eps,
        head_dim=head_dim,
        half=triton.next_power_of_2(head_dim // 2),
        parts=parts,
        has_norms=norms is not None,
        num_warps=1,
        **launch_options(packed.device),
    )
    if "value" not in outputs:
        outputs["value"] = packed.view(rows, across)[:, (heads + kv_heads) * head_dim :].view(rows, kv_heads, head_dim)
    return outputs["query"], outputs["key"], outputs["value"]
