"""World of `wan22:mini`: one coloured shape that moves over a plain background, and a judge by image arithmetic.

The shapes are those of `bagel:mini`. Used by the sample inputs, `train_moves`, `judge_moves` and the tests.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

SIDE: Final = 32
FRAMES: Final = 9
COLORS: Final = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 30),
    "purple": (150, 50, 180),
    "cyan": (40, 200, 220),
}
SHAPES: Final = ("circle", "square", "triangle")
DIRECTIONS: Final = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Steps to the right and downward."""

BACKGROUND: Final = (235, 235, 235)
HELD_OUT: Final = 0.15
PATH: Final = 12.0
"""Pixels that a shape moves from the first to the last frame."""

LEAST_PATH: Final = 6.0
LEAST_PIXELS: Final = 25
NEAR: Final = 75.0
"""Largest RGB distance of a pixel to its colour. Edges of shapes are further away."""

RADII: Final = np.linspace(4.5, 7.0, 6)
"""Radii of the drawings that a form is compared with."""

MOST_ERROR: Final = 0.2
"""Largest squared difference of a form to its drawing, as a share of the drawing."""

PARAMS: Final[dict[str, Any]] = {
    "width": SIDE,
    "height": SIDE,
    "num_frames": FRAMES,
    "num_inference_steps": 12,
    "guidance_scale": 2.0,
}
"""Parameters of a video of this world. Equal to `mini_params` of the spec, which may not import this module."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """A coloured shape and the direction in which it moves."""

    color: str
    shape: str
    direction: str

    @property
    def sentence(self) -> str:
        return f"a {self.color} {self.shape} moves {self.direction}"


def moves() -> list[Move]:
    return [Move(color, shape, direction) for color in COLORS for shape in SHAPES for direction in DIRECTIONS]


def split(seed: int) -> tuple[list[Move], list[Move]]:
    """Return moves of training, and moves that are never trained."""
    every = moves()
    random.Random(seed).shuffle(every)
    cut = int(HELD_OUT * len(every))
    return every[cut:], every[:cut]


def words() -> tuple[str, ...]:
    """Return the words of all sentences."""
    return ("a", "moves", *COLORS, *SHAPES, *DIRECTIONS)


def film(move: Move, chance: random.Random) -> Pixels:
    """Return a video of a move, uint8 [FRAMES, SIDE, SIDE, 3]."""
    radius = chance.uniform(5.0, 6.5)
    x_step, y_step = DIRECTIONS[move.direction]
    across, along = chance.uniform(radius + 2, SIDE - radius - 2), chance.uniform(radius + 1, SIDE - radius - 1 - PATH)
    frames = []
    for number in range(FRAMES):
        done = along + PATH * number / (FRAMES - 1)
        x = (done if x_step > 0 else SIDE - done) if x_step else across
        y = (done if y_step > 0 else SIDE - done) if y_step else across
        frames.append(render(move, (x, y), radius))
    return np.stack(frames)


def render(move: Move, center: tuple[float, float], radius: float) -> Pixels:
    """Return a picture of the shape, uint8 [SIDE, SIDE, 3]. Edges are antialiased by distance."""
    ys, xs = np.mgrid[:SIDE, :SIDE] + 0.5
    cover = np.clip(0.5 - _distance(move.shape, xs - center[0], ys - center[1], radius), 0, 1)[..., None]
    background = np.array(BACKGROUND, dtype=np.float64)
    return np.rint(background + cover * (np.array(COLORS[move.color]) - background)).astype(np.uint8)


def first_picture() -> bytes:
    """Return a red circle at the top as PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(render(Move("red", "circle", "down"), (SIDE / 2, 9.0), 6.0)).save(file, "PNG")
    return file.getvalue()


def _distance(shape: str, x: Floats, y: Floats, radius: float) -> Floats:
    """Return the signed distance of points to the edge of a shape around the origin, negative inside."""
    if shape == "circle":
        return np.asarray(np.hypot(x, y) - radius)
    if shape == "square":
        return np.asarray(np.maximum(np.abs(x), np.abs(y)) - 0.9 * radius)
    return np.asarray(np.maximum(y - radius, (2 * np.abs(x) - y - radius) / np.sqrt(5)))


def recognise(picture: Pixels) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the shapes of a picture [SIDE, SIDE, 3], by colour and form, with their centres."""
    names = [*COLORS, ""]
    palette = np.array([*COLORS.values(), BACKGROUND], dtype=np.float64)
    distance = np.linalg.norm(picture[:, :, None].astype(np.float64) - palette, axis=-1)
    nearest = np.where(distance.min(-1) < NEAR, distance.argmin(-1), len(names) - 1)
    found = {}
    for number, color in enumerate(names[:-1]):
        mask = nearest == number
        if mask.sum() < LEAST_PIXELS:
            continue
        ys, xs = np.nonzero(mask)
        center = float(xs.mean()) + 0.5, float(ys.mean()) + 0.5
        found[color, _form(picture, color, center)] = center
    return found


def _form(picture: Pixels, color: str, center: tuple[float, float]) -> str:
    """Return the form whose drawing is nearest to the picture, `blob` if none is near. center: of its pixels."""
    background = np.array(BACKGROUND, dtype=np.float64)
    toward = np.array(COLORS[color]) - background
    cover = np.clip((picture - background) @ toward / (toward @ toward), 0, 1)
    ys, xs = np.mgrid[:SIDE, :SIDE] + 0.5
    errors = {}
    for shape in SHAPES:
        for radius in RADII:
            # The centre of a triangle's pixels is below the middle of its box.
            down = radius / 3 if shape == "triangle" else 0.0
            ideal = np.clip(0.5 - _distance(shape, xs - center[0], ys - center[1] + down, float(radius)), 0, 1)
            errors[shape, radius] = float(np.square(cover - ideal).sum() / ideal.sum())
    (shape, _), error = min(errors.items(), key=lambda item: item[1])
    return shape if error < MOST_ERROR else "blob"


def shows(video: Pixels, move: Move) -> bool:
    """Return whether a video [F, SIDE, SIDE, 3] shows the shape alone, and its way in the named direction.

    The shape must be in the first and the last frame.
    """
    wanted = (move.color, move.shape)
    ends = [recognise(frame) for frame in (video[0], video[-1])]
    if any(set(seen) != {wanted} for seen in ends):
        return False
    x_step, y_step = DIRECTIONS[move.direction]
    (x, y), (last_x, last_y) = (seen[wanted] for seen in ends)
    along = (last_x - x) * x_step + (last_y - y) * y_step
    across = abs((last_x - x) * y_step) + abs((last_y - y) * x_step)
    return bool(along >= LEAST_PATH and across < along / 2)
