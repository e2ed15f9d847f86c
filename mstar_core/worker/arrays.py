"""Conversion between torch tensors and the numpy arrays that transports carry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from mstar_core.engine.transfers import SMALL_BYTES, HostCopy

if TYPE_CHECKING:
    from torch import Tensor


HALVES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16}

NUMBERS: Final = frozenset(("action", "scalar", "tensor", "embedding"))
"""Modalities that leave as numbers, in the dtype that a request asks for."""


class PendingCopy(Protocol):
    """A tensor on its way from a GPU to the host. `pending` is valid once `is_done` is true."""

    @property
    def pending(self) -> Tensor: ...

    @property
    def is_done(self) -> bool: ...


def start_copy(tensor: Tensor) -> PendingCopy | None:
    """Start copying a GPU tensor to the host, behind the work of the current stream. Returns None for a host tensor."""
    if not tensor.is_cuda:
        return None
    _keep(tensor)
    return HostCopy(tensor.detach())


def narrowed(tensor: Tensor, modality: str, dtype: object) -> Tensor:
    """Round float32 numbers to the half precision that a client asks for, so that fewer bytes leave the device.

    dtype: `output_dtype` of the request. Other tensors stay as they are. Rounds to nearest, ties to even, like the api.
    """
    half = HALVES.get(dtype) if modality in NUMBERS and isinstance(dtype, str) else None
    if half is None or tensor.dtype is not torch.float32:
        return tensor
    _keep(tensor)
    return tensor.to(half)


def to_array(tensor: Tensor) -> tuple[np.ndarray, str | None]:
    """Return a host tensor as an array, and its wire dtype if numpy lacks it (bfloat16 travels as its 16 bits)."""
    host = tensor.detach().contiguous()
    if host.dtype is torch.bfloat16:
        return host.view(torch.uint16).numpy(), "bfloat16"
    return host.numpy(), None


def to_tensor(array: np.ndarray, dtype: str, *, is_shared: bool = True) -> Tensor:
    """Return a received array as a tensor: a copy if the memory is shared with others, or an upload gains by it."""
    if array.nbytes > SMALL_BYTES and torch.cuda.is_initialized():
        # Pinned, so that the upload needs no further copy. A step packs small inputs into pinned memory itself.
        tensor = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
        np.copyto(tensor.numpy(), array)
    else:
        tensor = torch.from_numpy(np.array(array) if is_shared else array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _keep(tensor: Tensor) -> None:
    """Delay the reuse of a tensor's memory until the current stream has read it: its node may have its own stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
