"""Movements of a request and initial values of a plan, as arrays. Used by the AC processor.

Actions, states and camera poses are split into those of the context and those of the rollout. A plan starts from
bounds, fixed axes and noise of the cross-entropy method.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import RequestError, TooLarge
from mstar_vjepa2.params import AXES, MOST_FRAMES
from mstar_vjepa2.request.tensors import as_float32

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_vjepa2.checkpoint.config import ActionConfig
    from mstar_vjepa2.params import ActionParams

    Array = npt.NDArray[Any]

MOST_CANDIDATES: Final = 4096


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Arrays of a rollout by input name. past: those of the frames before the last context frame."""

    arrays: dict[str, Array] = field(default_factory=dict)
    past: dict[str, Array] = field(default_factory=dict)


def read_trajectories(params: ActionParams, config: ActionConfig, *, is_planning: bool) -> Trajectories:
    """Return the movements of a rollout, or the start of a plan. Raises RequestError naming the field.

    All candidates have the same past before the last context frame, because they share its cache.
    """
    steps, past = (params.plan_steps if is_planning else params.steps), params.context_frames - 1
    trajectories = Trajectories()
    states = _states(params, needed=params.context_frames if is_planning else 0)
    actions = None if params.actions is None else as_float32(params.actions, "actions")
    if actions is None and past:
        raise _missing("actions", f"{past} for the context")
    if actions is not None:
        _check_candidates(actions)
        if past:
            _check_past(actions, past)
            trajectories.past["past_actions"] = _common(actions[..., :past, :], "actions")
        if not is_planning:
            trajectories.arrays["actions"] = _cut(actions, past, steps)
    if past:
        trajectories.past["past_states"] = _common(states[..., :past, :], "states")
    trajectories.arrays["state"] = np.ascontiguousarray(states[..., past, :])
    if params.state_mode == "given" and not is_planning:
        trajectories.arrays["states"] = _cut(states, past, steps)
    _check_rows(trajectories.arrays, params.candidates)
    if params.candidates == 1:  # a single candidate has no candidate axis
        trajectories.arrays.update(
            {name: _only(value, 1 if name == "state" else 2) for name, value in trajectories.arrays.items()}
        )
    cameras = _cameras(params, config, past + steps)
    if cameras is not None:
        trajectories.arrays["extrinsics"] = _cut(cameras, past, steps)
        if past:
            trajectories.past["past_extrinsics"] = np.ascontiguousarray(cameras[:past])
    return trajectories


def require_movements(params: ActionParams) -> None:
    """Raise RequestError unless the known frames come with actions and states."""
    for name, values in (("actions", params.actions), ("states", params.states)):
        if values is None:
            raise _missing(name, "it needs one per frame")


def taught(params: ActionParams, config: ActionConfig, frames: int) -> dict[str, Array]:
    """Return the movements of known frames. Raises RequestError naming the field."""
    arrays = {}
    for name, values in (("actions", params.actions), ("states", params.states)):
        value = as_float32(values, name)
        if value.ndim != 2 or len(value) != frames:
            raise RequestError(
                f"{name} has shape {list(value.shape)}, allowed is [{frames}, 7]",
                hint="task predict takes one per frame",
                field=name,
                value=str(list(value.shape)),
            )
        arrays[f"given_{name}"] = value
    cameras = _cameras(params, config, frames)
    return arrays if cameras is None else {**arrays, "given_extrinsics": cameras[:frames]}


def _states(params: ActionParams, needed: int) -> Array:
    if params.states is None:
        raise _missing("states", "it needs one per context frame")
    states = as_float32(params.states, "states")
    if needed and (states.ndim != 2 or len(states) != needed):
        raise RequestError(
            f"states has shape {list(states.shape)}, allowed is [{needed}, 7]",
            hint="a plan starts from one state per context frame",
            field="states",
            value=str(list(states.shape)),
        )
    return states


def _check_candidates(actions: Array) -> None:
    if actions.ndim == 3 and len(actions) > MOST_CANDIDATES:
        raise RequestError(
            f"actions have {len(actions)} candidates, allowed are {MOST_CANDIDATES}",
            hint="send them in several requests",
            field="actions",
            value=str(len(actions)),
            allowed=str(MOST_CANDIDATES),
        )


def _check_past(actions: Array, past: int) -> None:
    if actions.shape[-2] < past:
        raise RequestError(
            f"actions have {actions.shape[-2]} steps, the context needs {past}",
            hint="send one per context frame except the last",
            field="actions",
        )


def _check_rows(arrays: dict[str, Array], candidates: int) -> None:
    """Raise RequestError unless there is one state per candidate, or one for all."""
    state = arrays["state"]
    if state.ndim == 2 and len(state) != candidates:
        raise RequestError(
            f"states have {len(state)} candidates, actions {candidates}",
            hint="send one per candidate, or one [frames, 7] for all",
            field="states",
        )


def _common(value: Array, name: str) -> Array:
    """Return the values that all candidates share. value: [past, 7] or [K, past, 7]."""
    if value.ndim == 3:
        if not (value == value[:1]).all():
            raise RequestError(
                f"{name} of the context must be equal for all candidates",
                "candidates share one past",
                "send the same values for all, or several requests",
                field=name,
            )
        value = value[0]
    return np.ascontiguousarray(value)


def _only(value: Array, rank: int) -> Array:
    """Return the values of the only candidate without the candidate axis."""
    return value[0] if value.ndim > rank else value


def _cut(value: Array, start: int, count: int) -> Array:
    """Return the rollout's steps."""
    return np.ascontiguousarray(value[..., start : start + count, :])


def _cameras(params: ActionParams, config: ActionConfig, needed: int) -> Array | None:
    if params.extrinsics is None:
        if config.uses_extrinsics:
            raise _missing("extrinsics", "this checkpoint uses camera poses")
        return None
    if not config.uses_extrinsics:
        raise RequestError("extrinsics have no effect on this checkpoint", hint="omit them", field="extrinsics")
    cameras = as_float32(params.extrinsics, "extrinsics")
    if len(cameras) < needed:
        raise RequestError(
            f"extrinsics have {len(cameras)} frames, needed are {needed}", hint="send one per frame", field="extrinsics"
        )
    return cameras


def _missing(name: str, why: str) -> RequestError:
    return RequestError(f"{name} is missing", why, f"send {name}", field=name, code="missing_field")


MOST_NUMBERS: Final = 16_777_216
"""Maximum random numbers of a plan, 64 MiB. They travel with the request."""

NEVER: Final = MOST_FRAMES + 1


def planning(params: ActionParams) -> dict[str, Array]:
    """Return the float32 inputs of the planner's walk. Raises TooLarge if its noise would exceed the limit."""
    steps = params.plan_steps
    fixed = np.full(len(AXES), np.nan, dtype=np.float32)
    for name, value in params.fixed_axes.items():
        fixed[AXES.index(name)] = value
    mean = np.zeros((steps, len(AXES)), dtype=np.float32)
    mean[:] = np.where(np.isnan(fixed), mean, fixed)
    std = np.tile(np.asarray([params.maxnorm] * 3 + [1.0], dtype=np.float32), (steps, 1))
    closed = NEVER if params.close_gripper is None else params.close_gripper
    return {
        "mean": mean,
        "std": std,
        "noise": _noise(params),
        "fixed_axes": fixed,
        "close_from": np.asarray([closed], dtype=np.int64),
    }


def _noise(params: ActionParams) -> Array:
    """Return the request's noise, or normal numbers [planning steps, horizon, samples, 4] from one generator."""
    shape = (params.cem_steps, params.plan_steps, params.samples, len(AXES))
    count = int(np.prod(shape))
    if count > MOST_NUMBERS:
        raise TooLarge(
            f"the plan needs {count} random numbers, allowed are {MOST_NUMBERS}",
            f"cem_steps {shape[0]} x horizon {shape[1]} x samples {shape[2]} x 4",
            "lower cem_steps or samples",
            field="cem_steps",
            value=str(count),
            allowed=str(MOST_NUMBERS),
        )
    if params.noise is not None:
        return as_float32(params.noise, "noise")
    # PCG64 and numpy's normal sampling give the same numbers on every machine.
    drawn: Array = np.random.Generator(np.random.PCG64(params.seed)).standard_normal(shape, dtype=np.float32)
    return drawn
