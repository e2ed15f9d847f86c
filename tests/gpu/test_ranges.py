"""NVTX ranges where there is a GPU: torch has the functions, and a block inside of one runs as it would without."""

from __future__ import annotations

import pytest
import torch

from mstar_core.worker.steps import ranges_on

pytestmark = pytest.mark.gpu


def test_work_inside_of_ranges_is_done_and_they_end_with_errors_too() -> None:
    marked = ranges_on("cuda:0", is_wanted=True)
    with marked("launch", "LLM"), marked("collect", "codec"):
        total = torch.ones(8, device="cuda").sum().item()
    assert total == 8.0
    with pytest.raises(ZeroDivisionError), marked("launch", "LLM"):
        _ = 1 / 0
