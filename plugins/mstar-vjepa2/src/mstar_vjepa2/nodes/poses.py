"""Arm poses: what an action makes of one, and which action leads from one to another.

A pose is position (m), extrinsic x-y-z Euler angles (rad) and gripper closedness (0 to 1); an action is a change of
each. Rotations are composed in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

POLE: Final = 1e-7
"""Below this cosine of the middle angle only a sum of the other two is defined; the last is then taken as 0."""


def moved(pose: Tensor, action: Tensor) -> Tensor:
    """The pose after an action: the turn is applied on the left, the gripper stays within 0 and 1.

    pose, action: [..., 7]. Returns the pose's shape and dtype.
    """
    start, change = pose.double(), action.double()
    # Both at once: on a GPU each of these small operations is a launch of every step of a rollout.
    left, right = _matrix(torch.stack([change[..., 3:6], start[..., 3:6]])).unbind()
    turn = left @ right
    gripper = (start[..., 6:] + change[..., 6:]).clamp(0, 1)
    return torch.cat([start[..., :3] + change[..., :3], _angles(turn), gripper], dim=-1).to(pose.dtype)


def difference(start: Tensor, end: Tensor) -> Tensor:
    """The action that leads from one pose to another; the gripper's change is not bounded. [..., 7] float64."""
    before, after = start.double(), end.double()
    turn = _matrix(after[..., 3:6]) @ _matrix(before[..., 3:6]).transpose(-1, -2)
    return torch.cat([after[..., :3] - before[..., :3], _angles(turn), after[..., 6:] - before[..., 6:]], dim=-1)


def _matrix(angles: Tensor) -> Tensor:
    """Rz(c) Ry(b) Rx(a) of angles [..., 3] = (a, b, c)."""
    (ca, cb, cc), (sa, sb, sc) = angles.cos().unbind(-1), angles.sin().unbind(-1)
    rows = [
        [cc * cb, cc * sb * sa - sc * ca, cc * sb * ca + sc * sa],
        [sc * cb, sc * sb * sa + cc * ca, sc * sb * ca - cc * sa],
        [-sb, cb * sa, cb * ca],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def _angles(turn: Tensor) -> Tensor:
    """Angles of rotation matrices [..., 3, 3]; outer ones in (-pi, pi], the middle one in [-pi/2, pi/2]."""
    cosine = torch.hypot(turn[..., 0, 0], turn[..., 1, 0])
    middle = torch.atan2(-turn[..., 2, 0], cosine)
    is_pole = cosine < POLE
    first = torch.where(
        is_pole, torch.atan2(-turn[..., 1, 2], turn[..., 1, 1]), torch.atan2(turn[..., 2, 1], turn[..., 2, 2])
    )
    last = torch.where(is_pole, torch.zeros_like(first), torch.atan2(turn[..., 1, 0], turn[..., 0, 0]))
    return torch.stack([first, middle, last], dim=-1)
