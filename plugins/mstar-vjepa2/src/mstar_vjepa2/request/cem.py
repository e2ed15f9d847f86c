"""Initial values of the cross-entropy method: bounds, fixed axes and noise. Used by the AC processor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import TooLarge
from mstar_vjepa2.params import AXES, MOST_FRAMES
from mstar_vjepa2.request.tensors import as_float32

if TYPE_CHECKING:
    import numpy.typing as npt

    from mstar_vjepa2.params import ActionParams

    Array = npt.NDArray[Any]

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
