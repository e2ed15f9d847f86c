"""Pi0.5's request parameters. Read by api, program and processor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.plugin import param

CAMERAS: Final = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
ACTION_WIDTH: Final = 32
"""Values per action step inside the model, and most values of a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The horizon is not here: it is fixed at start, since captured graphs depend on it."""

    robot_state: tuple[float, ...] | None = param(
        None, "joint values as the robot reports them; required when the prompt holds the state", max_items=ACTION_WIDTH
    )
    image_mask: tuple[bool, ...] | None = param(
        None, "which cameras count, in upload order; a camera without image never does", max_items=3
    )
    num_steps: int = param(10, "flow steps from noise to actions", ge=1, le=100)
    noise: tuple[tuple[float, ...], ...] | None = param(
        None, "starting noise [horizon, 32]; from seed when absent", max_items=1000
    )
    return_normalized: bool | None = param(
        None, "leave actions in the model's units. Default false with statistics, else true"
    )
    output_format: str = param("raw", "form of the actions", choices=("raw", "json", "npy"))
    seed: int | None = param(None, "same seed, same noise", ge=0, le=2**63 - 1, openai="seed")

    def check(self) -> Iterator[RequestError]:
        """Rules across fields. The horizon's length is checked by the processor, which knows the deployment."""
        widths = {len(row) for row in self.noise or ()}
        if self.noise is not None and widths != {ACTION_WIDTH}:
            yield RequestError(
                f"noise has rows of {', '.join(map(str, sorted(widths))) or 'no'} values",
                hint=f"send [horizon, {ACTION_WIDTH}]", field="noise", allowed=f"[horizon, {ACTION_WIDTH}]",
            )  # fmt: skip
        if self.noise is not None and any(not math.isfinite(value) for row in self.noise for value in row):
            yield RequestError(
                "noise holds a value that is no finite number", hint="send finite numbers", field="noise"
            )
        if self.image_mask is not None and not any(self.image_mask):
            yield RequestError(
                "image_mask switches every camera off", hint="leave at least one camera true", field="image_mask"
            )
