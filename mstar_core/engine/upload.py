"""Brings host values to the device without waiting for it. Used by the engines wherever a step is prepared."""

from __future__ import annotations

from collections.abc import Sequence
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


def join(values: list[Tensor], into: Tensor) -> None:
    """Concatenate values from any device into `into`, [n, ...]."""
    if len(values) == 1:
        into.copy_(upload(values[0], into.device))
    elif all(value.device == into.device for value in values):
        torch.cat(values, out=into)
    elif all(value.is_cpu for value in values):
        into.copy_(upload(torch.cat(values), into.device))
    else:
        torch.cat([upload(value, into.device) for value in values], out=into)


def gather(values: Sequence[Tensor], into: Tensor) -> None:
    """Stack values of one shape into `into`, [n, ...].

    Evenly spaced views of one storage, or one value repeated, are copied by a single kernel.
    """
    first, apart = values[0], 0
    if len(values) > 1:
        storage, strides, at = first.untyped_storage().data_ptr(), first.stride(), first.data_ptr()
        apart = values[1].data_ptr() - at
        is_even = apart >= 0 and apart % first.element_size() == 0 and all(
            value.data_ptr() == at + number * apart
            and value.stride() == strides
            and value.untyped_storage().data_ptr() == storage
            for number, value in enumerate(values)
        )  # fmt: skip
        if not is_even:
            torch.stack(list(values), out=into)
            return
    into.copy_(first.as_strided((len(values), *first.shape), (apart // first.element_size(), *first.stride())))
