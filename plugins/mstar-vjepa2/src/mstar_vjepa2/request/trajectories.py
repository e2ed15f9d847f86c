"""Actions, states and camera poses of a request as arrays: those of the past, and those that are rolled out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import RequestError
from mstar_vjepa2.request.tensors import as_float32

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_vjepa2.checkpoint.config import ActionConfig
    from mstar_vjepa2.params import ActionParams

    Array = npt.NDArray[Any]

MOST_CANDIDATES: Final = 4096


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Arrays of a rollout by input name. past: those of the frames before the last one seen."""

    arrays: dict[str, Array] = field(default_factory=dict)
    past: dict[str, Array] = field(default_factory=dict)


def read_trajectories(params: ActionParams, config: ActionConfig, *, is_planning: bool) -> Trajectories:
    """The movements of a rollout, or those that a plan starts from. Raises RequestError naming the field.

    Before the last context frame all candidates have one past: their cache is shared.
    """
    steps, past = (params.plan_steps if is_planning else params.steps), params.context_frames - 1
    found = Trajectories()
    states = _states(params, needed=params.context_frames if is_planning else 0)
    actions = None if params.actions is None else as_float32(params.actions, "actions")
    if actions is None and past:
        raise _missing("actions", f"{past} for the context")
    if actions is not None:
        _check_candidates(actions)
        if past:
            _check_past(actions, past)
            found.past["past_actions"] = _common(actions[..., :past, :], "actions")
        if not is_planning:
            found.arrays["actions"] = _cut(actions, past, steps)
    if past:
        found.past["past_states"] = _common(states[..., :past, :], "states")
    found.arrays["state"] = np.ascontiguousarray(states[..., past, :])
    if params.state_mode == "given" and not is_planning:
        found.arrays["states"] = _cut(states, past, steps)
    _check_rows(found.arrays, params.candidates)
    if params.candidates == 1:  # a request of one row has no axis of rows
        found.arrays.update({name: _only(value, 1 if name == "state" else 2) for name, value in found.arrays.items()})
    cameras = _cameras(params, config, past + steps)
    if cameras is not None:
        found.arrays["extrinsics"] = _cut(cameras, past, steps)
        if past:
            found.past["past_extrinsics"] = np.ascontiguousarray(cameras[:past])
    return found


def require_movements(params: ActionParams) -> None:
    """Known frames need known movements. Raises RequestError naming the field that is missing."""
    for name, given in (("actions", params.actions), ("states", params.states)):
        if given is None:
            raise _missing(name, "one for each frame")


def taught(params: ActionParams, config: ActionConfig, frames: int) -> dict[str, Array]:
    """The movements of frames that are all known. Raises RequestError naming the field."""
    found = {}
    for name, given in (("actions", params.actions), ("states", params.states)):
        value = as_float32(given, name)
        if value.ndim != 2 or len(value) != frames:
            raise RequestError(
                f"{name} has shape {list(value.shape)}, allowed is [{frames}, 7]",
                hint="task predict takes one for each frame",
                field=name,
                value=str(list(value.shape)),
            )
        found[f"given_{name}"] = value
    cameras = _cameras(params, config, frames)
    return found if cameras is None else {**found, "given_extrinsics": cameras[:frames]}


def _states(params: ActionParams, needed: int) -> Array:
    if params.states is None:
        raise _missing("states", "one for each context frame")
    states = as_float32(params.states, "states")
    if needed and (states.ndim != 2 or len(states) != needed):
        raise RequestError(
            f"states has shape {list(states.shape)}, allowed is [{needed}, 7]",
            hint="a plan starts from one state for each context frame",
            field="states",
            value=str(list(states.shape)),
        )
    return states


def _check_candidates(actions: Array) -> None:
    if actions.ndim == 3 and len(actions) > MOST_CANDIDATES:
        raise RequestError(
            f"actions hold {len(actions)} candidates, allowed are {MOST_CANDIDATES}",
            hint="send them in several requests",
            field="actions",
            value=str(len(actions)),
            allowed=str(MOST_CANDIDATES),
        )


def _check_past(actions: Array, past: int) -> None:
    if actions.shape[-2] < past:
        raise RequestError(
            f"actions hold {actions.shape[-2]} steps, the context needs {past}",
            hint="send one for each context frame but the last",
            field="actions",
        )


def _check_rows(arrays: dict[str, Array], candidates: int) -> None:
    """States of candidates are as many as these."""
    state = arrays["state"]
    if state.ndim == 2 and len(state) != candidates:
        raise RequestError(
            f"states hold {len(state)} candidates, actions {candidates}",
            hint="send as many, or one [frames, 7] for all",
            field="states",
        )


def _common(value: Array, name: str) -> Array:
    """What all candidates share. value: [past, 7] or [K, past, 7]."""
    if value.ndim == 3:
        if not (value == value[:1]).all():
            raise RequestError(
                f"{name} of the context differ between candidates",
                "what has happened is the same for all",
                "let them begin with the same values, or send several requests",
                field=name,
            )
        value = value[0]
    return np.ascontiguousarray(value)


def _only(value: Array, rank: int) -> Array:
    """The values of the one candidate, without an axis of candidates."""
    return value[0] if value.ndim > rank else value


def _cut(value: Array, start: int, count: int) -> Array:
    """The steps that are rolled out."""
    return np.ascontiguousarray(value[..., start : start + count, :])


def _cameras(params: ActionParams, config: ActionConfig, needed: int) -> Array | None:
    if params.extrinsics is None:
        if config.uses_extrinsics:
            raise _missing("extrinsics", "this checkpoint uses the camera's pose")
        return None
    if not config.uses_extrinsics:
        raise RequestError("extrinsics have no effect on this checkpoint", hint="leave them out", field="extrinsics")
    cameras = as_float32(params.extrinsics, "extrinsics")
    if len(cameras) < needed:
        raise RequestError(
            f"extrinsics hold {len(cameras)} frames, needed are {needed}", hint="send one for each", field="extrinsics"
        )
    return cameras


def _missing(name: str, why: str) -> RequestError:
    return RequestError(f"{name} is missing", why, f"send {name}", field=name, code="missing_field")
