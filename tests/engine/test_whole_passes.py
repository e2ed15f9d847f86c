"""Dense attention of passes that only read equals the PyTorch backend over the same pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mstar_core.engine.attention.eager import EagerAttention
from mstar_core.engine.attention.whole_passes import WholePasses
from mstar_core.engine.steps.attention import AttentionMetadata

PAGE = 4
TABLES = np.array([[3, 1, 7, 0], [5, 2, 4, 0]], dtype=np.int32)


@pytest.mark.parametrize("cached", [[9, 0], [0, 0], [8, 12], [1, 5]], ids=str)
def test_whole_passes_equal_the_torch_backend(cached: list[int]) -> None:
    torch.manual_seed(0)
    counts = [7, 5]
    pool = torch.randn(9, 2, PAGE, 2, 8)
    query, key, value = (torch.randn(sum(counts), heads, 8) for heads in (6, 2, 2))
    lengths, tokens = np.array(cached), np.array(counts)
    passes = AttentionMetadata.of(np.arange(2), lengths, TABLES, tokens, causal=False, writes=False)
    expected = EagerAttention([pool], PAGE).plan(passes).attend(0, query, key, value)
    out = WholePasses([pool], PAGE, passes).attend(0, query, key, value)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
