"""ALOHA's joints and grippers in the convention that the base model was trained in, and back. Used by the processor.

Source of the constants: the specification, which has them from openpi's ALOHA policy.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mstar_pi05.robots.normalisation import Values

SIGNS: Final = np.array([1, -1, -1, 1, 1, 1, 1] * 2, dtype=np.float64)
GRIPPERS: Final = (6, 13)

_OPEN, _CLOSED = 0.05800, 0.01844
"""Travel of the gripper's fingers in metres."""
_HORN, _ARM = 0.022, 0.036
"""Lengths of the servo's linkage in metres."""
_ANGLES: Final = (0.5476, 1.6296)
"""Angles of the model's own gripper in radians, which stand for 0 and 1."""
_LOWEST, _WIDTH = -0.6213, 1.4910 + 0.6213
"""Angles of ALOHA's gripper: where it begins, and how far it goes."""


def state_to_model(state: Values) -> Values:
    """state: [14] as ALOHA reports it. Returns [14] in the model's convention."""
    mapped = state * SIGNS
    for gripper in GRIPPERS:
        travel = state[gripper] * (_OPEN - _CLOSED) + _CLOSED
        with np.errstate(divide="ignore"):  # a travel of nothing is clipped like any other out of reach
            sine = (_HORN**2 + travel**2 - _ARM**2) / (2 * _HORN * travel)
        angle = np.arcsin(np.clip(sine, -1.0, 1.0))
        mapped[gripper] = (angle - _ANGLES[0]) / (_ANGLES[1] - _ANGLES[0])
    return mapped


def actions_to_robot(actions: Values) -> Values:
    """actions: [..., 14 or more] in the model's convention. Returns [..., 14] as ALOHA takes them."""
    mapped = actions[..., : len(SIGNS)] * SIGNS
    for gripper in GRIPPERS:
        mapped[..., gripper] = (mapped[..., gripper] + _ANGLES[0] - _LOWEST) / _WIDTH
    return mapped
