"""Sample requests of both models. The conformance checks run the programs on them."""

from __future__ import annotations

import math
from typing import Any

from mstar_core.plugin import Sample

CLIP = {"pixel_values_videos": (64, 3, 256, 256)}
MASKS = {"context_mask": (8192,), "target_mask": (256,)}
FRAME = {"pixel_values_videos": (1, 3, 256, 256)}
MOVE = [0.01, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
POSE = [0.3, 0.0, 0.2, 3.1, 0.0, 0.0, 0.5]
GOAL = {"goal_frame": (1, 3, 256, 256)}
TENSOR = frozenset({"tensor"})
SCORED = frozenset({"tensor", "scalar"})
LEGACY = frozenset({"scalar", "tensor", "video"})
AND_GOAL = ("video", "image")


def _candidates(count: int, steps: int) -> list[list[list[float]]]:
    """Return candidates whose last moves have different directions, so that rounding does not decide which is best."""
    last = [[round(0.05 * turn(number), 4) for turn in (math.cos, math.sin)] + [0.0] * 5 for number in range(count)]
    return [[MOVE] * (steps - 1) + [move] for move in last]


def _roll(steps: int, candidates: int | None = None, **params: Any) -> dict[str, Any]:
    actions = [MOVE] * steps if candidates is None else _candidates(candidates, steps)
    return {"task": "rollout", "actions": actions, "states": [POSE], **params}


def _start(steps: int, candidates: int | None = None) -> dict[str, tuple[int, ...]]:
    return {**FRAME, "state": (7,), "actions": (steps, 7) if candidates is None else (candidates, steps, 7)}


BASE_SAMPLES = (
    Sample(name="encode", inputs=CLIP, outputs=TENSOR),
    Sample(name="encode, pooled", inputs=CLIP, outputs=TENSOR, params={"pooling": "mean_space"}),
    Sample(
        name="encode, two layers",
        inputs={**CLIP, "layers": (2,)},
        outputs=TENSOR,
        params={"layers": [0, 12]},
        tiny={"layers": [0, 2]},
    ),
    Sample(name="encode, attentive", inputs=CLIP, outputs=TENSOR, params={"pooling": "attentive"}),
    Sample(name="classify", inputs=CLIP, outputs=TENSOR, params={"task": "classify", "num_frames": 16}),
    Sample(name="predict", inputs={**CLIP, **MASKS}, outputs=TENSOR, params={"task": "predict"}),
    Sample(name="predict, as video", inputs={**CLIP, **MASKS}, outputs=LEGACY),
    Sample(name="rollout", inputs={**CLIP, **MASKS}, outputs=TENSOR, params={"task": "rollout", "horizon": 4}),
    Sample(
        name="rollout, earlier names",
        inputs={**CLIP, **MASKS},
        outputs=LEGACY,
        params={"rollout_horizon": 4, "stream_rollout": False},
    ),
    Sample(name="encode, earlier name", inputs=CLIP, outputs=LEGACY, params={"skip_predictor": True}),
)

_PAST = {"context": (2, 3, 256, 256), "past_actions": (2, 7), "past_states": (2, 7)}
_TAUGHT = {"pixel_values_videos": (4, 3, 256, 256), "given_actions": (4, 7), "given_states": (4, 7)}
_TEACH = {"task": "predict", "actions": [MOVE] * 4, "states": [POSE] * 4}
_PLAN = {
    **FRAME,
    **GOAL,
    "mean": (2, 4),
    "std": (2, 4),
    "noise": (10, 2, 400, 4),
    "fixed_axes": (4,),
    "close_from": (1,),
    "state": (7,),
}
_FEW = {"samples": 6, "topk": 2, "cem_steps": 2}

AC_SAMPLES = (
    Sample(name="encode", inputs=FRAME, outputs=TENSOR),
    Sample(name="predict", inputs=_TAUGHT, outputs=TENSOR, params=_TEACH),
    Sample(name="rollout", inputs=_start(4), outputs=TENSOR, params=_roll(4)),
    Sample(
        name="rollout, given states",
        inputs={**_start(2), "states": (2, 7)},
        outputs=TENSOR,
        params={**_roll(2, state_mode="given"), "states": [POSE] * 2},
    ),
    Sample(name="rollout, last frame", inputs=_start(4), outputs=TENSOR, params=_roll(4, returns=["final_only"])),
    Sample(
        name="rollout, three context frames",
        inputs={**_start(2, 3), **_PAST},
        outputs=TENSOR,
        params={**_roll(4, 3, context_frames=3), "states": [POSE] * 3},
    ),
    Sample(
        name="rollout, scored",
        inputs={**_start(2, 3), **GOAL},
        outputs=SCORED,
        params=_roll(2, 3),
        files=AND_GOAL,
    ),
    Sample(
        name="rollout, scored, last frame",
        inputs={**_start(2, 3), **GOAL},
        outputs=SCORED,
        params=_roll(2, 3, returns=["latents", "final_only"]),
        files=AND_GOAL,
    ),
    Sample(
        name="rollout, many candidates",
        inputs={**_start(2, 64), **GOAL},
        outputs=SCORED,
        params=_roll(2, 64),
        files=AND_GOAL,
        tiny=_roll(2, 9),
    ),
    Sample(
        name="rollout, earlier names",
        inputs={**_start(2, 3), "goal_latents": (256, 1408)},
        outputs=LEGACY,
        params={
            "mpc": True,
            "rollout_horizon": 2,
            "goal_hidden_fill": 0.0,
            "actions": _candidates(3, 2),
            "states": [POSE],
        },
    ),
    Sample(name="encode, as video", inputs=FRAME, outputs=LEGACY, params={"skip_predictor": True}),
    Sample(name="predict, as video", inputs=_TAUGHT, outputs=LEGACY, params=_TEACH),
    Sample(name="rollout, as video", inputs=_start(4), outputs=LEGACY, params=_roll(4)),
    Sample(
        name="plan",
        inputs=_PLAN,
        outputs=TENSOR,
        params={"task": "plan", "states": [POSE]},
        files=AND_GOAL,
        tiny=_FEW,
    ),
    Sample(
        name="plan, told",
        inputs=_PLAN,
        outputs=TENSOR,
        params={"task": "plan", "states": [POSE], "returns": ["energies"]},
        files=AND_GOAL,
        tiny=_FEW,
    ),
    Sample(
        name="plan, earlier frames",
        inputs={**_PLAN, **_PAST},
        outputs=TENSOR,
        params={
            "task": "plan",
            "context_frames": 3,
            "axis": {"z": 0.0},
            "actions": [MOVE] * 2,
            "states": [POSE] * 3,
        },
        files=AND_GOAL,
        tiny=_FEW,
    ),
)
