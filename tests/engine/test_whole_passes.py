"""Dense attention of passes that only read equals the PyTorch backend over the same pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.backend import AttentionSegment, PackedRows
from mstar_core.engine.attention.eager import EagerAttention
from mstar_core.engine.attention.whole_passes import WholePasses

PAGE = 4
TABLES = np.array([[3, 1, 7, 0], [5, 2, 4, 0]], dtype=np.int32)


@pytest.mark.parametrize("cached", [[9, 0], [0, 0], [8, 12], [1, 5]], ids=str)
def test_whole_passes_equal_the_torch_backend(cached: list[int]) -> None:
    torch.manual_seed(0)
    counts = [7, 5]
    pool = torch.randn(9, 2, PAGE, 2, 8)
    query, key, value = (torch.randn(sum(counts), heads, 8) for heads in (6, 2, 2))
    segments = [
        AttentionSegment(start=start, count=count, row=row, cached=held, is_causal=False, writes=False)
        for row, (start, count, held) in enumerate(zip((0, counts[0]), counts, cached, strict=True))
    ]
    none = np.zeros(0, dtype=np.int64)
    packed = PackedRows(decode=none, cached=none, segments=segments, tables=TABLES)
    wanted = EagerAttention([pool], PAGE).plan(packed).attend(0, query, key, value)
    found = WholePasses([pool], PAGE, segments, TABLES).attend(0, query, key, value)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
