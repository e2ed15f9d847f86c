"""Triton kernels of a sparse mixture of experts. Called by `layers.moe` on CUDA, and captured in CUDA graphs.

Four kernels: route tokens to experts, sort the (token, expert) pairs by expert, gate-up GEMM with the activation in its
epilogue, down GEMM with the weight of the pair in its epilogue. The result is one term per expert of a token; the next
kernel of the layer adds the terms in a fixed order. There are no atomics and no host synchronization.

Cost model for few tokens: bytes of the chosen experts over the memory bandwidth. A program reads the weights of one
block of outputs of one expert and multiplies them with the few tokens of that expert. The grid is an upper bound of the
tiles, so programs without a tile end at once.

Float8 weights have one float32 scale per output, which multiplies the sum. With few tokens they are widened as they are
read. With many, the tokens may come in float8 as well, with one scale each; two more kernels round them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mstar_core.layers.kernels.elementwise import activation, round_rows, sum_partials
from mstar_core.layers.kernels.launch import has_large_shared_memory, launch_options

if TYPE_CHECKING:
    from torch import Tensor

FEW_TOKENS: Final = 64
"""Most tokens of a decode step: tiles of 16 rows, and bandwidth decides."""

SORT_CHUNK: Final = 1024
"""Pairs that a program of the sort reads at once."""

MANY_ROWS: Final = 128
"""Mean pairs per expert from which tiles have 128 rows."""

LEAST_STEP: Final = 16
"""Inputs of one tensor-core instruction."""

# Counts that differ from step to step are not specialised: a prompt of another length must not compile a kernel.

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoETiling:
    """Tiling of one GEMM: `block` outputs by `step` inputs by `rows` pairs per tile, `stages` tiles in flight."""

    block: int
    step: int
    rows: int
    stages: int
    warps: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Pairs of one step, by pair, and their tiles.

    Pair p is term p // T of token p % T. experts: int32 [P]; weights: [P] in the model's dtype. order: int32 [P], the
    pairs by expert; tiles: int32 [3, most tiles], the expert (-1: none), the first place in `order` and the rows.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    tiles: Tensor


@triton.jit(do_not_specialize=["tokens", "part_stride"])
def _route_kernel(
    logits,
    experts,
    weights,
    tokens,
    columns,
    part_stride,
    count: tl.constexpr,
    chosen: tl.constexpr,
    shared: tl.constexpr,
    block: tl.constexpr,
    slots: tl.constexpr,
    parts: tl.constexpr,
    normalizes: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Choose the experts of one token. A further column of logits is the gate of the shared expert."""
    token = tl.program_id(0)
    at = tl.arange(0, block)
    dtype: tl.constexpr = weights.dtype.element_ty
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    row = logits + token.to(tl.int64) * columns
    value = sum_partials(row, part_stride, at, at < count, parts, dtype)
    value = tl.where(at < count, value, float("-inf"))
    share = tl.exp(value - tl.max(value, axis=0))
    share = share / tl.sum(share, axis=0)
    slot = tl.arange(0, slots)
    best = tl.zeros((slots,), tl.float32)
    expert = tl.zeros((slots,), tl.int32)
    for place in tl.static_range(chosen):
        # NaN has no greatest value. The index must stay valid, because the GEMMs read weights by it.
        top = tl.minimum(tl.argmax(share, axis=0), count - 1)
        best = tl.where(slot == place, tl.max(share, axis=0), best)
        expert = tl.where(slot == place, top, expert)
        share = tl.where(at == top, -1.0, share)
    if normalizes:
        best = best / tl.sum(best, axis=0)
    if shared > 0:
        only = tl.arange(0, 1)
        gate = sum_partials(row + count, part_stride, only, only < 1, parts, dtype)
        is_shared = slot >= chosen
        best = tl.where(is_shared, 1.0 / (1.0 + tl.exp(-tl.sum(gate, axis=0))), best)
        expert = tl.where(is_shared, count + slot - chosen, expert)
    into = slot * tokens + token
    tl.store(experts + into, expert, mask=slot < chosen + shared)
    tl.store(weights + into, best.to(dtype), mask=slot < chosen + shared)


@triton.jit(do_not_specialize=["pairs", "most_tiles"])
def _sort_kernel(
    experts,
    order,
    tiles,
    pairs,
    most_tiles,
    chunk: tl.constexpr,
    bins: tl.constexpr,
    rows: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Write the pairs and the tiles of one expert behind those of the experts before it. Grid: (experts,)."""
    own = tl.program_id(0)
    at = tl.arange(0, chunk)
    bin_of = tl.arange(0, bins)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    counts = tl.zeros((bins,), tl.int32)
    for start in range(0, pairs, chunk):
        # The last bin takes the lanes past the end.
        expert = tl.load(experts + start + at, mask=start + at < pairs, other=bins - 1)
        counts += tl.histogram(expert, bins)
    counts = tl.where(bin_of == bins - 1, 0, counts)
    tile_counts = (counts + rows - 1) // rows
    first = tl.sum(tl.where(bin_of < own, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(bin_of < own, tile_counts, 0), axis=0)
    count = tl.sum(tl.where(bin_of == own, counts, 0), axis=0)
    for number in range(0, (count + rows - 1) // rows):
        into = tiles + first_tile + number
        tl.store(into, own)
        tl.store(into + most_tiles, first + number * rows)
        tl.store(into + 2 * most_tiles, tl.minimum(count - number * rows, rows))
    if own == 0:
        for start in range(tl.sum(tile_counts, axis=0), most_tiles, chunk):
            tl.store(tiles + start + at, tl.full((chunk,), -1, tl.int32), mask=start + at < most_tiles)
    done = first
    for start in range(0, pairs, chunk):
        expert = tl.load(experts + start + at, mask=start + at < pairs, other=bins - 1)
        is_own = (expert == own).to(tl.int32)
        tl.store(order + done + tl.cumsum(is_own, axis=0) - 1, start + at, mask=is_own > 0)
        done += tl.sum(is_own, axis=0)


@triton.jit
def _tile(experts, order, tiles, number, most_tiles, row, is_single: tl.constexpr):
    """Return the expert (-1: none), the first place, the rows and the pairs of a tile. row: 0, 1, ... of the tile."""
    if is_single:
        # The experts of a single token differ, so each pair is a tile.
        expert = tl.load(experts + number)
        first = number
        count = 1
        pair = row + number
    else:
        expert = tl.load(tiles + number)
        first = tl.load(tiles + most_tiles + number, mask=expert >= 0, other=0)
        count = tl.load(tiles + 2 * most_tiles + number, mask=expert >= 0, other=0)
        pair = tl.load(order + first + row, mask=row < count, other=0)
    return expert, first, count, pair


@triton.jit
def _product(
    x_at,
    w_at,
    at,
    inside,
    inputs,
    total,
    step: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
    is_even: tl.constexpr,
    widens: tl.constexpr,
):
    """Return the product of weights [outputs, inputs] and rows [rows, inputs], transposed: float32 [outputs, rows].

    is_even: the step divides the inputs. widens: the weights are float8, and the rows are not.
    """
    for start in tl.range(0, inputs, step, num_stages=stages):
        if is_even:
            weight = tl.load(w_at)
            given = tl.load(x_at, mask=inside[:, None], other=0.0)
        else:
            known = (start + at < inputs)[None, :]
            weight = tl.load(w_at, mask=known, other=0.0)
            given = tl.load(x_at, mask=inside[:, None] & known, other=0.0)
        if widens:
            # As exact as the direct conversion, which needs a slow instruction per value.
            weight = weight.to(tl.float16).to(tl.float32).to(given.dtype)
        total = tl.dot(weight, given.T, total, input_precision=precision)
        w_at += step
        x_at += step
    return total


@triton.jit(do_not_specialize=["tokens", "most_tiles"])
def _gate_up_kernel(
    x,
    x_scale,
    weight,
    scale,
    experts,
    order,
    tiles,
    out,
    tokens,
    inner,
    inputs,
    most_tiles,
    block: tl.constexpr,
    step: tl.constexpr,
    rows: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
    is_single: tl.constexpr,
    is_even: tl.constexpr,
    has_scale: tl.constexpr,
    is_rounded: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute silu(gate) * up of one tile: out[place in order, inner]. Grid: (blocks of inner, tiles).

    weight: [experts, 2 * inner, inputs]. A program reads half a block of gate rows and the half block of up rows.
    scale: [experts, 2 * inner]; x_scale: [tokens], if x is float8.
    """
    half: tl.constexpr = block // 2
    start = tl.program_id(0) * half
    row = tl.arange(0, rows)
    lane = tl.arange(0, block)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, count, pair = _tile(experts, order, tiles, tl.program_id(1), most_tiles, row, is_single)
    if expert >= 0:
        # Outputs past the end read the last weights again. Their results are not stored.
        output = tl.minimum(start + lane % half, inner - 1) + (lane // half) * inner
        at = tl.arange(0, step)
        w_at = weight + (expert.to(tl.int64) * 2 * inner + output)[:, None] * inputs + at[None, :]
        x_at = x + (pair % tokens).to(tl.int64)[:, None] * inputs + at[None, :]
        total = tl.zeros((block, rows), tl.float32)
        widens: tl.constexpr = has_scale and not is_rounded
        total = _product(x_at, w_at, at, row < count, inputs, total, step, stages, precision, is_even, widens)
        if has_scale:
            total *= tl.load(scale + expert.to(tl.int64) * 2 * inner + output)[:, None]
        if is_rounded:
            total *= tl.load(x_scale + pair % tokens)[None, :]
        # Rounded where separate layers would round.
        dtype: tl.constexpr = out.dtype.element_ty
        both = total.to(dtype).to(tl.float32)
        gate, up = tl.split(both.reshape(2, half, rows).permute(1, 2, 0))
        into = start + tl.arange(0, half)
        place = out + (first + row).to(tl.int64)[None, :] * inner + into[:, None]
        inside = (into[:, None] < inner) & (row[None, :] < count)
        tl.store(place, (activation(gate, dtype, False) * up).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["most_tiles"])
def _down_kernel(
    x,
    x_scale,
    weight,
    scale,
    experts,
    weights,
    order,
    tiles,
    out,
    width,
    inputs,
    most_tiles,
    block: tl.constexpr,
    step: tl.constexpr,
    rows: tl.constexpr,
    stages: tl.constexpr,
    precision: tl.constexpr,
    is_single: tl.constexpr,
    is_even: tl.constexpr,
    has_scale: tl.constexpr,
    is_rounded: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Compute weight of the pair * down(x) of one tile: out[pair, width]. Grid: (blocks of width, tiles).

    x: [pairs, inputs] by place in `order`; weight: [experts, width, inputs]. scale: [experts, width]; x_scale: [pairs],
    if x is float8.
    """
    start = tl.program_id(0) * block
    row = tl.arange(0, rows)
    if overlaps:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, count, pair = _tile(experts, order, tiles, tl.program_id(1), most_tiles, row, is_single)
    if expert >= 0:
        into = start + tl.arange(0, block)
        output = tl.minimum(into, width - 1)
        at = tl.arange(0, step)
        w_at = weight + (expert.to(tl.int64) * width + output)[:, None] * inputs + at[None, :]
        x_at = x + (first + row).to(tl.int64)[:, None] * inputs + at[None, :]
        total = tl.zeros((block, rows), tl.float32)
        widens: tl.constexpr = has_scale and not is_rounded
        total = _product(x_at, w_at, at, row < count, inputs, total, step, stages, precision, is_even, widens)
        if has_scale:
            total *= tl.load(scale + expert.to(tl.int64) * width + output)[:, None]
        if is_rounded:
            total *= tl.load(x_scale + first + row, mask=row < count, other=0.0)[None, :]
        total *= tl.load(weights + pair, mask=row < count, other=0.0).to(tl.float32)[None, :]
        place = out + pair.to(tl.int64)[None, :] * width + into[:, None]
        inside = (into[:, None] < width) & (row[None, :] < count)
        tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def supports(x: Tensor, gate_up: Tensor, down: Tensor, scales: tuple[Tensor, Tensor] | None = None) -> bool:
    """Return whether the kernels can process these tensors: see `expert_terms`."""
    expected = (x.dtype,) if scales is None else (torch.float8_e4m3fn,)
    are_known = x.dtype in DTYPES and gate_up.dtype in expected and down.dtype in expected
    are_contiguous = x.dim() == 2 and x.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    return are_known and are_contiguous


def tilings(x: Tensor, inner: int, pairs: int, experts: int, *, widens: bool = False) -> tuple[MoETiling, MoETiling]:
    """Return the tilings of the gate-up and of the down GEMM. Fixed per device and range of tokens, never measured.

    Within a range a row's bits do not depend on its batch. x: [T, width]. widens: the weights are float8, and the rows
    are not.
    """
    tokens, width = x.shape
    has_room = has_large_shared_memory(x.device)
    if x.dtype == torch.float32:
        tiling = MoETiling(block=64, step=32, rows=16, stages=2)
    elif tokens <= FEW_TOKENS:
        tiling = MoETiling(block=64, step=128, rows=16, stages=4 if has_room else 3)
        if widens and has_room:
            # Measured for the Thinker's sizes: 0.91 of the time for 1 and 32 tokens. The down GEMM gains nothing.
            small = MoETiling(block=32, step=128, rows=16, stages=6, warps=2)
            return _fitted(small, width), _fitted(tiling, inner)
    elif pairs <= MANY_ROWS * experts:
        tiling = MoETiling(block=128, step=64, rows=64, stages=4 if has_room else 2)
    elif widens:
        # Weights that are widened in registers gave wrong sums with 8 warps and 3 stages (Triton 3.6 on an H200).
        tiling = MoETiling(block=128, step=64, rows=128, stages=3 if has_room else 2)
    else:
        tiling = MoETiling(block=128, step=64, rows=128, stages=4 if has_room else 2, warps=8)
    return _fitted(tiling, width), _fitted(tiling, inner)


def sort_chunk(pairs: int) -> int:
    """Return the pairs that a program of the sort reads at once."""
    return min(SORT_CHUNK, max(128, int(triton.next_power_of_2(pairs))))


def token_ranges(x: Tensor, inner: int, slots: int, experts: int) -> list[int]:
    """Return the least number of tokens of each range with compiled kernels of its own. x: [T, width], any T.

    inner: width of an expert; slots: experts of a token; experts: all of them.
    """
    edges = {1, 2, FEW_TOKENS + 1, MANY_ROWS * experts // slots + 1}
    edges |= {size // slots + 1 for size in (128, 256, 512) if size // slots > 1}
    first_tokens: dict[object, int] = {}
    for tokens in sorted(edges):
        tiling = tilings(x.new_empty(tokens, x.shape[1]), inner, tokens * slots, experts)
        first_tokens.setdefault((tokens == 1, tiling, sort_chunk(tokens * slots)), tokens)
    return list(first_tokens.values())


def _fitted(tiling: MoETiling, inputs: int) -> MoETiling:
    """Return the tiling with the greatest step that divides the inputs, or the least that the hardware has."""
    return replace(tiling, step=max(LEAST_STEP, min(tiling.step, inputs & -inputs)))


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return the greatest number of tiles: every expert may have one that is not full."""
    return min(pairs, experts + pairs // rows)


def route(
    logits: Tensor,
    experts: int,
    chosen: int,
    dtype: torch.dtype,
    rows: int,
    *,
    shared: int = 0,
    normalizes: bool = True,
) -> Routing:
    """Route tokens by the router's logits, and sort the pairs by expert into tiles of at most `rows` pairs.

    logits: [T, experts], or with one more column for the gate of the shared expert; or partial sums of them,
    [S, T, ...]; contiguous. They are rounded to dtype once, like the output of a linear layer.
    shared: experts behind the `experts` routed ones that every token uses.
    """
    tokens, columns, device = logits.shape[-2], logits.shape[-1], logits.device
    slots, total = chosen + shared, experts + shared
    pairs = tokens * slots
    most = most_tiles(pairs, total, rows)
    sorted_pairs, order = (torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(2))
    weights = torch.empty(pairs, dtype=dtype, device=device)
    tiles = torch.empty((3, most), dtype=torch.int32, device=device)
    _route_kernel[(tokens,)](
        logits,
        sorted_pairs,
        weights,
        tokens,
        columns,
        tokens * columns,
        count=experts,
        chosen=chosen,
        shared=shared,
        block=triton.next_power_of_2(experts),
        slots=triton.next_power_of_2(slots),
        parts=logits.shape[0] if logits.dim() == 3 else 1,
        normalizes=normalizes,
        num_warps=1,
        **launch_options(device),
    )
    if tokens > 1:
        _sort_kernel[(total,)](
            sorted_pairs,
            order,
            tiles,
            pairs,
            most,
            chunk=sort_chunk(pairs),
            bins=triton.next_power_of_2(total + 1),
            rows=rows,
            num_warps=4,
            **launch_options(device),
        )
    return Routing(experts=sorted_pairs, weights=weights, order=order, tiles=tiles)


def expert_terms(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    chosen: int,
    *,
    shared: int = 0,
    normalizes: bool = True,
    scales: tuple[Tensor, Tensor] | None = None,
    rounds_inputs: bool = False,
    forced: tuple[MoETiling, MoETiling] | None = None,
) -> Tensor:
    """Return the weighted outputs of each token's experts, to be summed: [chosen + shared, T, width].

    x: [T, width]; logits: see `route`; gate_up: [E, 2 * inner, width], gate rows first; down: [E, width, inner].
    The last `shared` of the E experts are used by every token. scales: of float8 gate_up and down, float32
    [E, 2 * inner] and [E, width]. rounds_inputs: more than FEW_TOKENS tokens are rounded to float8 as well. forced:
    tilings to measure, for benchmarks; of equal rows.
    """
    (tokens, width), (total, _, inner) = x.shape, down.shape
    slots = chosen + shared
    out = x.new_empty(slots, tokens, width)
    if not tokens:
        return out
    is_rounded = scales is not None and rounds_inputs and tokens > FEW_TOKENS
    widens = scales is not None and not is_rounded
    first, second = forced or tilings(x, inner, tokens * slots, total, widens=widens)
    routing = route(logits, total - shared, chosen, x.dtype, first.rows, shared=shared, normalizes=normalizes)
    hidden = x.new_empty(tokens * slots, inner)
    most, is_single = routing.tiles.shape[1], tokens == 1
    precision, options = "ieee" if x.dtype == torch.float32 else "tf32", launch_options(x.device)
    gate_up_scale, down_scale = scales or (None, None)
    given, given_scale = round_rows(x) if is_rounded else (x, None)
    _gate_up_kernel[(triton.cdiv(inner, first.block // 2), most)](
        given,
        given_scale,
        gate_up,
        gate_up_scale,
        routing.experts,
        routing.order,
        routing.tiles,
        hidden,
        tokens,
        inner,
        width,
        most,
        block=first.block,
        step=first.step,
        rows=first.rows,
        stages=first.stages,
        precision=precision,
        is_single=is_single,
        is_even=not width % first.step,
        has_scale=scales is not None,
        is_rounded=is_rounded,
        num_warps=first.warps,
        **options,
    )
    values, values_scale = round_rows(hidden) if is_rounded else (hidden, None)
    _down_kernel[(triton.cdiv(width, second.block), most)](
        values,
        values_scale,
        down,
        down_scale,
        routing.experts,
        routing.weights,
        routing.order,
        routing.tiles,
        out,
        width,
        inner,
        most,
        block=second.block,
        step=second.step,
        rows=second.rows,
        stages=second.stages,
        precision=precision,
        is_single=is_single,
        is_even=not inner % second.step,
        has_scale=scales is not None,
        is_rounded=is_rounded,
        num_warps=second.warps,
        **options,
    )
    return out
