"""Between torch tensors and the arrays that travel. Shared memory knows numpy only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor


def to_array(tensor: Tensor) -> tuple[np.ndarray, str | None]:
    """A host array of a tensor and its wire dtype where numpy has none (bfloat16 travels as its 16 bits)."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.uint16).numpy(), "bfloat16"
    return host.numpy(), None


def to_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """A tensor over a received array (copied where the array may not be written or outlived)."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
