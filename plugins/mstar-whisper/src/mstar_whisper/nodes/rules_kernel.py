"""Triton kernels of the rules of ids: three launches in place of some fifty. Used on CUDA by `rules`.

`forbid_kernel` forbids the ids that marks and tables forbid, and keeps of each block of ids the greatest logit of a
text and the sum of the timestamps. `choose_kernel` forbids all texts of a sequence whose timestamps together are
likelier than any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_whisper.checkpoint.config import TokenIds

BLOCK: Final = 2048
"""Ids of one program."""

PARTS: Final = 3
"""Numbers of a block: its greatest logit of a text, of a timestamp, and the sum of its timestamps over the latter."""

NEVER, NEVER_FIRST = 1, 2
"""Bits of an id in the table."""

LOWEST: Final = -3.0e38
"""In place of minus infinity: the difference of two infinities is undefined."""


@triton.jit
def forbid_kernel(
    logits,
    marks,
    table,
    parts,
    stride,
    vocab,
    first_time,
    end,
    no_times,
    most_first,
    width: tl.constexpr,
    form_at: tl.constexpr,
    block: tl.constexpr,
    never: tl.constexpr,
    never_first: tl.constexpr,
    lowest: tl.constexpr,
):
    """Set forbidden logits of a block of one sequence to minus infinity, and reduce the others to `parts`."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * block + tl.arange(0, block)
    inside = number < vocab
    at = marks + row * width
    written = tl.load(at)
    form = tl.load(at + form_at)
    value = tl.load(logits + row * stride + number, mask=inside, other=float("-inf")).to(tl.float32)
    forbidden = number < 0
    if written < 0:
        head = tl.load(at + width + written)
        forbidden = number != head
        form = form * 0 - 1
    if form >= 0:
        bits = tl.load(table + number, mask=inside, other=0).to(tl.int32)
        forbidden = (bits & never) != 0
        if written == 0:
            forbidden = forbidden | ((bits & never_first) != 0)
    is_time = number >= first_time
    if form > 0:
        last = tl.load(at + 1)
        before = tl.load(at + 2)
        time = tl.load(at + 3)
        ends_time = (written > 0) & (last >= first_time)
        begins_time = (written < 2) | (before >= first_time)
        is_closed = ends_time & begins_time
        is_open = ends_time & (begins_time == 0)
        forbidden = forbidden | (number == no_times) | (is_time & is_closed) | ((number < end) & is_open)
        # Times never decrease, and grow behind a pair.
        least = first_time
        if time > 0:
            least = time.to(tl.int32)
            if is_open == 0:
                least = least + 1
        forbidden = forbidden | (is_time & (number < least))
        if written == 0:
            forbidden = forbidden | (is_time == 0) | (number > most_first)
    tl.store(
        logits + row * stride + number,
        tl.full((block,), float("-inf"), tl.float32).to(logits.dtype.element_ty),
        mask=inside & forbidden,
    )
    if form > 0:
        allowed = inside & (forbidden == 0)
        text = tl.max(tl.where(allowed & (is_time == 0), value, lowest), axis=0)
        top = tl.max(tl.where(allowed & is_time, value, lowest), axis=0)
        total = tl.sum(tl.where(allowed & is_time, tl.exp(value - top), 0.0), axis=0)
        into = parts + (row * tl.num_programs(1) + tl.program_id(1)) * 3
        tl.store(into, text)
        tl.store(into + 1, top)
        tl.store(into + 2, total)


@triton.jit
def choose_kernel(
    logits,
    marks,
    parts,
    stride,
    first_time,
    blocks,
    width: tl.constexpr,
    form_at: tl.constexpr,
    block: tl.constexpr,
    most_blocks: tl.constexpr,
    lowest: tl.constexpr,
):
    """Set the texts of a block to minus infinity if a timestamp has to be next."""
    row = tl.program_id(0).to(tl.int64)
    at = marks + row * width
    if (tl.load(at) >= 0) & (tl.load(at + form_at) > 0):
        part = tl.arange(0, most_blocks)
        known = part < blocks
        source = parts + (row * blocks + part) * 3
        text = tl.max(tl.load(source, mask=known, other=lowest), axis=0)
        tops = tl.load(source + 1, mask=known, other=lowest)
        top = tl.max(tops, axis=0)
        total = tl.sum(tl.load(source + 2, mask=known, other=0.0) * tl.exp(tops - top), axis=0)
        if top + tl.log(total) > text:
            number = tl.program_id(1) * block + tl.arange(0, block)
            tl.store(
                logits + row * stride + number,
                tl.full((block,), float("-inf"), tl.float32).to(logits.dtype.element_ty),
                mask=number < first_time,
            )


@triton.jit
def after_kernel(marks, token, out, first_time, width: tl.constexpr, block: tl.constexpr):
    """Write the marks after one more id of a sequence."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < width
    written = tl.load(marks + row * width)
    drawn = tl.load(token + row)
    if written < 0:
        drawn = drawn * 0
    old = tl.load(marks + row * width + at, mask=inside, other=0)
    earlier = tl.load(marks + row * width + at - 1, mask=inside & (at > 0), other=0)
    new = tl.where(at == 0, written + 1, tl.where(at == 1, drawn, tl.where(at == 2, earlier, old)))
    new = tl.where((at == 3) & (drawn >= first_time), drawn, new)
    tl.store(out + row * width + at, new, mask=inside)


def after(marks: Tensor, token: Tensor, first_time: int) -> Tensor:
    """See `Rules.after`. marks: contiguous."""
    out = torch.empty_like(marks)
    width = marks.shape[1]
    after_kernel[(len(marks),)](
        marks, token, out, first_time, width=width, block=triton.next_power_of_2(width), num_warps=1
    )
    return out


def table_of(ids: TokenIds, vocab: int) -> Tensor:
    """Return the bits of each id, int8 [vocab], on the host."""
    table = torch.zeros(vocab, dtype=torch.int8)
    table[list(ids.suppress)] |= NEVER
    table[list(ids.suppress_first)] |= NEVER_FIRST
    return table


def constrain(logits: Tensor, marks: Tensor, table: Tensor, ids: TokenIds, form_at: int) -> None:
    """Forbid ids in place, see `Rules.constrained`.

    logits: [n, vocab] of any float type, rows contiguous. marks: int64 [n, width], contiguous. table: see `table_of`.
    form_at: place of the form among the marks.
    """
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    parts = torch.empty((count, blocks, PARTS), dtype=torch.float32, device=logits.device)
    most_first = vocab if ids.most_first_time is None else ids.first_time + ids.most_first_time
    forbid_kernel[(count, blocks)](
        logits,
        marks,
        table,
        parts,
        logits.stride(0),
        vocab,
        ids.first_time,
        ids.end,
        ids.no_times,
        most_first,
        width=marks.shape[1],
        form_at=form_at,
        block=BLOCK,
        never=NEVER,
        never_first=NEVER_FIRST,
        lowest=LOWEST,
        num_warps=8,
    )
    choose_kernel[(count, triton.cdiv(ids.first_time, BLOCK))](
        logits,
        marks,
        parts,
        logits.stride(0),
        ids.first_time,
        blocks,
        width=marks.shape[1],
        form_at=form_at,
        block=BLOCK,
        most_blocks=triton.next_power_of_2(blocks),
        lowest=LOWEST,
        num_warps=8,
    )
