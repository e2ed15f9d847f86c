"""World of `vjepa2_ac:mini`: a block on a table that an arm moves, seen from above. numpy only.

Used by the sample inputs, `train_block`, `judge_block` and the tests. Places and moves are in metres.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]

REACH: Final = 0.15
"""The block's centre stays within this distance of the table's centre, along each axis."""
HALF: Final = 0.04
"""Half a side of the block."""
VIEW: Final = 0.2
"""Half the width of the picture."""
SIDE: Final = 32
FASTEST: Final = 0.05
"""Largest move along an axis."""
TOLERANCE: Final = 0.02
POSE: Final = 7


def draw(seed: int | tuple[int, ...], count: int) -> Floats:
    """Return random places of the block: [count, 2]."""
    return np.random.default_rng(seed).uniform(-REACH, REACH, (count, 2))


def moved(places: Floats, moves: Floats) -> Floats:
    """Return the places after moves, within reach. Both [..., 2]."""
    return np.clip(places + np.clip(moves, -FASTEST, FASTEST), -REACH, REACH)


def poses(values: Floats) -> Floats:
    """Return places or moves [..., 2] as the model's poses or actions [..., 7]."""
    return np.concatenate([values, np.zeros((*values.shape[:-1], POSE - 2))], axis=-1)


def render(places: Floats) -> Pixels:
    """Return pictures, uint8 [N, SIDE, SIDE, 3]: an orange block on a table whose colour changes along both axes."""
    middle = ((np.arange(SIDE) + 0.5) / SIDE * 2 - 1) * VIEW
    pixel = 2 * VIEW / SIDE
    share = (middle + VIEW) / (2 * VIEW)
    table = np.stack(np.broadcast_arrays(30 + 90 * share[None], 30 + 90 * share[::-1, None], np.full((1, 1), 70.0)), -1)
    across, up = (_cover(places[:, axis], sign * middle, pixel) for axis, sign in ((0, 1), (1, -1)))
    cover = (up[:, :, None] * across[:, None])[..., None]
    pixels: Pixels = np.rint(table + cover * (np.array([250.0, 160.0, 30.0]) - table)).astype(np.uint8)
    return pixels


def covered(places: Floats, patch: int) -> Floats:
    """Return the covered share of each patch of the picture: [N, (SIDE / patch) ** 2]."""
    count = SIDE // patch
    middle, size = ((np.arange(count) + 0.5) / count * 2 - 1) * VIEW, 2 * VIEW / count
    across, up = (_cover(places[:, axis], sign * middle, size) for axis, sign in ((0, 1), (1, -1)))
    return (up[:, :, None] * across[:, None]).reshape(len(places), -1)


def _cover(centre: Floats, middle: Floats, size: float) -> Floats:
    """Return the share of cells around `middle` that the block covers along one axis: [N, cells]."""
    low = np.maximum(centre[:, None] - HALF, middle - size / 2)
    high = np.minimum(centre[:, None] + HALF, middle + size / 2)
    cover: Floats = np.clip(high - low, 0, None) / size
    return cover
