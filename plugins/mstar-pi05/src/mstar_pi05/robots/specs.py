"""Supported robots: sizes of state and action, and delta actions. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Robot:
    """One robot. state, actions: numbers of values. is_delta: per action value, whether it is relative to
    the state.

    mirrors: whether states and actions are converted to the joint convention of the training. checkpoint: description
    of the fine-tune for this robot.
    """

    name: str
    state: int
    actions: int
    is_delta: tuple[bool, ...] = ()
    mirrors: bool = False
    checkpoint: str = "one of your own"


ALOHA_ARM: Final = (True,) * 6 + (False,)
"""Six joints have delta actions, the gripper has absolute ones."""

ROBOTS: Final[Mapping[str, Robot]] = {
    "aloha": Robot(name="aloha", state=14, actions=14, is_delta=ALOHA_ARM * 2, mirrors=True),
    "droid": Robot(name="droid", state=8, actions=8, checkpoint="openpi's pi05_droid, converted by its script"),
    "libero": Robot(name="libero", state=8, actions=7, checkpoint="openpi's pi05_libero, converted by its script"),
}
