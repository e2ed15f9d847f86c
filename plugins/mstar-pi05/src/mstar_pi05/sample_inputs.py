"""Sample inputs of Pi0.5: the cameras, the state and the instruction of one moment."""

from __future__ import annotations

from pathlib import Path

from mstar_core.plugin import ModelSpec, SampleInputs
from mstar_core.workloads.media import ball_picture, png
from mstar_pi05 import arm
from mstar_pi05.checkpoint.config import ACTION_WIDTH
from mstar_pi05.deployment import read_deployment
from mstar_pi05.robots.statistics import find_statistics

FILES = ("base.png", "left_wrist.png", "right_wrist.png")
SIDE = 224
JOINTS = 8
"""Values of a state if neither a robot nor statistics tell their number."""

SCENE = 5
"""Seed of the miniature's scene."""


def make_samples(spec: ModelSpec, source: str, folder: Path | None) -> list[SampleInputs]:
    """Return one observation. The miniature's is of the arm that it was trained to move."""
    if source == "mini":
        scene = arm.draw(SCENE, 1)
        state = [round(float(value), 4) for value in scene.joints[0]]
        cameras = [png(camera) for camera in arm.render(scene)[0]]
        return [_observed(arm.instruction(int(scene.named[0])), state, cameras)]
    cameras = [png(ball_picture(SIDE, along, 0.2)) for along in (0.5, 0.3, 0.7)]
    return [_observed("pick up the red ball", [0.1] * _joints(spec, folder), cameras)]


def _observed(text: str, state: list[float], cameras: list[bytes]) -> SampleInputs:
    return SampleInputs(
        name="act",
        title="three cameras, the state of the arm and an instruction to actions",
        outputs=("action",),
        text=text,
        files=tuple(zip(FILES, cameras, strict=True)),
        params={"robot_state": state, "seed": 1},
    )


def _joints(spec: ModelSpec, folder: Path | None) -> int:
    """Return the number of values of a state: the robot's, that of the statistics, or JOINTS."""
    deployment = read_deployment(spec.model_kwargs)
    if deployment.robot is not None:
        return deployment.robot.state
    statistics = find_statistics(folder, deployment.norm_stats) if folder is not None else None
    known = len(statistics.state) if statistics is not None and statistics.state is not None else ACTION_WIDTH
    return min(JOINTS, known)
