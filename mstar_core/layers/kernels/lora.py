"""Triton kernels for LoRA adapters of a batch whose tokens use several of them. Called through `lora`.

A block is up to 16 tokens with one adapter. The first kernel multiplies them by A, in splits of the inputs; the second
sums the splits, multiplies by B and adds to the tokens' outputs in place. Each token is in one block, so no two
programs write one value, and every sum has a fixed order. Empty blocks end at once: the grid depends on shapes alone.

Cost model: A and B of the adapters in use, read once per block, mostly from L2, and two launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TOKENS: Final = 16
"""Tokens of one block, the fewest that a matrix instruction takes."""

STEP: Final = 64
"""Inputs of one tile of A."""

BLOCK: Final = 128
"""Outputs of one program."""

SPLIT_INPUTS: Final = 512
"""Inputs of one split, so that few blocks still occupy many multiprocessors."""

MOST_SPLITS: Final = 16

MOST_JOINED: Final = 3
"""Most projections of one input."""


@triton.jit(do_not_specialize=["tokens"])
def shrink_kernel(
    x,
    down,
    order,
    blocks,
    hidden,
    tokens,
    inputs,
    slice_size,
    down_stride,
    rank: tl.constexpr,
    block_tokens: tl.constexpr,
    step: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute hidden[split, place in order, part * rank + i] = x @ A.T. Grid: (blocks, parts, splits)."""
    block, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(blocks + 3 * block)
    first = tl.load(blocks + 3 * block + 1)
    end = tl.load(blocks + 3 * block + 2)
    if end <= first:
        return
    place = first + tl.arange(0, block_tokens)
    is_used = place < end
    token = tl.load(order + place, mask=is_used, other=0).to(tl.int64)
    line = part * rank + tl.arange(0, rank)
    a_at = down + adapter.to(tl.int64) * down_stride + line[:, None].to(tl.int64) * inputs
    start = split * slice_size
    stop = tl.minimum(start + slice_size, inputs)
    total = tl.zeros((block_tokens, rank), dtype=tl.float32)
    for at in tl.range(start, stop, step):
        column = at + tl.arange(0, step)
        inside = column < stop
        values = tl.load(
            x + token[:, None] * inputs + column[None, :], mask=is_used[:, None] & inside[None, :], other=0.0
        )
        weights = tl.load(a_at + column[None, :], mask=inside[None, :], other=0.0)
        total = tl.dot(values.to(weights.dtype), weights.T, total, input_precision=precision)
    width = tl.num_programs(1) * rank
    into = hidden + (split * tokens + place[:, None]).to(tl.int64) * width + line[None, :]
    tl.store(into, total, mask=is_used[:, None])


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    hidden,
    up,
    order,
    blocks,
    out,
    tokens,
    outputs,
    splits,
    up_stride,
    out_stride,
    end_0,
    end_1,
    parts: tl.constexpr,
    rank: tl.constexpr,
    block_tokens: tl.constexpr,
    block_outputs: tl.constexpr,
    precision: tl.constexpr,
):
    """Add hidden @ B.T to out at the tokens of each block. Grid: (blocks, blocks of outputs).

    end_0, end_1: ends of the first projections' outputs; the last one ends with all.
    """
    block = tl.program_id(0)
    adapter = tl.load(blocks + 3 * block)
    first = tl.load(blocks + 3 * block + 1)
    end = tl.load(blocks + 3 * block + 2)
    if end <= first:
        return
    place = first + tl.arange(0, block_tokens)
    is_used = place < end
    token = tl.load(order + place, mask=is_used, other=0).to(tl.int64)
    left = tl.program_id(1) * block_outputs
    column = left + tl.arange(0, block_outputs)
    lane = tl.arange(0, rank)
    b_at = up + adapter.to(tl.int64) * up_stride + column[:, None].to(tl.int64) * rank + lane[None, :]
    total = tl.zeros((block_tokens, block_outputs), dtype=tl.float32)
    for part in tl.static_range(parts):
        low = 0 if part == 0 else (end_0 if part == 1 else end_1)
        high = outputs if part == parts - 1 else (end_0 if part == 0 else end_1)
        if (left < high) & (left + block_outputs > low):
            inside = (column >= low) & (column < high)
            value = tl.zeros((block_tokens, rank), dtype=tl.float32)
            for split in range(splits):
                line = (split * tokens + place[:, None]).to(tl.int64) * (parts * rank) + part * rank
                value += tl.load(hidden + line + lane[None, :], mask=is_used[:, None], other=0.0)
            weights = tl.load(b_at, mask=inside[:, None], other=0.0)
            total = tl.dot(value.to(weights.dtype), weights.T, total, input_precision=precision)
    at = out + token[:, None] * out_stride + column[None, :]
    stored = is_used[:, None] & (column < outputs)[None, :]
    before = tl.load(at, mask=stored, other=0.0)
    tl.store(at, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=stored)


def add_adapted(
    x: Tensor, out: Tensor, down: Tensor, up: Tensor, outputs: Sequence[int], order: Tensor, blocks: Tensor
) -> None:
    """Add the products of adapters to `out` in place.

    x: [T, inputs], contiguous. out: [T, sum of outputs], rows contiguous, any float dtype. down: [adapters, parts *
    rank, inputs] and up: [adapters, sum of outputs, rank], each adapter's rows contiguous. outputs: of each of up to
    three projections. order, blocks: see `AdapterBlocks`.
    """
    parts, rank, inputs, total = len(outputs), up.shape[2], x.shape[1], sum(outputs)
    assert parts <= MOST_JOINED, "the kernel has the ends of two projections before the last one"
    x = x.contiguous()
    slice_size = max(SPLIT_INPUTS, triton.cdiv(triton.cdiv(inputs, MOST_SPLITS), STEP) * STEP)
    splits = triton.cdiv(inputs, slice_size)
    precision = "ieee" if up.dtype == torch.float32 else "tf32"
    hidden = torch.empty((splits, order.shape[0], parts * rank), dtype=torch.float32, device=x.device)
    count = blocks.shape[0]
    shrink_kernel[(count, parts, splits)](
        x,
        down,
        order,
        blocks,
        hidden,
        order.shape[0],
        inputs,
        slice_size,
        down.stride(0),
        rank=rank,
        block_tokens=TOKENS,
        step=STEP,
        precision=precision,
    )
    ends = [sum(outputs[: at + 1]) for at in range(MOST_JOINED - 1)]
    expand_kernel[(count, triton.cdiv(total, BLOCK))](
        hidden,
        up,
        order,
        blocks,
        out,
        order.shape[0],
        total,
        splits,
        up.stride(0),
        out.stride(0),
        *ends,
        parts=parts,
        rank=rank,
        block_tokens=TOKENS,
        block_outputs=BLOCK,
        precision=precision,
    )
