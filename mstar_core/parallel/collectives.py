"""Collectives of a tensor-parallel group over torch.distributed. Used by the layers, eager and inside CUDA graphs.

Small sums on GPUs use one-shot all-reduce over symmetric memory, which takes half the time of NCCL (design:
parallel.md); the kernel adds in the order of the ranks, so all of them get the same bits. Larger sums use NCCL, and
CPU groups gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

ONE_SHOT_BYTES: Final = 256 << 10
"""Most bytes of a sum by one-shot all-reduce."""

ONE_SHOT_RANKS: Final = (2, 4, 8)
"""Group sizes for which the one-shot kernel adds in the order of the ranks."""

ONE_SHOT_ALIGNMENT: Final = 16
"""The size of a one-shot sum is a multiple of so many bytes."""


class TorchCollectives:
    """Collectives of one process group. Owned by the `RankGroup` that opened it.

    Every rank must call the same collectives in the same order, whatever the stream.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, uses_one_shot: bool = True) -> None:
        self._group = group
        self._size = group.size()
        self._buffer: Tensor | None = None
        if device.type == "cuda" and uses_one_shot and self._size in ONE_SHOT_RANKS:
            self._buffer = symmetric_buffer(group, device)

    def all_reduce(self, value: Tensor) -> Tensor:
        """Return the sum over the ranks. The argument may be overwritten."""
        value = value.contiguous()
        if self._buffer is not None and self._suits_one_shot(value):
            count = value.numel()
            shared = self._buffer[: value.nbytes].view(value.dtype)
            flat: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
                shared, value.view(count), "sum", self._group.group_name
            )
            return flat.view(value.shape)
        dist.all_reduce(value, group=self._group)
        return value

    def all_gather(self, value: Tensor) -> Tensor:
        """Return the ranks' values side by side: [n, k] -> [n, ranks * k]."""
        count, width = value.shape
        found = value.new_empty(self._size * count, width)
        _gather_into(found, value.contiguous(), group=self._group)
        return found.view(self._size, count, width).transpose(0, 1).reshape(count, self._size * width)

    def exchange(self, value: Tensor) -> Tensor:
        """Send value[r] to rank r, and return what the ranks sent, in their order: [ranks, ...], contiguous."""
        received = torch.empty_like(value)
        dist.all_to_all_single(received, value, group=self._group)
        return received

    def broadcast(self, value: Tensor) -> None:
        """Overwrite a contiguous value with that of the leader."""
        dist.broadcast(value, src=dist.get_global_rank(self._group, 0), group=self._group)

    def _suits_one_shot(self, value: Tensor) -> bool:
        return 0 < value.nbytes <= ONE_SHOT_BYTES and value.nbytes % ONE_SHOT_ALIGNMENT == 0


# Newer versions of torch warn of the older name.
_gather_into: Final[Callable[..., object]] = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


def symmetric_buffer(group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return a buffer of ONE_SHOT_BYTES that the kernels of all ranks of a group can read: uint8 on the device."""
    import torch.distributed._symmetric_memory as symmetric

    buffer: Tensor = symmetric.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
    symmetric.rendezvous(buffer, group.group_name)
    return buffer
