"""Arm poses: applying an action to a pose, and the action between two poses.

A pose is position (m), extrinsic x-y-z Euler angles (rad) and gripper closedness (0 to 1); an action is a change of
each. Rotations are composed in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

POLE: Final = 1e-7
"""Cosine of the middle angle below which only a combination of the outer angles is defined. The last is then 0."""


def moved(pose: Tensor, action: Tensor) -> Tensor:
    """Return the pose after an action. Its rotation is applied from the left; the gripper stays within 0 and 1.

    pose, action: [..., 7]. Returns the pose's shape and dtype.
    """
    start, change = pose.double(), action.double()
    # Both matrices together: on a GPU each small operation is a launch in every step of a rollout.
    left, right = _matrix(torch.stack([change[..., 3:6], start[..., 3:6]])).unbind()
    turn = left @ right
    gripper = (start[..., 6:] + change[..., 6:]).clamp(0, 1)
    return torch.cat([start[..., :3] + change[..., :3], _angles(turn), gripper], dim=-1).to(pose.dtype)


def difference(start: Tensor, end: Tensor) -> Tensor:
    """Return the action between two poses, [..., 7] float64. The gripper's change is not clamped."""
    before, after = start.double(), end.double()
    turn = _matrix(after[..., 3:6]) @ _matrix(before[..., 3:6]).transpose(-1, -2)
    return torch.cat([after[..., :3] - before[..., :3], _angles(turn), after[..., 6:] - before[..., 6:]], dim=-1)


def _matrix(angles: Tensor) -> Tensor:
    """Return Rz(c) Ry(b) Rx(a) of angles [..., 3] = (a, b, c)."""
    (ca, cb, cc), (sa, sb, sc) = angles.cos().unbind(-1), angles.sin().unbind(-1)
    rows = [
        [cc * cb, cc * sb * sa - sc * ca, cc * sb * ca + sc * sa],
        [sc * cb, sc * sb * sa + cc * ca, sc * sb * ca - cc * sa],
        [-sb, cb * sa, cb * ca],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def _angles(turn: Tensor) -> Tensor:
    """Return the angles of rotation matrices [..., 3, 3]; outer ones in (-pi, pi], the middle one in [-pi/2, pi/2]."""
    cosine = torch.hypot(turn[..., 0, 0], turn[..., 1, 0])
    middle = torch.atan2(-turn[..., 2, 0], cosine)
    is_pole = cosine < POLE
    first = torch.where(
        is_pole, torch.atan2(-turn[..., 1, 2], turn[..., 1, 1]), torch.atan2(turn[..., 2, 1], turn[..., 2, 2])
    )
    last = torch.where(is_pole, torch.zeros_like(first), torch.atan2(turn[..., 1, 0], turn[..., 0, 0]))
    return torch.stack([first, middle, last], dim=-1)
