"""World of `bagel:mini`: coloured shapes on a plain background, their sentences, and a judge by image arithmetic.

Used by the sample inputs, `train_shapes`, `judge_shapes` and the tests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

SIDE: Final = 64
COLORS: Final = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 30),
    "purple": (150, 50, 180),
    "cyan": (40, 200, 220),
}
SHAPES: Final = ("circle", "square", "triangle")
RELATIONS: Final = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Direction from the second shape to the first: x to the right, y downward."""
OPPOSITE: Final = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
BACKGROUND: Final = (235, 235, 235)
HELD_OUT: Final = 0.15
QUESTION: Final = "what is this?"
NEAR: Final = 70.0
"""Largest RGB distance of a pixel to its colour. Edges of shapes are further away."""
LEAST_PIXELS: Final = 40
FILLED: Final = {"triangle": (0.35, 0.65), "circle": (0.67, 0.87), "square": (0.88, 1.01)}
"""Bounds of the filled share of the bounding box. Ideal: 1/2, pi/4 and 1."""


@dataclass(frozen=True, slots=True, order=True)
class Thing:
    """A coloured shape."""

    color: str
    shape: str

    def __str__(self) -> str:
        return f"a {self.color} {self.shape}"


@dataclass(frozen=True, slots=True)
class Scene:
    """One shape, or two in a relation."""

    first: Thing
    relation: str = ""
    second: Thing | None = None

    @property
    def sentence(self) -> str:
        return str(self.first) if self.second is None else f"{self.first} {self.relation} {self.second}"

    @property
    def things(self) -> tuple[Thing, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)

    @property
    def mirrored(self) -> Scene:
        """The same picture, described from the other shape."""
        return self if self.second is None else Scene(self.second, OPPOSITE[self.relation], self.first)


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one shape's colour."""

    before: Thing
    color: str

    @property
    def sentence(self) -> str:
        return f"make it {self.color}"

    @property
    def after(self) -> Thing:
        return replace(self.before, color=self.color)


def things() -> list[Thing]:
    return [Thing(color, shape) for color in COLORS for shape in SHAPES]


def pairs() -> list[Scene]:
    """Return all scenes of two shapes of different colours. Each picture occurs once, left or upper shape first."""
    return [
        Scene(first, relation, second)
        for first in things()
        for second in things()
        if first.color != second.color
        for relation in ("left of", "above")
    ]


def edits() -> list[Edit]:
    return [Edit(thing, color) for thing in things() for color in COLORS if color != thing.color]


def split(seed: int) -> tuple[list[Scene], list[Scene], list[Edit], list[Edit]]:
    """Return scenes of training and unseen ones, then edits of training and unseen ones. Single shapes are all seen."""
    chance = random.Random(seed)
    scenes, changes = pairs(), edits()
    chance.shuffle(scenes)
    chance.shuffle(changes)
    cut, other = int(HELD_OUT * len(scenes)), int(HELD_OUT * len(changes))
    return [Scene(thing) for thing in things()] + scenes[cut:], scenes[:cut], changes[other:], changes[:other]


def places(scene: Scene, chance: random.Random) -> list[tuple[float, float, float]]:
    """Return centre and radius of each shape, in pixels."""
    radii = [chance.uniform(8.5, 12.0) for _ in scene.things]
    if scene.second is None:
        return [(chance.uniform(15, SIDE - 15), chance.uniform(15, SIDE - 15), radii[0])]
    x, y = RELATIONS[scene.relation]
    centers = []
    for sign, radius in zip((1, -1), radii, strict=True):
        along, across = sign * chance.uniform(15, 17), chance.uniform(-4, 4)
        centers.append((SIDE / 2 + x * along + y * across, SIDE / 2 + y * along + x * across, radius))
    return centers


def draw(scene: Scene, chance: random.Random) -> Pixels:
    """Return a picture of the scene, uint8 [SIDE, SIDE, 3]."""
    return render(scene.things, places(scene, chance))


def render(drawn: tuple[Thing, ...], where: list[tuple[float, float, float]]) -> Pixels:
    """Return a picture of shapes with centre and radius. Edges are antialiased by distance."""
    ys, xs = np.mgrid[:SIDE, :SIDE] + 0.5
    picture = np.broadcast_to(np.array(BACKGROUND, dtype=np.float64), (SIDE, SIDE, 3))
    for thing, (x, y, radius) in zip(drawn, where, strict=True):
        cover = np.clip(0.5 - _distance(thing.shape, xs - x, ys - y, radius), 0, 1)[..., None]
        picture = picture + cover * (np.array(COLORS[thing.color]) - picture)
    return np.rint(picture).astype(np.uint8)


def _distance(shape: str, x: Floats, y: Floats, radius: float) -> Floats:
    """Return the signed distance of points to the edge of a shape around the origin, negative inside."""
    if shape == "circle":
        return np.asarray(np.hypot(x, y) - radius)
    if shape == "square":
        return np.asarray(np.maximum(np.abs(x), np.abs(y)) - 0.9 * radius)
    return np.asarray(np.maximum(y - radius, (2 * np.abs(x) - y - radius) / np.sqrt(5)))


def recognise(picture: Pixels) -> dict[Thing, tuple[float, float]]:
    """Return the shapes of a picture [SIDE, SIDE, 3] with their centres. A shape of no known form is left out."""
    names = [*COLORS, ""]
    palette = np.array([*COLORS.values(), BACKGROUND], dtype=np.float64)
    distance = np.linalg.norm(picture[:, :, None].astype(np.float64) - palette, axis=-1)
    nearest = np.where(distance.min(-1) < NEAR, distance.argmin(-1), len(names) - 1)
    positions = {}
    for number, color in enumerate(names[:-1]):
        mask = nearest == number
        rows, columns = np.flatnonzero(mask.sum(1) >= 2), np.flatnonzero(mask.sum(0) >= 2)
        if mask.sum() < LEAST_PIXELS or not len(rows) or not len(columns):
            continue
        box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        shape = next((name for name, (low, high) in FILLED.items() if low <= box.mean() < high), "blob")
        ys, xs = np.nonzero(mask)
        positions[Thing(color, shape)] = float(xs.mean()), float(ys.mean())
    return positions


def shows(picture: Pixels, scene: Scene) -> bool:
    """Return whether a picture shows the shapes of the scene in their relation, and no other shape."""
    positions = recognise(picture)
    if set(positions) != set(scene.things):
        return False
    if scene.second is None:
        return True
    (x, y), (other_x, other_y) = positions[scene.first], positions[scene.second]
    along, across = RELATIONS[scene.relation]
    return bool((x - other_x) * along + (y - other_y) * across > abs((x - other_x) * across + (y - other_y) * along))


def describes(text: str, scene: Scene) -> bool:
    """Return whether a text is a true sentence about the scene, from either shape."""
    return text.strip() in (scene.sentence, scene.mirrored.sentence)
