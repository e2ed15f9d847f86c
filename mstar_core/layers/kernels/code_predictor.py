"""Triton kernels of the code predictor, for half precision on CUDA: attention over one frame, and embedding with norm.

A frame has at most 16 positions, so one program holds all keys of a head in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.elementwise import sum_partials
from mstar_core.layers.kernels.launch import launch_options, warps_for

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def _head_halves(
    source,
    gain,
    cosine,
    sine,
    line,
    part_stride,
    at,
    inside,
    width: tl.constexpr,
    eps,
    parts: tl.constexpr,
    dtype: tl.constexpr,
):
    """Return both halves of normalized and rotated heads, rounded as separate layers would. line: [n, 1] offsets."""
    half: tl.constexpr = width // 2
    first = sum_partials(source, part_stride, line + at, inside, parts, dtype)
    second = sum_partials(source, part_stride, line + half + at, inside, parts, dtype)
    scale = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / width + eps)[:, None]
    first = (first * scale).to(dtype).to(tl.float32) * tl.load(gain + at).to(tl.float32)
    second = (second * scale).to(dtype).to(tl.float32) * tl.load(gain + half + at).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    c, s = tl.load(cosine + at), tl.load(sine + at)
    return (first * c - second * s).to(dtype).to(tl.float32), (second * c + first * s).to(dtype).to(tl.float32)


@triton.jit
def frame_attention_kernel(
    packed,
    query_gain,
    key_gain,
    cosine,
    sine,
    keys,
    values,
    out,
    part_stride,
    start,
    heads,
    kv_heads,
    eps,
    softmax_scale,
    tokens: tl.constexpr,
    group: tl.constexpr,
    lanes: tl.constexpr,
    places: tl.constexpr,
    width: tl.constexpr,
    parts: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Normalize, rotate, append and attend for one key head of one sequence. Grid: (rows, kv_heads).

    packed: [parts, rows * tokens, (heads + 2 * kv_heads) * width]; keys, values: [rows, kv_heads, places, width].
    """
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = width // 2
    dtype: tl.constexpr = out.dtype.element_ty
    at = tl.arange(0, half)[None, :]
    place = tl.arange(0, places)[:, None]
    lane = tl.arange(0, lanes)[:, None]
    one = tl.zeros((1, 1), tl.int32)
    across = (heads + 2 * kv_heads) * width
    cache = (row * kv_heads + kv_head) * places * width + place * width
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    known = (place < start) & (at >= 0)
    key_1 = tl.load(keys + cache + at, mask=known, other=0.0).to(tl.float32)
    key_2 = tl.load(keys + cache + half + at, mask=known, other=0.0).to(tl.float32)
    value_1 = tl.load(values + cache + at, mask=known, other=0.0).to(tl.float32)
    value_2 = tl.load(values + cache + half + at, mask=known, other=0.0).to(tl.float32)
    for token in tl.static_range(tokens):
        line = (row * tokens + token) * across
        here = start + token
        c, s = cosine + here * width, sine + here * width
        own_line = line + (heads + kv_head) * width + one
        true = (one == 0) & (at >= 0)
        own_1, own_2 = _head_halves(packed, key_gain, c, s, own_line, part_stride, at, true, width, eps, parts, dtype)
        value_line = own_line + kv_heads * width
        own_value_1 = sum_partials(packed, part_stride, value_line + at, true, parts, dtype)
        own_value_2 = sum_partials(packed, part_stride, value_line + half + at, true, parts, dtype)
        into = (row * kv_heads + kv_head) * places * width + here * width
        tl.store(keys + into + at, own_1.to(dtype))
        tl.store(keys + into + half + at, own_2.to(dtype))
        tl.store(values + into + at, own_value_1.to(dtype))
        tl.store(values + into + half + at, own_value_2.to(dtype))
        is_own = place == here
        key_1, key_2 = tl.where(is_own, own_1, key_1), tl.where(is_own, own_2, key_2)
        value_1, value_2 = tl.where(is_own, own_value_1, value_1), tl.where(is_own, own_value_2, value_2)
        query_line = line + (kv_head * group + lane) * width
        inside = (lane < group) & (at >= 0)
        query_1, query_2 = _head_halves(
            packed, query_gain, c, s, query_line, part_stride, at, inside, width, eps, parts, dtype
        )
        # [lanes, places, half] products: a tensor core needs 16 queries, and a head has two.
        scores = tl.sum(query_1[:, None, :] * key_1[None, :, :], axis=2)
        scores = (scores + tl.sum(query_2[:, None, :] * key_2[None, :, :], axis=2)) * softmax_scale
        scores = tl.where(tl.arange(0, places)[None, :] <= here, scores, float("-inf"))
        weight = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        weight = weight / tl.sum(weight, axis=1)[:, None]
        mixed_1 = tl.sum(weight[:, :, None] * value_1[None, :, :], axis=1)
        mixed_2 = tl.sum(weight[:, :, None] * value_2[None, :, :], axis=1)
        to = ((row * tokens + token) * heads + kv_head * group + lane) * width
        tl.store(out + to + at, mixed_1.to(dtype), mask=inside)
        tl.store(out + to + half + at, mixed_2.to(dtype), mask=inside)


@triton.jit
def embed_norm_kernel(ids, table, gain, embedded, normed, width, eps, block: tl.constexpr, overlaps: tl.constexpr):
    """Copy one row of the table and its RMS norm. A negative id reads row 0."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    weight = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    line = tl.maximum(tl.load(ids + row), 0) * width
    value = tl.load(table + line + at, mask=inside, other=0.0)
    tl.store(embedded + row * width + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    rounded = (wide * scale).to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + row * width + at, (rounded * weight).to(normed.dtype.element_ty), mask=inside)


def frame_attention(
    packed: Tensor,
    norms: tuple[Tensor, Tensor],
    rotation: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    start: int,
    heads: int,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the attention of one layer over the positions of a frame so far: [rows * tokens, heads * width] in dtype.

    packed: fused QKV projection [rows * tokens, ...], tokens of a row together, or its partial sums [S, rows * tokens,
    ...]; norms: weights of the query and key norms; rotation: cosine and sine, float32 [places, width] by position;
    cache: keys and values [rows, kv_heads, places, width], written at positions start to start + tokens - 1.
    """
    rows, kv_heads, places, width = cache[0].shape
    tokens, parts = packed.shape[-2] // rows, packed.shape[0] if packed.dim() == 3 else 1
    out = torch.empty((rows * tokens, heads * width), dtype=dtype, device=packed.device)
    group = heads // kv_heads
    frame_attention_kernel[(rows, kv_heads)](
        packed,
        *norms,
        *rotation,
        *cache,
        out,
        rows * tokens * packed.shape[-1],
        start,
        heads,
        kv_heads,
        eps,
        width**-0.5,
        tokens=tokens,
        group=group,
        lanes=triton.next_power_of_2(group),
        places=places,
        width=width,
        parts=parts,
        num_warps=4,
        **launch_options(packed.device),
    )
    return out


def embed_norm(ids: Tensor, table: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rows of an embedding and their RMS norms, [B, width] each. ids: int64 [B]; a negative id reads row 0."""
    width = table.shape[1]
    embedded, normed = (torch.empty((len(ids), width), dtype=table.dtype, device=table.device) for _ in range(2))
    block = triton.next_power_of_2(width)
    embed_norm_kernel[(len(ids),)](
        ids.contiguous(),
        table,
        gain,
        embedded,
        normed,
        width,
        eps,
        block=block,
        num_warps=warps_for(block),
        **launch_options(table.device),
    )
    return embedded, normed


def supports(places: int, width: int) -> bool:
    """Return whether the attention kernel has these sizes: powers of two that fit registers."""
    return places <= 32 and 32 <= width <= 256 and places & (places - 1) == 0 and width & (width - 1) == 0
