"""Fixtures of the GPU tests. The mark `gpu` selects them; without a device they fail instead of skipping."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def cuda() -> torch.device:
    """The first GPU."""
    assert torch.cuda.is_available(), "these tests need a CUDA device: run `make test` on machines without one"
    return torch.device("cuda", 0)
