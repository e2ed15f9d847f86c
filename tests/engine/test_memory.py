"""Attention over memories: captured and uncaptured forwards equal a plain computation, whatever lies in other pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mstar_core.engine.attention.pytorch import TorchAttention
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.sampling.masks import allowed_bits
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

PAGE, HEADS, WIDTH = 4, 2, 8
LENGTHS = (7, 4, 7)
"""Tokens of the memories of rows 1, 3 and 5 of the page tables; rows 0, 2 and 4 are the sequences."""


def filled() -> tuple[list[Tensor], np.ndarray, list[tuple[Tensor, Tensor]]]:
    """A pool whose memories hold known values and whose other places are not numbers; its tables; the memories."""
    generator = torch.Generator().manual_seed(0)
    pool = torch.full((13, 2, PAGE, HEADS, WIDTH), float("nan"))
    tables = np.zeros((6, 2), dtype=np.int32)
    known = []
    for number, length in enumerate(LENGTHS):
        keys, values = torch.randn(2, length, HEADS, WIDTH, generator=generator)
        pages = [2 * number + 1, 2 * number + 2][: -(-length // PAGE)]
        tables[2 * number + 1] = (pages * 2)[:2]
        for at in range(length):
            pool[pages[at // PAGE], 0, at % PAGE], pool[pages[at // PAGE], 1, at % PAGE] = keys[at], values[at]
        known.append((keys, values))
    return [pool], tables, known


def plain(query: Tensor, memory: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of tokens [t, heads, width] over one memory."""
    parts = (part.transpose(0, 1)[None] for part in (query, *memory))
    q, k, v = parts
    return scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)


def metadata(tables: np.ndarray, counts: np.ndarray | int) -> AttentionMetadata:
    """Sequences with empty caches and the memories of the rows behind theirs."""
    rows = np.array([0, 2, 4])
    memory = np.array([rows + 1, LENGTHS], dtype=np.int64)
    return AttentionMetadata.of(rows, np.zeros(3, dtype=np.int64), tables, counts, memory=memory)


def test_tokens_of_any_number_see_their_own_memory_alone() -> None:
    pools, tables, known = filled()
    counts = np.array([2, 1, 3], dtype=np.int64)
    query = torch.randn(6, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    out = TorchAttention(pools, PAGE).plan(metadata(tables, counts)).attend_cross(0, query)
    wanted = [plain(part, memory) for part, memory in zip(query.split(counts.tolist()), known, strict=True)]
    torch.testing.assert_close(out, torch.cat(wanted))


def test_a_captured_decode_step_sees_the_same() -> None:
    pools, tables, known = filled()
    attention, shape = TorchAttention(pools, PAGE), AttentionShape(sequences=4, tokens=1, pages=2, causal=True)
    buffers = AttentionBuffers(attention.static(shape), torch.device("cpu"), memory=attention.static(shape))
    buffers.prepare_memory(metadata(tables, 1))
    query = torch.randn(4, HEADS, WIDTH, generator=torch.Generator().manual_seed(2))
    out = buffers.view.attend_cross(0, query)
    wanted = [plain(part, memory) for part, memory in zip(query[:3].split(1), known, strict=True)]
    torch.testing.assert_close(out[:3], torch.cat(wanted))


def test_a_mask_leaves_out_the_suppressed_ids() -> None:
    bits = np.unpackbits(allowed_bits((range(3), range(10, 70, 2)), 71).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [*range(3, 10), *range(11, 70, 2), 70]
