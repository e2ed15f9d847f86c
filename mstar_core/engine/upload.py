"""Brings host values to the device without waiting for it. Used by the engines wherever a step is prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

SMALL_BYTES: Final = 1 << 16
"""Bytes up to which a value of the host stays there until a step takes it: all that are in a step travel together, and
to write them down once more costs less than the least copy to a GPU.
"""


def stays(value: Tensor) -> bool:
    """Whether a value is on the host and waits there for its step."""
    return value.is_cpu and value.nbytes <= SMALL_BYTES


def upload(value: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A value on the device, in stream order. What is there already, or stays on the CPU, is not copied.

    It travels through pinned memory: a copy from ordinary memory would wait until everything launched before is done.
    torch keeps the pinned block until the copy has read it.
    """
    given = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    if given.device.type == "cpu" and device.type == "cuda":
        return given.pin_memory().to(device, non_blocking=True)
    return given.to(device)
