"""Products of few rows, a frame or a few, as one Triton kernel. Used by `nodes.linear` on CUDA; needs triton.

Weights are [outputs, inputs] in bfloat16 or float16. Every sum has a fixed order: the same inputs, the same bits.

Cost model: what a multiprocessor can bring from the second-level cache, some 64 bytes a cycle, for tiles of rows and of
weights that the tensor copy engine fetches. Weights are asked for while the kernel before still runs (programmatic
dependent launch). Two tokens of a frame of 258 are left over by whole tiles: theirs is a small matrix. Layers with few
outputs are cut along their inputs too, and the norm behind them sums the slices.
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
"""Rows up to which the last tile is a small matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a product is cut: `block` rows by `wide` outputs by `step` inputs a tile, `stages` tiles on their way.

    splits: slices of the inputs, each summed on its own.
    """

    block: int
    wide: int
    step: int
    stages: int
    warps: int = 4
    splits: int = 1


WHOLE: Final = Cut(block=64, wide=128, step=128, stages=3)
"""Of layers whose result is read as it is."""

GELU: Final = Cut(block=128, wide=64, step=64, stages=4)
"""Of those that pass a GELU."""

SLICED: Final = Cut(block=64, wide=64, step=128, stages=3, splits=2)
"""Of layers whose result is summed by a norm."""

DEEP: Final = Cut(block=128, wide=128, step=64, stages=4, warps=8, splits=4)
"""Of those with more inputs than outputs."""


@triton.jit
def _gelu(x):
    """x times the normal distribution's share below x; its error is below 2e-7 of the larger of 1 and |x|.

    Source: Abramowitz and Stegun 7.1.26, which needs one power and one division where erf takes some forty operations.
    """
    size = tl.abs(x)
    t = 1.0 / (1.0 + 0.23164189 * size)  # 0.3275911 / sqrt(2)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tl.maximum(x, 0.0) - 0.5 * size * poly * tl.exp2(-0.72134752 * x * x)  # log2(e) / 2


@triton.jit
def _tile(
    x_blocks, w_blocks, bias, out, first, to, part, rows, outputs, size, block: tl.constexpr, wide: tl.constexpr,
    step: tl.constexpr, stages: tl.constexpr, is_whole: tl.constexpr, is_gelu: tl.constexpr,
):  # fmt: skip
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
    """Let the next kernel start, ask for this program's weights, and wait for the kernel before."""
    if overlaps:
        gdc_launch_dependents()
        if first == 0:
            lines = weight + (to + tl.arange(0, wide)).to(tl.int64) * inputs + part * size
            prefetch_l2(lines, size * 2)
        gdc_wait()


@triton.jit
def _product_kernel(
    x_blocks, x_small, w_blocks, weight, bias, out, rows, outputs, inputs, size, block: tl.constexpr,
    small: tl.constexpr, wide: tl.constexpr, step: tl.constexpr, stages: tl.constexpr, has_small: tl.constexpr,
    is_whole: tl.constexpr, is_gelu: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block
    to = tl.program_id(1) * wide
    part = tl.program_id(2)
    _ask(weight, first, to, part, inputs, size, wide, overlaps)
    if has_small:
        if first + block > rows:
            _tile(
                x_small, w_blocks, bias, out, first, to, part, rows, outputs, size, small, wide, step, stages,
                is_whole, is_gelu,
            )  # fmt: skip
        else:
            _tile(
                x_blocks, w_blocks, bias, out, first, to, part, rows, outputs, size, block, wide, step, stages,
                is_whole, is_gelu,
            )  # fmt: skip
    else:
        _tile(
            x_blocks, w_blocks, bias, out, first, to, part, rows, outputs, size, block, wide, step, stages, is_whole,
            is_gelu,
        )  # fmt: skip


@triton.jit
def _angles(source, row, angled, head_dim: tl.constexpr):
    """What lies at `source` for both lanes of each pair of some rows: float32 [rows, 1, head_dim / 2] twice."""
    each = tl.load(source + (row % angled)[:, None] * head_dim + tl.arange(0, head_dim)[None, :])
    return tl.split(tl.reshape(each, [row.shape[0], 1, head_dim // 2, 2]))


@triton.jit
def _turned_tile(
    x_blocks, w_blocks, bias, cosine, sine, places, query, pool, first, to, rows, inputs, angled, page, of_query,
    of_key, block: tl.constexpr, wide: tl.constexpr, step: tl.constexpr, stages: tl.constexpr, head_dim: tl.constexpr,
):  # fmt: skip
    lane = to + tl.arange(0, wide)
    row = first + tl.arange(0, block)
    # Read beside the tiles of the product: behind it they would be waited for.
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
def _turned_product_kernel(
    x_blocks, x_small, w_blocks, weight, bias, cosine, sine, places, query, pool, rows, inputs, angled, page,
    of_query, of_key, block: tl.constexpr, small: tl.constexpr, wide: tl.constexpr, step: tl.constexpr,
    stages: tl.constexpr, head_dim: tl.constexpr, has_small: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block
    to = tl.program_id(1) * wide
    _ask(weight, first, to, 0, inputs, inputs, wide, overlaps)
    if has_small:
        if first + block > rows:
            _turned_tile(
                x_small, w_blocks, bias, cosine, sine, places, query, pool, first, to, rows, inputs, angled, page,
                of_query, of_key, small, wide, step, stages, head_dim,
            )  # fmt: skip
        else:
            _turned_tile(
                x_blocks, w_blocks, bias, cosine, sine, places, query, pool, first, to, rows, inputs, angled, page,
                of_query, of_key, block, wide, step, stages, head_dim,
            )  # fmt: skip
    else:
        _turned_tile(
            x_blocks, w_blocks, bias, cosine, sine, places, query, pool, first, to, rows, inputs, angled, page,
            of_query, of_key, block, wide, step, stages, head_dim,
        )  # fmt: skip


def cut_of(weight: Tensor, *, is_sliced: bool, is_gelu: bool = False) -> Cut:
    """How a layer is cut."""
    if is_sliced:
        return DEEP if weight.shape[1] > weight.shape[0] else SLICED
    return GELU if is_gelu else WHOLE


def takes(weight: Tensor) -> bool:
    """Whether the kernel can multiply by these weights here, whatever is made of the result."""
    outputs, inputs = weight.shape
    cuts = (WHOLE, GELU, cut_of(weight, is_sliced=True))
    fits = all(outputs % cut.wide == 0 and inputs % (cut.step * cut.splits) == 0 for cut in cuts)
    return fits and weight.is_contiguous() and has_large_shared_memory(weight.device)


def whole(x: Tensor, weight: Tensor, bias: Tensor, *, is_gelu: bool = False, out: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, or the exact GELU of it. x: [..., inputs], contiguous, as is out. Returns [..., outputs]."""
    if out is None:
        out = torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device)
    _multiply(x, weight, bias, out, cut_of(weight, is_sliced=False, is_gelu=is_gelu), is_gelu=is_gelu)
    return out


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in slices to be summed: float32 [S, ..., outputs]. x: as for `whole`."""
    cut = cut_of(weight, is_sliced=True)
    out = torch.empty((cut.splits, *x.shape[:-1], len(weight)), dtype=torch.float32, device=x.device)
    _multiply(x, weight, None, out, cut)
    return out


def turns(weight: Tensor, pool: Tensor, lanes: int) -> bool:
    """Whether `turned` can do it: whole heads in each tile, all lanes told, and queries, keys and values apart."""
    kv_heads, head_dim = pool.shape[3:]
    of_key = kv_heads * head_dim
    is_whole = lanes == head_dim and WHOLE.wide % head_dim == 0
    return is_whole and of_key % WHOLE.wide == 0 and len(weight) % of_key == 0


def turned(
    x: Tensor, weight: Tensor, bias: Tensor, rotation: tuple[Tensor, Tensor], pool: Tensor, places: Tensor
) -> Tensor:
    """Queries, keys and values of x, turned as `fused.turn` does; keys and values go to their places in the pool.

    x: [T, inputs], contiguous; weight: [(heads + 2 * kv_heads) * head_dim, inputs]; rotation, pool, places: as for
    `fused.turn_append`, rotation of all lanes. Returns queries [T, heads, head_dim].
    """
    rows, inputs = x.shape
    page, kv_heads, head_dim = pool.shape[2:]
    of_key = kv_heads * head_dim
    of_query, cut = len(weight) - 2 * of_key, WHOLE
    query = torch.empty((rows, of_query // head_dim, head_dim), dtype=x.dtype, device=x.device)
    _turned_product_kernel[(triton.cdiv(rows, cut.block), len(weight) // cut.wide)](
        *(TensorDescriptor.from_tensor(x, [block, cut.step]) for block in (cut.block, SMALL)),
        TensorDescriptor.from_tensor(weight, [cut.wide, cut.step]), weight, bias, *rotation, places, query, pool, rows,
        inputs, rotation[0].numel() // head_dim, page, of_query, of_key, block=cut.block, small=SMALL,
        wide=cut.wide, step=cut.step, stages=cut.stages, head_dim=head_dim, has_small=0 < rows % cut.block <= SMALL,
        num_warps=cut.warps, **launch_options(x.device),
    )  # fmt: skip
    return query


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, cut: Cut, *, is_gelu: bool = False) -> None:
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    flat = x.view(rows, inputs)
    options = launch_options(x.device)
    _product_kernel[(triton.cdiv(rows, cut.block), outputs // cut.wide, cut.splits)](
        *(TensorDescriptor.from_tensor(flat, [block, cut.step]) for block in (cut.block, SMALL)),
        TensorDescriptor.from_tensor(weight, [cut.wide, cut.step]), weight, out if bias is None else bias, out, rows,
        outputs, inputs, inputs // cut.splits, block=cut.block, small=SMALL, wide=cut.wide, step=cut.step,
        stages=cut.stages, has_small=0 < rows % cut.block <= SMALL, is_whole=bias is not None, is_gelu=is_gelu,
        num_warps=cut.warps, **options,
    )  # fmt: skip
