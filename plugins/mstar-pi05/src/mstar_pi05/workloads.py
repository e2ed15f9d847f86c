"""Load-test workload of Pi0.5: robots that ask for action chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mstar_core.workloads import ServedModel, WorkloadRequest, numbered, picture

TASKS: Final = (
    "pick up the red block and put it on the blue plate",
    "open the top drawer",
    "fold the towel",
    "put the cup beside the bowl",
    "close the lid of the box",
    "hand over the screwdriver",
)
JOINTS: Final = 8
"""Values of a state, and cameras, if the model does not publish their number."""
CAMERAS: Final = ("base", "left_wrist", "right_wrist")


def robot(
    card: ServedModel, seed: int, *, cameras: int | None = None, side: int = 224, used: int = 10, dt_s: float = 0.02
) -> Iterator[WorkloadRequest]:
    """Yield observations: `cameras` images, a task, and joint values, of the sizes that the model publishes.

    cameras: the first of the model's, None for all. used: actions executed of each chunk, dt_s apart, for the control
    rate.
    """
    joints = card.robot.get("state") or JOINTS
    names = tuple(card.robot.get("cameras") or CAMERAS)[:cameras]
    shape = [card.robot.get("horizon"), card.robot.get("action")]
    expected = {"used": used, "dt_s": dt_s, **({"shape": shape} if all(shape) else {})}
    for number, chance in enumerate(numbered(seed)):
        state = [round(chance.uniform(-1.0, 1.0), 4) for _ in range(joints)]
        yield WorkloadRequest(
            outputs=("action",),
            text=chance.choice(TASKS),
            files=tuple((f"{name}.png", picture(chance, side)) for name in names),
            params={"robot_state": state, "seed": number},
            expected=expected,
        )
