"""Sample inputs of V-JEPA 2 and V-JEPA 2-AC: clips, and pictures of a start and a goal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mstar_core.plugin import ModelSpec, SampleInputs
from mstar_core.workloads.media import ball_clip, ball_picture, clip, png
from mstar_vjepa2 import block

FRAMES = 16
SIDE = 256
SHORT = 4
"""Frames of a clip for V-JEPA 2-AC, which keeps them all."""

POSE = [0.3, 0.0, 0.2, 3.1, 0.0, 0.0, 0.5]
STEPS = 2
FEW: dict[str, Any] = {"samples": 64, "topk": 8, "cem_steps": 5}
"""Planning that takes a second on two CPU cores."""

START, GOAL = (-0.06, -0.05), (0.02, 0.03)
"""Places of the miniature's block, which two moves connect."""


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return the requests of one model. The miniature's pictures are of the block that it was trained to move."""
    return _base() if spec.name == "vjepa2" else _action(source)


def _base() -> list[SampleInputs]:
    files = (("clip.mp4", clip(ball_clip(FRAMES, SIDE))),)
    return [
        SampleInputs(
            name="encode", title="a clip to one vector", outputs=("tensor",), files=files, params={"pooling": "mean"}
        ),
        SampleInputs(
            name="predict",
            title="a clip to the features of its next frames",
            outputs=("tensor",),
            files=files,
            params={"task": "rollout", "horizon": 2},
        ),
    ]


def _action(source: str) -> list[SampleInputs]:
    if source == "mini":
        way = np.linspace(START, GOAL, SHORT)
        frames, pose, fastest = list(block.render(way)), block.poses(way[0]).tolist(), block.FASTEST
        axes: dict[str, Any] = {"maxnorm": fastest, "axis": {"z": 0.0, "gripper": 0.0}}
    else:
        frames = [ball_picture(SIDE, number / SHORT, 0.2) for number in range(SHORT)]
        pose, fastest, axes = POSE, 0.05, {}
    pair = (("start.png", png(frames[0])), ("goal.png", png(frames[-1])))
    effort = {} if source not in ("mini", "tiny") else FEW
    ways = [[[x, y, *[0.0] * 5]] * STEPS for x, y in ((fastest, 0.0), (0.0, fastest), (-fastest, -fastest))]
    return [
        SampleInputs(
            name="plan",
            title="a start and a goal to the moves between them",
            outputs=("tensor",),
            files=pair,
            params={"task": "plan", "states": [pose], "horizon": STEPS, "seed": 1, **effort, **axes},
        ),
        SampleInputs(
            name="rollout",
            title="a start, moves and a goal to the best of three ways",
            outputs=("tensor", "scalar"),
            files=pair,
            params={"task": "rollout", "states": [pose], "actions": ways, "return": ["energies"]},
        ),
        SampleInputs(
            name="encode",
            title="a clip to its features",
            outputs=("tensor",),
            files=(("clip.mp4", clip(frames, 4)),),
            params={"task": "encode"},
        ),
    ]
