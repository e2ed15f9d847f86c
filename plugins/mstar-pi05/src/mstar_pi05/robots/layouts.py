"""Keys of an observation, by robot. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import RequestError, did_you_mean
from mstar_pi05.checkpoint.config import CAMERAS

Keys = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Keys of one robot. images: by the model's cameras, None without that camera. state: concatenated in
    this order.

    images_in: key of the map with the images, None = top level. needed: required images.
    """

    images: tuple[str | None, str | None, str | None]
    state: Keys
    needed: frozenset[str]
    images_in: str | None = None

    @property
    def cameras(self) -> list[str]:
        """Keys of the cameras, in the model's order."""
        return [key for key in self.images if key is not None]

    def keys(self, size: int | None) -> str:
        """Return what an observation contains, for a sentence. size: number of values of the state, None = unknown."""
        cameras = ", ".join(self.cameras)
        images = cameras if self.images_in is None else f"{self.images_in} (a map of {cameras})"
        values = "" if size is None else f" ({size} values in all)" if len(self.state) > 1 else f" ({size} values)"
        return f"{images}, {', '.join(self.state or ('state',))}{values} and prompt"


LAYOUTS: Final[Mapping[str, Layout]] = {
    "libero": Layout(
        images=("observation/image", "observation/wrist_image", None),
        state=("observation/state",),
        needed=frozenset({"observation/image", "observation/wrist_image"}),
    ),
    "droid": Layout(
        images=("observation/exterior_image_1_left", "observation/wrist_image_left", None),
        state=("observation/joint_position", "observation/gripper_position"),
        needed=frozenset({"observation/exterior_image_1_left", "observation/wrist_image_left"}),
    ),
    "aloha": Layout(
        images=("cam_high", "cam_left_wrist", "cam_right_wrist"),
        state=("state",),
        needed=frozenset({"cam_high"}),
        images_in="images",
    ),
}
OWN: Final = Layout(images=CAMERAS, state=(), needed=frozenset(), images_in="images")
"""Layout of deployments without a robot: the model's camera names, and `state` if the deployment uses one."""

IGNORED: Final = frozenset({"cam_low"})
"""Cameras that clients send and the model does not use."""


def layout_of(robot: str | None) -> Layout:
    """Return the layout of a robot, or the model's own for None. Raises RequestError for an unknown robot."""
    if robot is not None and robot not in LAYOUTS:
        raise RequestError(f"unknown robot {robot!r}", hint=did_you_mean(robot, LAYOUTS), field="robot")
    return OWN if robot is None else LAYOUTS[robot]
