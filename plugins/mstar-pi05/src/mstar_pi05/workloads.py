"""Load-test workload of Pi0.5: robots that ask for action chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mstar_core.workloads import ServedModel, WorkloadRequest, numbered, picture

TASKS: Final = (
    "pick up the red block and put it on the blue plate", "open the top drawer", "fold the towel",
    "put the cup beside the bowl", "close the lid of the box", "hand over the screwdriver",
)  # fmt: skip
JOINTS: Final = 8


def robot(
    card: ServedModel, seed: int, *, cameras: int = 3, side: int = 224, used: int = 10, dt_s: float = 0.02
) -> Iterator[WorkloadRequest]:
    """Yield observations: `cameras` images, a task, and joint values.

    used: actions executed of each chunk, dt_s apart, for the control rate.
    """
    for number, chance in enumerate(numbered(seed)):
        state = [round(chance.uniform(-1.0, 1.0), 4) for _ in range(JOINTS)]
        yield WorkloadRequest(
            outputs=("action",), text=chance.choice(TASKS),
            files=tuple((f"camera{camera}.png", picture(chance, side)) for camera in range(cameras)),
            params={"robot_state": state, "seed": number}, expected={"used": used, "dt_s": dt_s},
        )  # fmt: skip
