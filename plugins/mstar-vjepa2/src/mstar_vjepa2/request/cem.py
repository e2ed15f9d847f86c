"""What the cross-entropy method starts from: bounds, fixed axes and noise. Used by the AC processor."""

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
"""Of drawn noise, 64 MiB: it travels with the request."""

NEVER: Final = MOST_FRAMES + 1


def planning(params: ActionParams) -> dict[str, Array]:
    """Arrays of the planner's walk, float32. Raises TooLarge when its noise would be."""
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
    """Normal numbers [planning steps, horizon, samples, 4] in this order from one generator, or those given."""
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
    # PCG64 and numpy's way to draw are the same on every machine.
    drawn: Array = np.random.Generator(np.random.PCG64(params.seed)).standard_normal(shape, dtype=np.float32)
    return drawn
