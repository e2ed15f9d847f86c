"""Node `TextFeed`: puts ids of text on the talker's stream. Runs on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_qwen3tts.checkpoint.config import TTSConfig


class TextFeed(nn.Module):
    """The ids of each request as they are. Has no weights."""

    host_ports = ("ids",)

    def __init__(self, config: TTSConfig) -> None:
        super().__init__()

    def forward(self, *, ids: Sequence[np.ndarray]) -> dict[str, list[Tensor]]:
        """Return text int64 [m] for each item. ids: int64 [m] each."""
        return {"text": [torch.from_numpy(np.array(each, dtype=np.int64)) for each in ids]}
