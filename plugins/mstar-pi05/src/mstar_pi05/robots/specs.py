"""What each robot sends and takes: sizes of state and action, which actions are differences. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Robot:
    """One mapping. state, actions: values. is_delta: per action, whether the model gives a difference to the state.

    mirrors: whether states and actions are turned into the joint convention that the model was trained in.
    checkpoint: which fine-tune knows this robot, in words.
    """

    name: str
    state: int
    actions: int
    is_delta: tuple[bool, ...] = ()
    mirrors: bool = False
    checkpoint: str = "one of your own"


ALOHA_ARM: Final = (True,) * 6 + (False,)
"""Six joints are differences, the gripper is not."""

ROBOTS: Final[Mapping[str, Robot]] = {
    "aloha": Robot(name="aloha", state=14, actions=14, is_delta=ALOHA_ARM * 2, mirrors=True),
    "droid": Robot(name="droid", state=8, actions=8, checkpoint="openpi's pi05_droid, converted by its script"),
    "libero": Robot(name="libero", state=8, actions=7, checkpoint="openpi's pi05_libero, converted by its script"),
}
