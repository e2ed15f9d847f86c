"""Parts of a pre-norm block that both encoders share."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


def add_norm(x: Tensor, branch: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm, in one kernel on CUDA. x, branch: [..., width], contiguous."""
    if x.is_cuda:
        both: tuple[Tensor, Tensor] = importlib.import_module("mstar_core.layers.kernels.elementwise").add_layer_norm(
            x, branch, norm
        )
        return both
    total = x + branch
    return total, norm(total)
