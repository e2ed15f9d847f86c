"""Attention over memories by FlashInfer, in captured and uncaptured forwards, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar_core.engine.attention.flashinfer import FlashInferAttention
from mstar_core.engine.attention.static import AttentionBuffers
from mstar_core.engine.steps.attention import AttentionMetadata, AttentionShape

pytestmark = pytest.mark.gpu

PAGE, HEADS, WIDTH = 16, 20, 64
LENGTHS = (1500, 1500, 37)


def case(cuda: torch.device) -> tuple[list[Tensor], np.ndarray, list[Tensor]]:
    """A pool whose memories hold known values, its tables, and the memories: [2, length, heads, width] each."""
    generator = torch.Generator(cuda).manual_seed(0)
    widest = -(-max(LENGTHS) // PAGE)
    pool = torch.full((len(LENGTHS) * widest + 1, 2, PAGE, HEADS, WIDTH), float("nan"), device=cuda).bfloat16()
    tables, known = np.zeros((2 * len(LENGTHS), widest), dtype=np.int32), []
    for number, length in enumerate(LENGTHS):
        values = torch.randn(2, length, HEADS, WIDTH, device=cuda, generator=generator).bfloat16()
        for at in range(0, length, PAGE):
            page = number * widest + at // PAGE
            tables[2 * number + 1, at // PAGE] = page
            part = values[:, at : at + PAGE]
            pool[page, :, : part.shape[1]] = part
        known.append(values)
    return [pool], tables, known


def metadata(tables: np.ndarray, counts: np.ndarray | int) -> AttentionMetadata:
    rows = np.arange(len(LENGTHS)) * 2
    memory = np.array([rows + 1, LENGTHS], dtype=np.int64)
    return AttentionMetadata.of(rows, np.zeros(len(rows), dtype=np.int64), tables, counts, memory=memory)


def plain(query: Tensor, memory: Tensor) -> Tensor:
    """Attention of tokens [t, heads, width] in float64."""
    keys, values = memory.double()
    scores = torch.einsum("thw,shw->hts", query.double(), keys) * WIDTH**-0.5
    return torch.einsum("hts,shw->thw", scores.softmax(-1), values)


@pytest.mark.parametrize("counts", [(1, 1, 1), (4, 1, 7)], ids=str)
def test_tokens_see_their_own_memory_alone(cuda: torch.device, counts: tuple[int, ...]) -> None:
    pools, tables, known = case(cuda)
    query = torch.randn(sum(counts), HEADS, WIDTH, device=cuda).bfloat16()
    view = FlashInferAttention(pools, PAGE).plan(metadata(tables, np.array(counts, dtype=np.int64)))
    out = view.attend_cross(0, query)
    wanted = [plain(part, memory) for part, memory in zip(query.split(list(counts)), known, strict=True)]
    torch.testing.assert_close(out.double(), torch.cat(wanted), atol=1e-2, rtol=2e-2)


def test_a_captured_step_sees_the_same_after_each_change_of_its_batch(cuda: torch.device) -> None:
    pools, tables, known = case(cuda)
    attention = FlashInferAttention(pools, PAGE)
    shape = AttentionShape(sequences=4, tokens=1, pages=tables.shape[1], causal=True)
    buffers = AttentionBuffers(attention.static(shape), cuda, memory=attention.static(shape))
    query = torch.randn(4, HEADS, WIDTH, device=cuda).bfloat16()
    buffers.prepare_memory(AttentionMetadata.empty(tables))
    buffers.view.attend_cross(0, query)  # plans outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = buffers.view.attend_cross(0, query)
    for chosen in ([0, 1, 2], [2, 0]):
        buffers.prepare_memory(metadata(tables, 1).select(np.array(chosen)))
        graph.replay()
        wanted = [plain(query[place : place + 1], known[number]) for place, number in enumerate(chosen)]
        torch.testing.assert_close(out[: len(chosen)].double(), torch.cat(wanted), atol=1e-2, rtol=2e-2)
