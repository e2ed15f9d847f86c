"""Triton GEMM for few rows: one frame or a few. Used by `nodes.linear` on CUDA.

Weights are [outputs, inputs] in bfloat16 or float16. Sums have a fixed order: the same inputs give the same bits.

Cost model: L2 bandwidth per multiprocessor, some 64 bytes per cycle, for tiles of rows and weights that TMA loads.
Weights are prefetched while the previous kernel still runs (programmatic dependent launch). Whole tiles leave two of
the 258 tokens of a frame, which get a small tile. Layers with few outputs are split along their inputs (split-K), and
the norm after them sums the slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from mstar_core.layers.kernels.launch import has_large_shared_memory, launch_options, prefetch_l2

if TYPE_CHECKING:
    from torch import Tensor

SMALL: Final = 16
"""Maximum rows of the small last tile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """Tiling of a GEMM: `block` rows by `wide` outputs by `step` inputs per tile, `stages` tiles in flight.

    splits: slices of the inputs with separate sums.
    """

    block: int
    wide: int
    step: int
    stages: int
    warps: int = 4
    splits: int = 1


LINEAR: Final = TileConfig(block=64, wide=128, step=128, stages=3)
"""Tiling of plain layers."""

GELU: Final = TileConfig(block=128, wide=64, step=64, stages=4)
"""Tiling of layers with a GELU epilogue."""

SPLIT_K: Final = TileConfig(block=64, wide=64, step=128, stages=3, splits=2)
"""Tiling of layers whose slices a norm sums."""

DEEP_SPLIT_K: Final = TileConfig(block=128, wide=128, step=64, stages=4, warps=8, splits=4)
"""Tiling of split-K layers with more inputs than outputs."""


@triton.jit
def _gelu(x):
    """Return x times the normal CDF of x, with an error below 2e-7 of max(1, |x|).

    Source: Abramowitz and Stegun 7.1.26. It needs one power and one division; erf takes some forty operations.
    """
    size = tl.abs(x)
    t = 1.0 / (1.0 + 0.23164189 * size)  # 0.3275911 / sqrt(2)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tl.maximum(x, 0.0) - 0.5 * size * poly * tl.exp2(-0.72134752 * x * x)  # log2(e) / 2


@triton.jit
def _tile(
    x_blocks,
    w_blocks,
    bias,
    out,
    first,
    to,
    part,
    rows,
    outputs,
    size,
    block: tl.constexpr,
    wide: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    is_whole: tl.constexpr,
    is_gelu: tl.constexpr,
):
    lane = to + tl.arange(0, wide)
    total = tl.zeros((block, wide), tl.float32)
    for start in tl.range(part * size, part * size + size, step, num_stages=stages):
        total = tl.dot(x_blocks.load([first, start]), w_blocks.load([to, start]).T, total)
    if is_whole:
        total += tl.load(bias + lane).to(tl.float32)[None, :]
    if is_gelu:
        total = _gelu(total)
    row = first + tl.arange(0, block)
    into = out + (part.to(tl.int64) * rows + row[:, None]) * outputs + lane[None, :]
    tl.store(into, total.to(out.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit
def _ask(weight, first, to, part, inputs, size, wide: tl.constexpr, overlaps: tl.constexpr):
    """Allow the next kernel to launch, prefetch this program's weights, and wait for the previous kernel."""
    if overlaps:
        gdc_launch_dependents()
        if first == 0:
            lines = weight + (to + tl.arange(0, wide)).to(tl.int64) * inputs + part * size
            prefetch_l2(lines, size * 2)
        gdc_wait()


@triton.jit
def _gemm_kernel(
    x_blocks,
    x_small,
    w_blocks,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    size,
    block: tl.constexpr,
    small: tl.constexpr,
    wide: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    has_small: tl.constexpr,
    is_whole: tl.constexpr,
    is_gelu: tl.constexpr,
    overlaps: tl.constexpr,
):
    first = tl.program_id(0) * block
    to = tl.program_id(1) * wide
    part = tl.program_id(2)
    _ask(weight, first, to, part, inputs, size, wide, overlaps)
    if has_small:
        if first + block > rows:
            _tile(
                x_small,
                w_blocks,
                bias,
                out,
                first,
                to,
                part,
                rows,
                outputs,
                size,
                small,
                wide,
                step,
                stages,
                is_whole,
                is_gelu,
            )
        else:
            _tile(
                x_blocks,
                w_blocks,
                bias,
                out,
                first,
                to,
                part,
                rows,
                outputs,
                size,
                block,
                wide,
                step,
                stages,
                is_whole,
                is_gelu,
            )
    else:
        _tile(
            x_blocks,
            w_blocks,
            bias,
            out,
            first,
            to,
            part,
            rows,
            outputs,
            size,
            block,
            wide,
            step,
            stages,
            is_whole,
            is_gelu,
        )


@triton.jit
def _angles(source, row, angled, head_dim: tl.constexpr):
    """Load cosines or sines for both lanes of each pair of some rows: float32 [rows, 1, head_dim / 2] twice."""
    each = tl.load(source + (row % angled)[:, None] * head_dim + tl.arange(0, head_dim)[None, :])
    return tl.split(tl.reshape(each, [row.shape[0], 1, head_dim // 2, 2]))


@triton.jit
def _qkv_rotary_tile(
    x_blocks,
    w_blocks,
    bias,
    cosine,
    sine,
    places,
    query,
    pool,
    first,
    to,
    rows,
    inputs,
    angled,
    page,
    of_query,
    of_key,
    block: tl.constexpr,
    wide: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    head_dim: tl.constexpr,
):
    lane = to + tl.arange(0, wide)
    row = first + tl.arange(0, block)
    # Loaded before the GEMM loop, which hides their latency.
    c0, c1 = _angles(cosine, row, angled, head_dim)
    s0, s1 = _angles(sine, row, angled, head_dim)
    total = tl.zeros((block, wide), tl.float32)
    for start in tl.range(0, inputs, step, num_stages=stages):
        total = tl.dot(x_blocks.load([first, start]), w_blocks.load([to, start]).T, total)
    dtype: tl.constexpr = query.dtype.element_ty
    total = (total + tl.load(bias + lane).to(tl.float32)[None, :]).to(dtype)
    if to < of_query + of_key:
        left, right = tl.split(tl.reshape(total.to(tl.float32), [block, wide // head_dim, head_dim // 2, 2]))
        total = tl.reshape(tl.join(left * c0 - right * s0, right * c1 + left * s1), [block, wide]).to(dtype)
    if to < of_query:
        into = query + row.to(tl.int64)[:, None] * of_query + lane[None, :]
        tl.store(into, total, mask=(row < rows)[:, None])
    else:
        place = tl.load(places + row, mask=row < rows, other=-1)
        is_value = to >= of_query + of_key
        column = lane - of_query - tl.where(is_value, of_key, 0)
        at = place + tl.where(is_value, page, 0)
        tl.store(pool + at[:, None] * of_key + column[None, :], total, mask=(place >= 0)[:, None])


@triton.jit
def _qkv_rotary_kernel(
    x_blocks,
    x_small,
    w_blocks,
    weight,
    bias,
    cosine,
    sine,
    places,
    query,
    pool,
    rows,
    inputs,
    angled,
    page,
    of_query,
    of_key,
    block: tl.constexpr,
    small: tl.constexpr,
    wide: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    head_dim: tl.constexpr,
    has_small: tl.constexpr,
    overlaps: tl.constexpr,
):
    first = tl.program_id(0) * block
    to = tl.program_id(1) * wide
    _ask(weight, first, to, 0, inputs, inputs, wide, overlaps)
    if has_small:
        if first + block > rows:
            _qkv_rotary_tile(
                x_small,
                w_blocks,
                bias,
                cosine,
                sine,
                places,
                query,
                pool,
                first,
                to,
                rows,
                inputs,
                angled,
                page,
                of_query,
                of_key,
                small,
                wide,
                step,
                stages,
                head_dim,
            )
        else:
            _qkv_rotary_tile(
                x_blocks,
                w_blocks,
                bias,
                cosine,
                sine,
                places,
                query,
                pool,
                first,
                to,
                rows,
                inputs,
                angled,
                page,
                of_query,
                of_key,
                block,
                wide,
                step,
                stages,
                head_dim,
            )
    else:
        _qkv_rotary_tile(
            x_blocks,
            w_blocks,
            bias,
            cosine,
            sine,
            places,
            query,
            pool,
            first,
            to,
            rows,
            inputs,
            angled,
            page,
            of_query,
            of_key,
            block,
            wide,
            step,
            stages,
            head_dim,
        )


def config_of(weight: Tensor, *, is_split_k: bool, is_gelu: bool = False) -> TileConfig:
    """Return the tiling of a layer."""
    if is_split_k:
        return DEEP_SPLIT_K if weight.shape[1] > weight.shape[0] else SPLIT_K
    return GELU if is_gelu else LINEAR


def supports(weight: Tensor) -> bool:
    """Whether the kernel supports these weights on this device with any epilogue."""
    outputs, inputs = weight.shape
    configs = (LINEAR, GELU, config_of(weight, is_split_k=True))
    fits = all(outputs % config.wide == 0 and inputs % (config.step * config.splits) == 0 for config in configs)
    return fits and weight.is_contiguous() and has_large_shared_memory(weight.device)


def linear(x: Tensor, weight: Tensor, bias: Tensor, *, is_gelu: bool = False, out: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, or its exact GELU, [..., outputs]. x: [..., inputs]; x and out are contiguous."""
    if out is None:
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, out, config_of(weight, is_split_k=False, is_gelu=is_gelu), is_gelu=is_gelu)
    return out


def split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T as slices to be summed: float32 [S, ..., outputs]. x: as for `linear`."""
    config = config_of(weight, is_split_k=True)
    out = torch.empty((config.splits, *x.shape[:-1], len(weight)), dtype=torch.float32, device=x.device)
    _multiply(x, weight, None, out, config)
    return out


def can_rotate(weight: Tensor, pool: Tensor, lanes: int) -> bool:
    """Whether `qkv_rotary` supports this layer: whole heads per tile, all lanes rotated, aligned queries, keys and
    values.
    """
    kv_heads, head_dim = pool.shape[3:]
    of_key = kv_heads * head_dim
    is_whole = lanes == head_dim and LINEAR.wide % head_dim == 0
    return is_whole and of_key % LINEAR.wide == 0 and len(weight) % of_key == 0


def qkv_rotary(
    x: Tensor, weight: Tensor, bias: Tensor, rotation: tuple[Tensor, Tensor], pool: Tensor, places: Tensor
) -> Tensor:
    """Project x to queries, keys and values, rotate as `rotary.rotate` does, and append keys and values to the pool.

    x: [T, inputs], contiguous; weight: [(heads + 2 * kv_heads) * head_dim, inputs]; rotation, pool, places: as for
    `rotary.rotate_append`, rotation of all lanes. Returns queries [T, heads, head_dim].
    """
    rows, inputs = x.shape
    page, kv_heads, head_dim = pool.shape[2:]
    of_key = kv_heads * head_dim
    of_query, config = len(weight) - 2 * of_key, LINEAR
    query = torch.empty((rows, of_query // head_dim, head_dim), dtype=x.dtype, device=x.device)
    _qkv_rotary_kernel[(triton.cdiv(rows, config.block), len(weight) // config.wide)](
        *(TensorDescriptor.from_tensor(x, [block, config.step]) for block in (config.block, SMALL)),
        TensorDescriptor.from_tensor(weight, [config.wide, config.step]),
        weight,
        bias,
        *rotation,
        places,
        query,
        pool,
        rows,
        inputs,
        rotation[0].numel() // head_dim,
        page,
        of_query,
        of_key,
        block=config.block,
        small=SMALL,
        wide=config.wide,
        step=config.step,
        stages=config.stages,
        head_dim=head_dim,
        has_small=0 < rows % config.block <= SMALL,
        num_warps=config.warps,
        **launch_options(x.device),
    )
    return query


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: TileConfig, *, is_gelu: bool = False
) -> None:
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    flat = x.view(rows, inputs)
    options = launch_options(x.device)
    _gemm_kernel[(triton.cdiv(rows, config.block), outputs // config.wide, config.splits)](
        *(TensorDescriptor.from_tensor(flat, [block, config.step]) for block in (config.block, SMALL)),
        TensorDescriptor.from_tensor(weight, [config.wide, config.step]),
        weight,
        out if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        inputs // config.splits,
        block=config.block,
        small=SMALL,
        wide=config.wide,
        step=config.step,
        stages=config.stages,
        has_small=0 < rows % config.block <= SMALL,
        is_whole=bias is not None,
        is_gelu=is_gelu,
        num_warps=config.warps,
        **options,
    )
