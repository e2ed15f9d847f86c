"""Request parameters of Pi0.5. Read by the api, the program and the processor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mstar_core.errors import RequestError
from mstar_core.plugin import param
from mstar_pi05.checkpoint.config import ACTION_WIDTH, CAMERAS
from mstar_pi05.deployment import LONGEST_HORIZON, MOST_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Request parameters. The horizon is a deployment option, because captured graphs depend on it."""

    robot_state: tuple[float, ...] | None = param(
        None, "joint values as the robot reports them; required when the prompt holds the state", max_items=ACTION_WIDTH
    )
    image_mask: tuple[bool, ...] | None = param(
        None, "cameras to use, in upload order; a camera without an image must be false", max_items=len(CAMERAS)
    )
    num_steps: int = param(
        10, "flow steps from noise to actions; the deployment may set a lower limit", ge=1, le=MOST_STEPS
    )
    noise: tuple[tuple[float, ...], ...] | None = param(
        None, "initial noise [horizon, 32]; from seed by default", max_items=LONGEST_HORIZON
    )
    return_normalized: bool | None = param(
        None, "return actions in the model's units. Default false with statistics, else true"
    )
    output_format: str = param("raw", "format of the actions", choices=("raw", "npy", "safetensors", "json"))
    seed: int | None = param(None, "the same seed gives the same noise", ge=0, le=2**63 - 1, openai="seed")

    def check(self) -> Iterator[RequestError]:
        """Yield violations of rules across fields. The processor checks rules that depend on the deployment."""
        widths = {len(row) for row in self.noise or ()}
        if self.noise is not None and widths != {ACTION_WIDTH}:
            yield RequestError(
                f"noise has rows of {', '.join(map(str, sorted(widths))) or 'no'} values",
                hint=f"send [horizon, {ACTION_WIDTH}]",
                field="noise",
                allowed=f"[horizon, {ACTION_WIDTH}]",
            )
        if self.noise is not None and any(not math.isfinite(value) for row in self.noise for value in row):
            yield RequestError("noise must contain finite numbers only", hint="send finite numbers", field="noise")
        if self.robot_state is not None and not self.robot_state:
            yield RequestError("robot_state is empty", hint="send the joint values", field="robot_state")
        if self.image_mask is not None and not any(self.image_mask):
            yield RequestError(
                "image_mask disables every camera", hint="leave at least one camera true", field="image_mask"
            )
