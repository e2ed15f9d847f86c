"""Between torch tensors and the arrays that travel. Shared memory knows numpy only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from mstar_core.engine.transfers import SMALL_BYTES

if TYPE_CHECKING:
    from torch import Tensor


LARGE_BYTES: Final = 1 << 20
"""From here on a copy from a GPU goes through pinned memory: to ordinary memory the driver copies it piece by piece, at
a fraction of the link's rate.
"""

HALVES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16}


NUMBERS: Final = frozenset(("action", "scalar", "tensor"))
"""Modalities that leave as numbers, in the type that a request asks for."""


def narrowed(tensor: Tensor, modality: str, dtype: object) -> Tensor:
    """Numbers in the narrower type that a client asked for, made where they are: half as many bytes leave the device.

    dtype: `output_dtype` of the request. What is no float32, or is not to become narrower, stays what it is. Rounded to
    the nearest, ties to even, as the api does.
    """
    half = HALVES.get(dtype) if modality in NUMBERS and isinstance(dtype, str) else None
    return tensor if half is None or tensor.dtype is not torch.float32 else tensor.to(half)


def to_array(tensor: Tensor) -> tuple[np.ndarray, str | None]:
    """A host array of a tensor and its wire dtype where numpy has none (bfloat16 travels as its 16 bits)."""
    host = _on_host(tensor.detach())
    if host.dtype is torch.bfloat16:
        return host.view(torch.uint16).numpy(), "bfloat16"
    return host.numpy(), None


def to_tensor(array: np.ndarray, dtype: str) -> Tensor:
    """A tensor over a received array (copied where the array may not be written or outlived)."""
    if array.nbytes > SMALL_BYTES and torch.cuda.is_initialized():
        # Whoever takes it to the device finds it pinned, and does not copy it once more. Smaller ones wait for a step,
        # which lays them into pinned memory with others.
        tensor = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
        np.copyto(tensor.numpy(), array)
    else:
        tensor = torch.from_numpy(np.array(array))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _on_host(tensor: Tensor) -> Tensor:
    """The tensor on the host, contiguous. Waits for what the current stream makes of it."""
    if not tensor.is_cuda or tensor.nbytes < LARGE_BYTES:
        return tensor.cpu().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
