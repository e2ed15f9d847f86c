"""The nodes around a rollout: the scorer, and sampling and update of the cross-entropy method (CEM).

Run by the stateless engine once per request, with its candidates on an additional axis. All tensors stay on the device;
noise comes with the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import cosine_similarity

from mstar_core.engine.module import NodeModule
from mstar_vjepa2.params import COSTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SLICE_BYTES: Final = 64 << 20
"""Bytes of float32 frames that are compared at once. The working memory is twice this."""

GRIPPER: Final = 3
"""Index of the gripper among the planned values x, y, z, gripper."""

GRIPPER_LIMIT: Final = 0.75
GRIPPER_SILENT: Final = 0.25
"""Planned gripper means with a smaller absolute value become 0. Source of both: the official planner."""


class Scorer(nn.Module, NodeModule):
    """The node `mpc_scorer`."""

    host_ports = ("cost",)
    listed_ports = ("final",)  # half a gigabyte for 400 candidates, not copied into one tensor

    def working_bytes(self, tokens: int) -> int:
        """See NodeModule. Returns the bytes of the differences of a slice, or of both of its norms."""
        return 4 * SLICE_BYTES

    def forward(self, *, final: Sequence[Tensor], goal: Tensor, cost: Tensor) -> dict[str, Tensor | list[Tensor]]:
        """Return the distances to the goal in float32.

        final: B tensors [1, S, width], or [K, 1, S, width] for K candidates; goal: [B, S, width]; cost: index into
        COSTS [B], on the host. Returns energies [B, 1] or [B, K, 1], a list of B if K differs, and best_index int64 [B,
        1], the nearest candidate.
        """
        names = [COSTS[index] for index in cost.tolist()]
        costs = [
            energies_of(one[..., 0, :, :], target, name) for one, target, name in zip(final, goal, names, strict=True)
        ]
        best = [energies.flatten().argmin(dim=0, keepdim=True) for energies in costs]
        per_candidate = [energies[..., None] for energies in costs]
        is_even = len({energies.shape for energies in per_candidate}) == 1
        return {"energies": torch.stack(per_candidate) if is_even else per_candidate, "best_index": torch.stack(best)}


def energies_of(frames: Tensor, goal: Tensor, cost: str) -> Tensor:
    """Return the float32 distances, [] or [K], of frames [S, width] or [K, S, width], computed in slices.

    goal: [S, width]; cost: one of COSTS.
    """
    most = max(1, SLICE_BYTES // (goal.numel() * torch.float32.itemsize))
    if frames.dim() < 3 or len(frames) <= most:
        return distance(frames, goal, cost)
    return torch.cat([distance(part, goal, cost) for part in frames.split(most)])


def distance(frames: Tensor, goal: Tensor, cost: str) -> Tensor:
    """Return the float32 distance [...] of frames [..., S, width] to a goal [S, width]. cost: one of COSTS."""
    frames, goal = frames.float(), goal.float()
    match cost:
        case "l1":
            return (frames - goal).abs_().mean(dim=(-2, -1))
        case "l2":
            return (frames - goal).square_().mean(dim=(-2, -1))
        case _:
            return 1 - cosine_similarity(frames.flatten(-2), goal.flatten(), dim=-1)


class Sampler(nn.Module):
    """The node `cem_sampler`."""

    def forward(
        self,
        *,
        mean: Tensor,
        std: Tensor,
        noise: Tensor,
        fixed_axes: Tensor,
        close_from: Tensor,
        maxnorm: Tensor,
        step: Tensor,
    ) -> dict[str, Tensor]:
        """Sample the candidates of a planning step.

        mean, std: [B, h, 4]; noise: [B, c, h, k, 4]; fixed_axes: [B, 4], NaN where free; close_from: int64 [B, 1], the
        first step with a closed gripper; maxnorm: [B]; step: int64 [B]. Returns candidates [B, k, h, 7].
        """
        drawn = noise[torch.arange(len(noise), device=noise.device), step]
        values = drawn * std[:, :, None] + mean[:, :, None]
        limit = maxnorm.float().view(-1, 1, 1, 1).expand(-1, 1, 1, GRIPPER)
        limit = torch.cat([limit, torch.full_like(limit[..., :1], GRIPPER_LIMIT)], dim=-1)
        values = torch.minimum(torch.maximum(values, -limit), limit)
        fixed = fixed_axes[:, None, None]
        values = torch.where(fixed.isnan(), values, fixed)
        moves = as_actions(values[..., :GRIPPER], values[..., GRIPPER:])
        is_closed = torch.arange(mean.shape[1], device=mean.device) >= close_from
        moves[..., -1] = torch.where(is_closed[:, :, None], torch.ones_like(moves[..., -1]), moves[..., -1])
        return {"candidates": moves.transpose(1, 2).contiguous()}


class Update(nn.Module):
    """The node `cem_update`."""

    def forward(
        self,
        *,
        mean: Tensor,
        std: Tensor,
        candidates: Tensor,
        energies: Tensor,
        topk: Tensor,
        momentum_mean: Tensor,
        momentum_std: Tensor,
        momentum_mean_gripper: Tensor,
        momentum_std_gripper: Tensor,
    ) -> dict[str, Tensor]:
        """Move mean and spread toward the best candidates.

        mean, std: [B, h, 4]; candidates: [B, k, h, 7]; energies: [B, k, 1]; topk, momenta: [B], topk at least 2.
        Returns mean and std [B, h, 4], the current plan as actions [B, h, 7], and best_energy [B, 1].
        """
        flat = energies.flatten(1)
        # Ranks of the candidates by energy. This needs no number of elites on the host.
        place = flat.argsort(dim=1).argsort(dim=1)
        count = topk.view(-1, 1, 1).float()
        share = (place < topk.view(-1, 1)).float()[:, :, None, None]
        values = torch.cat([candidates[..., :GRIPPER], candidates[..., -1:]], dim=-1)
        elite_mean = (share * values).sum(dim=1) / count
        spread = (share * (values - elite_mean[:, None]).square()).sum(dim=1) / (count - 1)
        new_mean = _blended(elite_mean, mean, momentum_mean, momentum_mean_gripper)
        new_std = _blended(spread.sqrt(), std, momentum_std, momentum_std_gripper)
        grip = new_mean[..., GRIPPER:]
        grip = torch.where(grip.abs() < GRIPPER_SILENT, torch.zeros_like(grip), grip)
        return {
            "mean": new_mean,
            "std": new_std,
            "actions": as_actions(new_mean[..., :GRIPPER], grip),
            "best_energy": flat.amin(dim=1, keepdim=True),
        }


def as_actions(position: Tensor, gripper: Tensor) -> Tensor:
    """Return actions [..., 7] without rotation, from positions [..., 3] and gripper values [..., 1]."""
    return torch.cat([position, torch.zeros_like(position), gripper], dim=-1)


def _blended(new: Tensor, old: Tensor, momentum: Tensor, gripper_momentum: Tensor) -> Tensor:
    """Return (1 - m) * new + m * old, with a separate momentum for the gripper. new, old: [B, h, 4]; momenta: [B]."""
    share = torch.stack([momentum, momentum, momentum, gripper_momentum], dim=-1).float()[:, None]
    return (1 - share) * new + share * old
