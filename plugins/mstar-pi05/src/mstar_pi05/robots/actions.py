"""From the model's normalised actions to the robot's: one factor and one term for every value of an action.

Everything that is done to an action (statistics, difference to the state, joint signs, grippers) is linear in each of
its values, so it travels with the request as two vectors and is applied where the flow ends. Used by the processor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mstar_pi05.checkpoint.sizes import ACTION_WIDTH
from mstar_pi05.robots import aloha
from mstar_pi05.robots.normalisation import Values, unnormalise

if TYPE_CHECKING:
    from mstar_pi05.deployment import Deployment
    from mstar_pi05.robots.statistics import Moments


def to_robot(actions: Values, moments: Moments | None, state: Values | None, deployment: Deployment) -> Values:
    """Normalised actions [..., 32] as the robot takes them, [..., action_dim].

    state: [s] in the model's convention, not normalised; needed where actions are differences.
    """
    made = actions if moments is None else unnormalise(actions, moments)
    if deployment.is_delta:
        assert state is not None, "the processor asks for the state where actions are differences"
        made = made + _added(state, deployment.is_delta, made.shape[-1])
    if deployment.mirrors:
        mapped = aloha.actions_to_robot(made)
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
