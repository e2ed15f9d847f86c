"""Uploads of host values that share elements."""

from __future__ import annotations

import pytest
import torch

from mstar_core.engine.transfers import join, upload

pytestmark = pytest.mark.gpu


def test_a_number_that_is_expanded_to_one_per_token_is_uploaded(cuda: torch.device) -> None:
    number = torch.tensor(7).expand(5)
    assert upload(number, cuda).tolist() == [7] * 5
    target = torch.zeros(5, dtype=torch.int64, device=cuda)
    join([number], target)
    assert target.tolist() == [7] * 5
