"""Muon: momentum with orthogonalized updates for the matrices of the layers.

Source: K. Jordan, "Muon: an optimizer for hidden layers" (2024), with its quintic Newton-Schulz iteration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
ITERATIONS: Final = 5


class Muon(torch.optim.Optimizer):
    """Updates matrices of one shape together. The update's root mean square is 0.2 * lr per entry, as AdamW's."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. closure: not supported."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    shapes.setdefault(tuple(param.shape), []).append(param)
            for params in shapes.values():
                self._update(params, group["lr"], group["momentum"], group["decay"])

    def _update(self, params: list[Tensor], rate: float, momentum: float, decay: float) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        buffers = [self.state[param].setdefault("momentum", torch.zeros_like(param)) for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        nesterov = torch.stack(grads).lerp(torch.stack(buffers), momentum)
        scale = 0.2 * max(params[0].shape) ** 0.5
        updates = list(orthogonal(nesterov).to(params[0].dtype).mul_(-rate * scale).unbind())
        torch._foreach_mul_(params, 1 - rate * decay)
        torch._foreach_add_(params, updates)


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices, roughly, in bfloat16. matrices: [n, rows, columns]."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = matrices.bfloat16()
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result
