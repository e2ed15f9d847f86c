"""World of `pi05:mini`: a planar arm of two joints among coloured targets, seen by three cameras. numpy only.

Used by the sample inputs, `train_arm`, `judge_arm` and the tests.
Lengths are in link lengths times two: the stretched arm reaches 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Pixels = npt.NDArray[np.uint8]

COLOURS: Final = {"red": (230, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 240)}
NAMES: Final = tuple(COLOURS)
LINK: Final = 0.5
LOW: Final = np.array([-1.5, 0.3])
HIGH: Final = np.array([1.5, 2.3])
"""Joint limits in radians. The elbow bends one way, so that a target has one solution."""
SIDE: Final = 32
HORIZON: Final = 10
FASTEST: Final = 0.12
"""Largest joint movement of one step, in radians."""
GAIN: Final = 0.35
TOLERANCE: Final = 0.08
"""Largest distance between tip and target that counts as reached."""
RADIUS: Final = 0.15
"""Of a target."""
APART: Final = 0.35
"""Smallest distance between two targets, and between the first tip and the named target."""

_BACKGROUND, _UPPER, _LOWER, _TIP = (24, 24, 28), (150, 150, 150), (215, 215, 215), (255, 220, 0)


@dataclass(frozen=True, slots=True)
class Scenes:
    """A batch of N scenes. joints: [N, 2] in radians. targets: [N, 3, 2] in the order of NAMES. named: int [N]."""

    joints: Floats
    targets: Floats
    named: npt.NDArray[np.int64]

    def goal(self) -> Floats:
        """Return the place of the named target: [N, 2]."""
        return self.targets[np.arange(len(self.named)), self.named]

    def moved(self, joints: Floats) -> Scenes:
        """Return the scenes with other joint values, within the limits."""
        return Scenes(np.clip(joints, LOW, HIGH), self.targets, self.named)

    def distance(self) -> Floats:
        """Return the distance between tip and named target: [N]."""
        distances: Floats = np.linalg.norm(points(self.joints)[1] - self.goal(), axis=-1)
        return distances


def points(joints: Floats) -> tuple[Floats, Floats]:
    """Return elbow and tip of joint values [..., 2]: [..., 2] each."""
    first, second = joints[..., 0], joints[..., 0] + joints[..., 1]
    elbow = LINK * np.stack([np.cos(first), np.sin(first)], axis=-1)
    return elbow, elbow + LINK * np.stack([np.cos(second), np.sin(second)], axis=-1)


def solution(places: Floats) -> Floats:
    """Return the joint values whose tip is at `places` [..., 2]: the inverse of `points`."""
    reach = np.clip(np.linalg.norm(places, axis=-1), 1e-6, 2 * LINK)
    bend = 2 * np.arccos(reach / (2 * LINK))
    first = np.arctan2(places[..., 1], places[..., 0]) - bend / 2
    return np.stack([first, bend], axis=-1)


def draw(seed: int | tuple[int, ...], count: int) -> Scenes:
    """Return random scenes in which every target can be reached and the tip is not at the named one."""
    chance = np.random.default_rng(seed)
    kept: list[Scenes] = []
    while sum(len(batch.named) for batch in kept) < count:
        joints = chance.uniform(LOW, HIGH, (2 * count, 2))
        targets = points(chance.uniform(LOW + 0.1, HIGH - 0.1, (2 * count, len(NAMES), 2)))[1]
        scenes = Scenes(joints, targets, chance.integers(len(NAMES), size=2 * count))
        gaps = np.linalg.norm(targets - np.roll(targets, 1, axis=1), axis=-1).min(axis=1)
        good = (gaps > APART) & (scenes.distance() > APART)
        kept.append(Scenes(joints[good], targets[good], scenes.named[good]))
    parts = zip(*((batch.joints, batch.targets, batch.named) for batch in kept), strict=True)
    joints, targets, named = (np.concatenate(part)[:count] for part in parts)
    return Scenes(joints, targets, named)


def expert(scenes: Scenes) -> Floats:
    """Return joint movements towards the named target, [N, HORIZON, 2]: proportional, with a top speed."""
    aim, joints, plan = solution(scenes.goal()), scenes.joints, []
    for _ in range(HORIZON):
        plan.append(np.clip(GAIN * (aim - joints), -FASTEST, FASTEST))
        joints = joints + plan[-1]
    return np.stack(plan, axis=1)


def instruction(named: int) -> str:
    return f"reach the {NAMES[named]} target"


def render(scenes: Scenes) -> Pixels:
    """Return the cameras of each scene, uint8 [N, 3, SIDE, SIDE, 3]: from above, at the tip, from above and turned."""
    elbow, tip = (point.astype(np.float32) for point in points(scenes.joints))
    middle = ((np.arange(SIDE) + 0.5) / SIDE * 2 - 1).astype(np.float32)
    across, down = np.meshgrid(middle, -middle)
    above = np.broadcast_to(1.1 * np.stack([across, down], axis=-1), (len(tip), SIDE, SIDE, 2))
    turned = np.broadcast_to(1.1 * np.stack([down, -across], axis=-1), above.shape)
    close = 0.5 * np.stack([across, down], axis=-1) + tip[:, None, None]
    views = ((above, 1.1), (close, 0.5), (turned, 1.1))
    return np.stack([_drawn(scenes, elbow, tip, at, 2 * half / SIDE) for at, half in views], axis=1)


def _drawn(scenes: Scenes, elbow: Singles, tip: Singles, at: Singles, pixel: float) -> Pixels:
    """Return one camera, uint8 [N, SIDE, SIDE, 3]. at: the world's point of each pixel. pixel: its width."""
    image = np.broadcast_to(np.array(_BACKGROUND, dtype=np.float32), (*at.shape[:3], 3)).copy()
    base = np.zeros_like(elbow)
    for number, colour in enumerate(COLOURS.values()):
        place = scenes.targets[:, number].astype(np.float32)
        _paint(image, _far(at, place, place) - RADIUS, pixel, colour)
    for start, end, width, colour in ((base, elbow, 0.05, _UPPER), (elbow, tip, 0.04, _LOWER), (tip, tip, 0.06, _TIP)):
        _paint(image, _far(at, start, end) - width, pixel, colour)
    return np.rint(image).astype(np.uint8)


def _far(at: Singles, start: Singles, end: Singles) -> Singles:
    """Return the distance of points [N, S, S, 2] from segments between [N, 2] and [N, 2]."""
    start, along = start[:, None, None], (end - start)[:, None, None]
    share = ((at - start) * along).sum(-1) / np.maximum((along * along).sum(-1), 1e-12)
    gap = at - start - np.clip(share, 0, 1)[..., None] * along
    distances: Singles = np.sqrt((gap * gap).sum(-1))
    return distances


def _paint(image: Singles, distance: Singles, pixel: float, colour: tuple[int, int, int]) -> None:
    """Paint where `distance` is negative, with soft edges of one pixel."""
    cover = np.clip(0.5 - distance / pixel, 0, 1).astype(np.float32)[..., None]
    image += cover * (np.array(colour, dtype=np.float32) - image)
