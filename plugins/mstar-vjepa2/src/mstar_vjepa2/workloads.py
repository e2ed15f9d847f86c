"""Load-test workloads of V-JEPA 2 and 2-AC: clips to features, rollouts of actions, and planning."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

from mstar_core.workloads import ServedModel, WorkloadRequest, numbered, picture, video_array
from mstar_vjepa2.params import POSE

SIDE, TINY_SIDE = 256, 32
CLIPS: Final = (16, 32, 64)
TINY_FRAMES: Final = 8
STEP_M: Final = 0.02
START: Final = [0.3, 0.0, 0.2, 3.1, 0.0, 0.0, 0.5]


def world_encode(card: ServedModel, seed: int) -> Iterator[WorkloadRequest]:
    """Yield clips of 16, 32 or 64 frames to be encoded into one vector."""
    for chance in numbered(seed):
        frames = TINY_FRAMES if card.is_tiny else chance.choice(CLIPS)
        clip = video_array(chance, frames, TINY_SIDE if card.is_tiny else SIDE)
        yield WorkloadRequest(
            outputs=("tensor",),
            files=(("clip.npy", clip),),
            params={"task": "encode", "pooling": "mean"},
            expected={"frames": frames},
        )


def world_rollout(card: ServedModel, seed: int, *, least: int = 4, most: int = 16) -> Iterator[WorkloadRequest]:
    """Yield a frame with `least` to `most` actions, whose predicted steps are streamed."""
    for chance in numbered(seed):
        steps = chance.randint(least, 4 if card.is_tiny else most)
        actions = [[round(chance.gauss(0.0, STEP_M), 4) for _ in range(POSE)] for _ in range(steps)]
        params = {"task": "rollout", "actions": actions, "states": [START]}
        yield WorkloadRequest(outputs=("tensor",), files=(_frame(card, chance, "frame"),), params=params)


def world_plan(
    card: ServedModel, seed: int, *, candidates: int = 400, horizon: int = 2, iterations: int = 4
) -> Iterator[WorkloadRequest]:
    """Yield a frame and a goal image to plan for."""
    for number, chance in enumerate(numbered(seed)):
        params: dict[str, Any] = {
            "task": "plan",
            "states": [START],
            "samples": 24 if card.is_tiny else candidates,
            "horizon": horizon,
            "cem_steps": 2 if card.is_tiny else iterations,
            "seed": number,
        }
        work = params["samples"] * horizon * params["cem_steps"]
        yield WorkloadRequest(
            outputs=("tensor",),
            files=(_frame(card, chance, "frame"), _frame(card, chance, "goal")),
            params=params,
            expected={"plan": work},
        )


def _frame(card: ServedModel, chance: random.Random, name: str) -> tuple[str, bytes]:
    return f"{name}.png", picture(chance, TINY_SIDE if card.is_tiny else SIDE)
