"""Warm-up passes of both nodes, so that the first request is as fast as later ones.

The passes do not depend on values: the host decides attention and KV slots without reading them. Only kernels read the
row of the time table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from mstar_core.engine.base import LoopSpec
from mstar_core.engine.module import WarmupRequest, WarmupStep
from mstar_core.graph.declare.nodes import Attend, from_param
from mstar_pi05.checkpoint.config import ACTION_WIDTH, IMAGE, Sizes

if TYPE_CHECKING:
    from torch import Tensor

PROMPT: Final = 8
"""Prompt ids of a warm-up request. Their number does not affect compiled or captured kernels."""


def of_cameras(sizes: Sizes) -> Sequence[WarmupRequest]:
    """Return a pass of one uint8 camera. Other batch sizes are captured with it."""
    side, places = sizes.vision.image_size, sizes.vision.tokens
    images = torch.zeros(1, side, side, 3, dtype=torch.uint8)
    step = WarmupStep(inputs={"images": images, "tokens": torch.full((places,), IMAGE)}, outputs=("features",))
    return [WarmupRequest(title="one camera", tokens=places, steps=(step,), is_value_free=True)]


def of_policy(sizes: Sizes, steps: Iterable[int]) -> Sequence[WarmupRequest]:
    """Return a prefill of one camera, followed by a flow of each number of steps."""
    tokens = torch.cat([torch.full((sizes.vision.tokens,), IMAGE), torch.zeros(PROMPT, dtype=torch.int64)])
    embeds = torch.zeros(len(tokens), sizes.language.width)
    prefix = WarmupStep(inputs={"tokens": tokens, "embeds": embeds}, attend=Attend(mask="full"))
    kinds: dict[str, tuple[WarmupStep, ...]] = {
        f"a flow of {count} steps": (prefix, _flow(sizes, count)) for count in steps
    }
    kinds = kinds or {"a prefix": (prefix,)}
    return [
        WarmupRequest(title=what, tokens=len(tokens), steps=kind, is_value_free=True) for what, kind in kinds.items()
    ]


def _flow(sizes: Sizes, steps: int) -> WarmupStep:
    """Return the flow as the walk `action_gen` runs it."""
    plan = torch.zeros(sizes.horizon, ACTION_WIDTH)
    inputs: dict[str, Tensor] = {
        "actions": plan,
        "scale": plan,
        "offset": plan,
        from_param("num_steps"): torch.tensor(steps),
    }
    return WarmupStep(
        inputs=inputs,
        attend=Attend(mask="full", write=False),
        outputs=("actions", "robot_actions"),
        loop=LoopSpec(max_iters=steps, carry={"actions": "actions"}, fused=True),
    )
