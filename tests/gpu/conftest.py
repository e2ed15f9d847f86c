"""What the GPU tests share. They are chosen by the mark `gpu`; without a device they fail rather than skip."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def cuda() -> torch.device:
    """The first GPU."""
    assert torch.cuda.is_available(), "these tests need a CUDA device: run `make test` on machines without one"
    return torch.device("cuda", 0)
