"""Outputs of a stateless node: the outputs of a batch become those of its jobs. Used by the stateless engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from mstar_core.engine.transfers import HostRing
from mstar_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    Output = Tensor | list[Tensor | None]
    """Output of a batch: [B, ...], or an item for each of B, None for an item without one."""


class BatchOutputs:
    """Outputs of one node. Owned by the engine. host_ports: outputs that the host reads; on CUDA they are copied."""

    def __init__(self, node: str, host_ports: Collection[str], device: torch.device) -> None:
        self._node = node
        self._host_ports = frozenset(host_ports)
        self._rings = {port: HostRing() for port in self._host_ports} if device.type == "cuda" else {}

    def split(self, outputs: dict[str, Output], widths: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the outputs of each job, without the ports that its items lack. widths: batch items of each job.

        Starts the copies to the host. Raises EngineError for an output of another number of items.
        """
        jobs: list[dict[str, Tensor]] = [{} for _ in widths]
        total = sum(widths)
        for port, output in outputs.items():
            if len(output) != total:
                raise EngineError(
                    f"node {self._node} gave {port!r} for {len(output)} of {total} batch items",
                    "the first dimension of an output is the batch",
                    node=self._node,
                )
            items = self._on_host(port, output) if port in self._rings else output
            # A view would keep the whole batch alive as long as one request holds its item.
            is_kept_whole = total > 1 and isinstance(items, torch.Tensor) and port not in self._host_ports
            parts = items.unbind(0) if isinstance(items, torch.Tensor) else items
            start = 0
            for job, width in zip(jobs, widths, strict=True):
                present = [item for item in parts[start : start + width] if item is not None]
                if width > 1 and len(present) == width:
                    job[port] = torch.stack(present)
                elif width == 1 and present:
                    job[port] = present[0].clone() if is_kept_whole else present[0]
                start += width
        return jobs

    def _on_host(self, port: str, output: Output) -> Output:
        """Start copying an output to pinned memory. Items of different lengths share one copy too."""
        ring = self._rings[port]
        if isinstance(output, torch.Tensor):
            return ring.copy(output) if output.is_cuda else output
        present = [item for item in output if item is not None]
        if not present or not all(item.is_cuda for item in present):
            return output
        flat = ring.copy(torch.cat([item.flatten() for item in present]))
        parts = iter(flat.split([item.numel() for item in present]))
        return [None if item is None else next(parts).view(item.shape) for item in output]
