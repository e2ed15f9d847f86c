"""Triton kernels behind the layers on CUDA in half precision: norms, rotation, gated activation.

Called by the layers where `applies` says so; importing this needs triton, which every CUDA build of torch brings.
Statistics and products are computed in float32 and rounded once. Where a linear layer left its result in slices
(`skinny.parts`), the kernel after it sums them in order and rounds as that layer would have. On devices that have
programmatic dependent launch, each kernel lets the next one start early and waits only before it reads activations.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor


PROCESSORS: Final = 132
"""Of an H100: with so many rows each has one of its own."""

FEW_ROWS: Final = 512
"""Rows that processors hold at once, of twice the warps that many rows would get."""


@triton.jit
def summed_slices(source, stride, at, inside, parts: tl.constexpr, dtype: tl.constexpr):
    """The sum of `parts` slices that lie `stride` apart, rounded to dtype once: float32."""
    total = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        total += tl.load(source + part * stride + at, mask=inside, other=0.0).to(tl.float32)
    return total.to(dtype).to(tl.float32)


@triton.jit
def opened(gate, dtype: tl.constexpr, is_gelu: tl.constexpr):
    """silu(gate), or its GELU in the tanh form, rounded to dtype once. gate: float32. Returns float32."""
    away = -gate
    if is_gelu:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u.
        away = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate / (1.0 + tl.exp(away))).to(dtype).to(tl.float32)


@triton.jit
def ask_for(pointers, size):
    """Bring `size` bytes, a multiple of 16, from each pointer into the second-level cache; nothing waits for them."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def ask_where(pointers, inside, size):
    """The same from those pointers that are inside."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [pointers.to(tl.int64), inside.to(tl.int32), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _norm_kernel(
    x, branch, weight, summed, out, width, eps, parts: tl.constexpr, block: tl.constexpr, overlaps: tl.constexpr,
    is_offset: tl.constexpr,
):  # fmt: skip
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
        value += summed_slices(branch + row * width, stride, at, inside, parts, summed.dtype.element_ty)
        rounded = value.to(summed.dtype.element_ty)
        tl.store(summed + row * width + at, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    normed = value * scale
    if is_offset:
        gain += 1.0
    else:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + at, (normed * gain).to(out.dtype.element_ty), mask=inside)


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
    open_to = opened(gate, out.dtype.element_ty, is_gelu)
    tl.store(out + row * width + at, (open_to * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    source, cosine, sine, query, key, value, row_stride, part_stride, heads, kv_heads, width,
    head_dim: tl.constexpr, half: tl.constexpr, parts: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, half)
    inside = at < width // 2
    dtype: tl.constexpr = query.dtype.element_ty
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    start = source + row * row_stride + head * head_dim
    first = summed_slices(start, part_stride, at, inside, parts, dtype)
    second = summed_slices(start + width // 2, part_stride, at, inside, parts, dtype)
    if head < heads + kv_heads:
        c = tl.load(cosine + row * width + at, mask=inside, other=0.0)
        s = tl.load(sine + row * width + at, mask=inside, other=0.0)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    into = query + (row * heads + head) * head_dim
    if head >= heads:
        into = key + (row * kv_heads + head - heads) * head_dim
    if head >= heads + kv_heads:
        into = value + (row * kv_heads + head - heads - kv_heads) * head_dim
    tl.store(into + at, first.to(dtype), mask=inside)
    tl.store(into + width // 2 + at, second.to(dtype), mask=inside)


@triton.jit
def _angles_kernel(positions, frequencies, cosine, sine, half_width, half: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, half)
    inside = at < half_width
    position = tl.load(positions + row).to(tl.float32)
    angle = position * tl.load(frequencies + at, mask=inside, other=0.0).to(tl.float32)
    c, s, into = tl.cos(angle), tl.sin(angle), row * 2 * half_width + at
    tl.store(cosine + into, c, mask=inside)
    tl.store(cosine + half_width + into, c, mask=inside)
    tl.store(sine + into, s, mask=inside)
    tl.store(sine + half_width + into, s, mask=inside)


@triton.jit
def _widen_kernel(values, scale, out, inputs, block: tl.constexpr, overlaps: tl.constexpr):
    output = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < inputs
    value = tl.load(values + output * inputs + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + output)
    if overlaps:
        # Only weights are read, but the memory written may still be read by the kernels before.
        gdc_wait()
    tl.store(out + output * inputs + at, value.to(out.dtype.element_ty), mask=inside)


def applies(x: Tensor) -> bool:
    """Whether these kernels take the place of the plain operations for `x`."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.dim() == 2 and x.is_contiguous()


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device may start before the one in front of them ends: from compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def holds_tiles(device: torch.device) -> bool:
    """Whether a program can hold the tiles of the skinny kernels: 192 KiB of shared memory; capabilities 9 and 10."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels in Hopper's own instructions run here, which nothing later has: compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def launch(device: torch.device) -> dict[str, bool]:
    """The options of a kernel that takes `overlaps`: the interpreter knows none of them."""
    return {"overlaps": True, "launch_pdl": True} if overlaps(device) else {"overlaps": False}


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False) -> Tensor:
    """x / rms(x) * weight over the last dimension. x: [T, width], contiguous.

    is_offset: times 1 + weight instead, and rounded after that product only, as Gemma does.
    """
    out = torch.empty_like(x)
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _norm_kernel[(rows,)](
        x, x, weight, x, out, width, eps, parts=0, block=block, is_offset=is_offset, num_warps=warps(block),
        **launch(x.device),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: Tensor, branch: Tensor, weight: Tensor, eps: float, *, is_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """x + branch, and its norm. x: [T, width]; branch: the same, or slices to be summed [S, T, width]; contiguous.

    is_offset: as for `rms_norm`.
    """
    summed, out = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    block, parts = triton.next_power_of_2(width), branch.shape[0] if branch.dim() == 3 else 1
    _norm_kernel[(rows,)](
        x, branch, weight, summed, out, width, eps, parts=parts, block=block, is_offset=is_offset,
        num_warps=warps(block), **launch(x.device),
    )  # fmt: skip
    return summed, out


def gated(pair: Tensor, *, is_gelu: bool = False) -> Tensor:
    """silu(gate) * up of pair [T, 2 * width], gate first, or GELU's tanh form of gate. Returns [T, width]."""
    rows, width = pair.shape[0], pair.shape[1] // 2
    out = torch.empty((rows, width), dtype=pair.dtype, device=pair.device)
    block = 1024
    _gate_kernel[(rows, triton.cdiv(width, block))](
        pair, out, width, block=block, is_gelu=is_gelu, **launch(pair.device)
    )
    return out


def widen(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """values * scale per output, rounded to the dtype. values: float8 [outputs, inputs]; scale: float32 [outputs]."""
    outputs, inputs = values.shape
    out = torch.empty((outputs, inputs), dtype=dtype, device=values.device)
    block = 2048
    _widen_kernel[(outputs, triton.cdiv(inputs, block))](
        values, scale, out, inputs, block=block, num_warps=4, **launch(values.device)
    )
    return out


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each token's angles, each pair of dimensions twice: float32 [T, 1, 2 * pairs].

    positions: int64 [T], contiguous; frequencies: [pairs], radians per token.
    """
    rows, half = len(positions), len(frequencies)
    made = [torch.empty((rows, 1, 2 * half), dtype=torch.float32, device=positions.device) for _ in range(2)]
    _angles_kernel[(rows,)](positions, frequencies, *made, half, half=triton.next_power_of_2(half), num_warps=1)
    return made[0], made[1]


def rotate_pair(
    packed: Tensor, heads: int, kv_heads: int, cosine: Tensor, sine: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys of packed projections, whole heads, and their values.

    packed: [T, (heads + 2 * kv_heads) * head_dim], queries first, or slices of it to be summed [S, T, ...], contiguous;
    cosine, sine: float32 [T, 1, head_dim]. Returns queries [T, heads, head_dim], keys and values
    [T, kv_heads, head_dim] of the dtype.
    """
    rows, across, head_dim = packed.shape[-2], packed.shape[-1], cosine.shape[-1]
    parts = packed.shape[0] if packed.dim() == 3 else 1
    sizes = {"query": heads, "key": kv_heads, "value": kv_heads}
    if parts == 1 and packed.dtype == dtype:
        del sizes["value"]  # they stay where they are
    made = {name: packed.new_empty((rows, size, head_dim), dtype=dtype) for name, size in sizes.items()}
    value = made.get("value", made["key"])
    _rotate_kernel[(rows, sum(sizes.values()))](
        packed, cosine, sine, made["query"], made["key"], value, across, rows * across, heads, kv_heads, head_dim,
        head_dim=head_dim, half=triton.next_power_of_2(head_dim // 2), parts=parts, num_warps=1,
        **launch(packed.device),
    )  # fmt: skip
    if "value" not in made:
        made["value"] = packed.view(rows, across)[:, (heads + kv_heads) * head_dim :].view(rows, kv_heads, head_dim)
    return made["query"], made["key"], made["value"]


def warps(block: int, rows: int | None = None) -> int:
    """Warps of a program that holds one row: few values per thread, because nothing else hides the latency.

    rows: how many there are, where they may be so few that processors stay empty: those get as many as help.
    """
    each = 256
    if rows is not None and rows <= FEW_ROWS:
        each = 64 if rows <= PROCESSORS else 128
    return min(16, max(4, block // each))
