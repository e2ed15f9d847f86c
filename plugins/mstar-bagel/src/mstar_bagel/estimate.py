"""Estimates of the finished image during denoising, for partial images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from mstar_bagel.nodes.flow import FlowSteps
from mstar_core.engine.module import NodeModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from torch import Tensor


class EstimatingSteps(nn.Module, NodeModule):
    """The node `combine_cfg`, which also estimates clean latents after the last step of a run.

    The flow is straight where the model is certain: x - v * t is the clean image that the velocity v points to.
    """

    host_ports = FlowSteps.host_ports
    device_outputs = (*FlowSteps.device_outputs, "estimate")

    def __init__(self, channels: int, device: torch.device) -> None:
        super().__init__()
        self.flow = FlowSteps(channels, device)

    def forward(
        self,
        *,
        times: Sequence[np.ndarray] = (),
        step: np.ndarray | None = None,
        latents: Sequence[Tensor] = (),
        seeds: np.ndarray,
        **ports: Any,
    ) -> dict[str, Any]:
        """Return as FlowSteps; a step also returns {"estimate": B tensors}, None before the last step of its run."""
        outputs: dict[str, Any] = self.flow(times=times, step=step, latents=latents, seeds=seeds, **ports)
        if step is None or "progress" not in outputs:
            return outputs
        estimates: list[Tensor | None] = []
        for item, (x, following) in enumerate(zip(latents, outputs["latents"], strict=True)):
            number = int(step[item])
            time, length = (float(value) for value in times[item][number][:2])
            is_last = number == len(times[item]) - 1
            estimates.append(x + (following - x) * (time / length) if is_last else None)
        return {**outputs, "estimate": estimates}
