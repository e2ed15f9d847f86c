"""Brings host values to the device without waiting for it. Used by the KV engine wherever a step is prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor


def upload(value: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A value on the device, in stream order. What is there already, or stays on the CPU, is not copied.

    It travels through pinned memory: a copy from ordinary memory would wait until everything launched before is done.
    torch keeps the pinned block until the copy has read it.
    """
    given = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if given.device.type == "cpu" and device.type == "cuda":
        return given.pin_memory().to(device, non_blocking=True)
    return given.to(device)
