"""States and actions between a robot's units and the model's, in float64. Used by the processor.

Each conversion of an action value is linear: statistics, difference to the state, joint sign, gripper. They are
combined into one factor and one term per value, which travel with the request and are applied when the flow ends.
ALOHA's constants come from openpi's ALOHA policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from mstar_pi05.checkpoint.config import ACTION_WIDTH

if TYPE_CHECKING:
    from mstar_pi05.deployment import Deployment
    from mstar_pi05.robots.statistics import Moments

Values = npt.NDArray[np.float64]


def normalise(values: Values, moments: Moments) -> Values:
    """values: [..., n], n at most the statistics' length. Returns the same shape; not clipped."""
    low, divisor = _terms(moments, values.shape[-1])
    scaled: Values = (values - low) / divisor
    return scaled if moments.span == "spread" else scaled * 2.0 - 1.0


def unnormalise(values: Values, moments: Moments) -> Values:
    """The reverse on the first values of the last axis.

    Those past the statistics' length stay as they are in a range, and have mean 0 and deviation 1 in a spread.
    """
    count = min(values.shape[-1], len(moments))
    low, divisor = _terms(moments, count)
    known, rest = values[..., :count], values[..., count:]
    if moments.span == "spread":
        return np.concatenate([known * divisor + low, rest * (1.0 + moments.epsilon)], axis=-1)
    return np.concatenate([(known + 1.0) / 2.0 * divisor + low, rest], axis=-1)


def _terms(moments: Moments, count: int) -> tuple[Values, Values]:
    """What is subtracted, and what is divided by."""
    low, high = (np.array(values[:count], dtype=np.float64) for values in (moments.low, moments.high))
    width = high if moments.span == "spread" else high - low
    if moments.adds:
        return low, width + moments.epsilon
    return low, np.where(width == 0, moments.epsilon, width)


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


def to_robot(actions: Values, moments: Moments | None, state: Values | None, deployment: Deployment) -> Values:
    """Normalised actions [..., 32] as the robot takes them, [..., action_dim].

    state: [s] in the model's convention, not normalised; needed where actions are differences.
    """
    made = actions if moments is None else unnormalise(actions, moments)
    if deployment.is_delta:
        assert state is not None, "the processor asks for the state where actions are differences"
        made = made + _added(state, deployment.is_delta, made.shape[-1])
    if deployment.mirrors:
        mapped = actions_to_robot(made)
        made = np.concatenate([mapped, made[..., mapped.shape[-1] :]], axis=-1)
    return made[..., : deployment.action_dim]


def as_lines(moments: Moments | None, state: Values | None, deployment: Deployment) -> tuple[Values, Values]:
    """The same as factor and term, both [32]: `to_robot(x) == x * factor + term` on the first action_dim values."""
    ends = np.stack([np.zeros(ACTION_WIDTH), np.ones(ACTION_WIDTH)])
    term, at_one = np.zeros(ACTION_WIDTH), np.ones(ACTION_WIDTH)
    made = to_robot(ends, moments, state, deployment)
    term[: made.shape[-1]], at_one[: made.shape[-1]] = made
    return at_one - term, term


def _added(state: Values, is_delta: tuple[bool, ...], width: int) -> Values:
    """The state where actions are differences, 0 elsewhere: [width]."""
    added = np.zeros(width)
    for index, adds in enumerate(is_delta[: len(state)]):
        if adds:
            added[index] = state[index]
    return added
