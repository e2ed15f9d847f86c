"""Model spec of Pi0.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mstar_core.plugin import (
    Action,
    Image,
    ModelSpec,
    Partition,
    Sample,
    Surface,
    TensorData,
    Text,
    WeightRef,
    WorkloadSpec,
    hookimpl,
)
from mstar_pi05.checkpoint.config import ACTION_WIDTH, CAMERAS, Sizes, fitted, read_sizes
from mstar_pi05.deployment import MODEL_KWARGS, Deployment, read_deployment
from mstar_pi05.graph import build
from mstar_pi05.params import Params
from mstar_pi05.program import pi05
from mstar_pi05.robots.layouts import layout_of
from mstar_pi05.robots.statistics import find_statistics

PLUGIN_API = 1
WEIGHTS_REPO = "lerobot/pi05_base"
TOKENIZER_REPO = "google/paligemma-3b-pt-224"
"""Repository of the tokenizer. It requires a login; the checkpoint contains no tokenizer."""


def _sample(name: str, cameras: int, params: Mapping[str, Any]) -> Sample:
    plan = (50, ACTION_WIDTH)
    inputs = {"images": (cameras, 224, 224, 3), "tokens": (64,), "noise": plan, "scale": plan, "offset": plan}
    parts: tuple[tuple[str, Mapping[str, tuple[int, ...]]], ...] = (*(("image", {}),) * cameras, ("text", {}))
    return Sample(name=name, inputs=inputs, segments=parts, outputs=frozenset({"action"}), params=params)


SAMPLES = (
    _sample("one camera", 1, {"robot_state": [0.1] * 8}),
    _sample("two cameras", 2, {"robot_state": [0.1] * 8, "image_mask": [True, True, False]}),
    _sample("three cameras", 3, {"robot_state": [0.3] * 8, "num_steps": 4}),
    _sample("a masked camera", 3, {"robot_state": [-0.2] * 6, "image_mask": [True, False, True]}),
    _sample(
        "given noise",
        3,
        {"robot_state": [0.5] * 8, "noise": [[0.25] * ACTION_WIDTH] * 50, "return_normalized": True},
    ),
)


def spec(sizes: Sizes, deployment: Deployment, state: int | None = None) -> ModelSpec:
    """Return the spec for a checkpoint of these sizes and these options. state: number of values of a robot's state."""
    graph = build(sizes, deployment.action_dim, deployment.vision_dtype)
    return ModelSpec(
        name="pi05",
        title="Pi0.5: camera images, an instruction and the robot's state to a chunk of actions",
        plugin="pi05",
        aliases=("pi0.5",),
        inputs=(Image(max_count=len(CAMERAS)), Text(), TensorData()),
        outputs=(Action(horizon=sizes.horizon, dim=deployment.action_dim),),
        params=Params,
        routes=frozenset({"robot_policy"}),
        surfaces={"robot_policy": Surface(metadata=_greeting(sizes, deployment, state), state=state, cameras=CAMERAS)},
        nodes=graph.nodes,
        partitions=(Partition(name="main", program=pi05, walks=graph.walks),),
        processor="mstar_pi05.processor:Processor",
        model="mstar_pi05.model:Pi05",
        bind=bind,
        misfit=misfit,
        configs="mstar_pi05:configs",
        default_config="pi05",
        weights={
            "policy": WeightRef(repo=WEIGHTS_REPO, files=("*.json", "*.safetensors")),
            "tokenizer": WeightRef(repo=TOKENIZER_REPO, files=("tokenizer*", "special_tokens_map.json")),
        },
        requires={"vram_gib": 12, "compute_capability": "8.0"},
        max_seq_len=1024,
        model_kwargs=MODEL_KWARGS,
        samples=tuple(_with_sizes(sample, sizes) for sample in SAMPLES),
        tiny="mstar_pi05.sources.tiny:write_tiny",
        make_samples="mstar_pi05.sample_inputs:make_samples",
        mini="mstar_pi05.mini:find_mini",
        resolve="mstar_pi05.sources.download:resolve_weights",
        notice="pi05:tiny has random weights: its actions are meaningless",
        mini_prompt="reach the red target",
        mini_params={"robot_state": [0.2, 1.2]},
        mini_world="arm",
        mini_config="pi05_mini",
        mini_notice="pi05:mini is a miniature of under 1M parameters: it moves a simulated arm of two joints",
    )


def _greeting(sizes: Sizes, deployment: Deployment, state: int | None) -> dict[str, Any]:
    """Return what is sent to robots when they connect: sizes, and the entries of the deployment."""
    layout = layout_of(None if deployment.robot is None else deployment.robot.name)
    facts = {"cameras": layout.cameras, "state": state, "action_shape": [sizes.horizon, deployment.action_dim]}
    return {**facts, **deployment.metadata}


def bind(model: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the checkpoint's sizes and the deployment's options.

    Raises WeightsError for invalid checkpoint files and ConfigError for invalid options, including unknown
    statistics.
    """
    deployment = read_deployment(model_kwargs)
    sizes = fitted(read_sizes(folder), deployment.horizon)
    state = None if deployment.robot is None else deployment.robot.state
    if folder is not None:
        statistics = find_statistics(folder, deployment.norm_stats)
        if state is None and statistics is not None and statistics.state is not None:
            state = len(statistics.state)
    return replace(spec(sizes, deployment, state), model_kwargs={**MODEL_KWARGS, **model_kwargs})


def misfit(model_kwargs: Mapping[str, Any]) -> str:
    """Return why `lerobot/pi05_base` does not fit the deployment's robot, or nothing. Raises ConfigError."""
    robot = read_deployment(model_kwargs).robot
    if robot is None:
        return ""
    return (
        f"the weights of {WEIGHTS_REPO} were not trained for robot {robot.name}: give the folder of "
        f"a fine-tune with --weights DIR ({robot.checkpoint})"
    )


def _with_sizes(sample: Sample, sizes: Sizes) -> Sample:
    """Return the sample with the checkpoint's image size and horizon."""
    cameras, side, plan = sample.inputs["images"][0], sizes.vision.image_size, (sizes.horizon, ACTION_WIDTH)
    shapes = {"images": (cameras, side, side, 3), "noise": plan, "scale": plan, "offset": plan}
    params = dict(sample.params)
    if "noise" in params:
        params["noise"] = [[0.25] * ACTION_WIDTH] * sizes.horizon
    return replace(sample, inputs={**sample.inputs, **shapes}, params=params)


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [spec(Sizes(), Deployment())]


WORKLOADS = (
    WorkloadSpec(
        name="robot", title="cameras and joint values to an action chunk", target="mstar_pi05.workloads:robot"
    ),
)


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    return WORKLOADS if model.name == "pi05" else ()
