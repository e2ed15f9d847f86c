"""Weights that are read when their layer is moved to its device, so that no device holds a whole module unquantized.

The worker makes a `DeferredWeights` and hands it to a model in its context. `building` then makes the module in host
memory that is never touched, `load_weights` checks names and notes the reads, and `place` moves one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

Read = Callable[[Mapping[str, "Tensor"]], None]
"""Reads tensors by name into these targets."""


@dataclass(slots=True)
class _Pending:
    """Reads into one parameter. targets: by name, each the whole parameter or a view of it, in host memory."""

    read: Read
    targets: dict[str, Tensor] = field(default_factory=dict)


class DeferredWeights:
    """Reads that wait for the memory of their parameters. Owned by the start of a worker.

    report: called with the bytes placed so far and their number.
    """

    def __init__(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        self._pending: dict[int, _Pending] = {}
        self._report = report
        self._done = self._total = 0

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, module: nn.Module, targets: Mapping[str, Tensor], read: Read) -> dict[str, Tensor]:
        """Note the reads of a module's tensors. Returns the targets that must be read at once, by name.

        A target waits if it is part of a contiguous tensor that has its memory alone. read: called for each layer.
        """
        alone = {_key(tensor) for tensor in (*module.parameters(), *module.buffers()) if _is_alone(tensor)}
        rest: dict[str, Tensor] = {}
        for name, target in targets.items():
            if _key(target) in alone:
                self._pending.setdefault(_key(target), _Pending(read)).targets[name] = target.detach()
                self._total += target.numel() * target.element_size()
            else:
                rest[name] = target
        return rest

    @torch.no_grad()
    def place(self, module: nn.Module, device: torch.device) -> None:
        """Move a module to a device, as `Module.to` does, and read what waits for its tensors. Raises WeightsError."""
        moved: dict[int, Tensor] = {}

        def onto(tensor: Tensor) -> Tensor:
            if not _is_alone(tensor) or _key(tensor) not in self._pending:
                return tensor.to(device)
            new = torch.empty_like(tensor, device=device)
            moved[_key(tensor)] = new
            return new

        module._apply(onto)
        by_read: dict[int, tuple[Read, dict[str, Tensor]]] = {}
        for key, new in moved.items():
            pending = self._pending.pop(key)
            _, targets = by_read.setdefault(id(pending.read), (pending.read, {}))
            for name, target in pending.targets.items():
                targets[name] = new.as_strided(target.shape, target.stride(), target.storage_offset())
        for read, targets in by_read.values():
            read(targets)
            self._done += sum(target.numel() * target.element_size() for target in targets.values())
        if by_read:
            self._report(self._done, self._total)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_alone(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous and fills its memory, and has any."""
    size = tensor.numel() * tensor.element_size()
    return 0 < size == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
