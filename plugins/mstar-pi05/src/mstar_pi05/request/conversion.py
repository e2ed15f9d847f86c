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
    """Normalise values [..., n], n at most the length of the statistics. Returns the same shape; values are
    not clipped.
    """
    low, divisor = _terms(moments, values.shape[-1])
    scaled: Values = (values - low) / divisor
    return scaled if moments.span == "spread" else scaled * 2.0 - 1.0


def unnormalise(values: Values, moments: Moments) -> Values:
    """Invert `normalise` on the last axis.

    Values past the length of the statistics are unchanged with a range, and have mean 0 and deviation 1
    with a spread.
    """
    count = min(values.shape[-1], len(moments))
    low, divisor = _terms(moments, count)
    known, rest = values[..., :count], values[..., count:]
    if moments.span == "spread":
        return np.concatenate([known * divisor + low, rest * (1.0 + moments.epsilon)], axis=-1)
    return np.concatenate([(known + 1.0) / 2.0 * divisor + low, rest], axis=-1)


def _terms(moments: Moments, count: int) -> tuple[Values, Values]:
    """Return the subtrahend and the divisor."""
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
"""Angles of the model's gripper in radians that map to 0 and 1."""
_LOWEST, _WIDTH = -0.6213, 1.4910 + 0.6213
"""Minimum angle and range of ALOHA's gripper in radians."""


def state_to_model(state: Values) -> Values:
    """Convert a state [14] as ALOHA reports it to the model's convention, [14]."""
    mapped = state * SIGNS
    for gripper in GRIPPERS:
        travel = state[gripper] * (_OPEN - _CLOSED) + _CLOSED
        with np.errstate(divide="ignore"):  # a travel of 0 is clipped like other unreachable values
            sine = (_HORN**2 + travel**2 - _ARM**2) / (2 * _HORN * travel)
        angle = np.arcsin(np.clip(sine, -1.0, 1.0))
        mapped[gripper] = (angle - _ANGLES[0]) / (_ANGLES[1] - _ANGLES[0])
    return mapped


def actions_to_robot(actions: Values) -> Values:
    """Convert actions [..., 14 or more] in the model's convention to ALOHA's, [..., 14]."""
    mapped = actions[..., : len(SIGNS)] * SIGNS
    for gripper in GRIPPERS:
        mapped[..., gripper] = (mapped[..., gripper] + _ANGLES[0] - _LOWEST) / _WIDTH
    return mapped


def to_robot(actions: Values, moments: Moments | None, state: Values | None, deployment: Deployment) -> Values:
    """Convert normalised actions [..., 32] to the robot's, [..., action_dim].

    state: [s] in the model's convention, not normalised; required for delta actions.
    """
    physical = actions if moments is None else unnormalise(actions, moments)
    if deployment.is_delta:
        assert state is not None, "the processor asks for the state where actions are differences"
        physical = physical + _added(state, deployment.is_delta, physical.shape[-1])
    if deployment.mirrors:
        mapped = actions_to_robot(physical)
        physical = np.concatenate([mapped, physical[..., mapped.shape[-1] :]], axis=-1)
    return physical[..., : deployment.action_dim]


def as_lines(moments: Moments | None, state: Values | None, deployment: Deployment) -> tuple[Values, Values]:
    """Return `to_robot` as factor and term, both [32]: `to_robot(x) == x * factor + term` on the first
    action_dim values.
    """
    ends = np.stack([np.zeros(ACTION_WIDTH), np.ones(ACTION_WIDTH)])
    term, at_one = np.zeros(ACTION_WIDTH), np.ones(ACTION_WIDTH)
    lines = to_robot(ends, moments, state, deployment)
    term[: lines.shape[-1]], at_one[: lines.shape[-1]] = lines
    return at_one - term, term


def _added(state: Values, is_delta: tuple[bool, ...], width: int) -> Values:
    """Return the state at delta actions and 0 elsewhere: [width]."""
    added = np.zeros(width)
    for index, adds in enumerate(is_delta[: len(state)]):
        if adds:
            added[index] = state[index]
    return added
