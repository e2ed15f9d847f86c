"""Pi0.5 as data: one to three cameras, an instruction and the robot's state in; a chunk of actions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mstar_core.plugin import Action, Image, ModelSpec, Partition, Sample, Text, WeightRef, hookimpl
from mstar_pi05.checkpoint import MODEL_KWARGS, read_sizes
from mstar_pi05.graph import Sizes, build
from mstar_pi05.params import ACTION_WIDTH, CAMERAS, Params
from mstar_pi05.program import pi05

PLUGIN_API = 1


def _sample(name: str, cameras: int, params: Mapping[str, Any]) -> Sample:
    inputs = {"images": (cameras, 3, 224, 224), "tokens": (64,), "noise": (50, ACTION_WIDTH)}
    return Sample(name=name, inputs=inputs, outputs=frozenset({"action"}), params=params)


SAMPLES = (
    _sample("one camera", 1, {"robot_state": [0.1] * 8}),
    _sample("two cameras", 2, {"robot_state": [0.1] * 14, "image_mask": [True, True, False]}),
    _sample("three cameras", 3, {"robot_state": [0.1] * 14, "num_steps": 4}),
    _sample(
        "given noise", 3, {"noise": [[0.0] * ACTION_WIDTH] * 50, "return_normalized": True, "output_format": "npy"}
    ),
)


def spec(sizes: Sizes) -> ModelSpec:
    """Pi0.5 for a checkpoint of these sizes and this horizon."""
    graph = build(sizes)
    return ModelSpec(
        name="pi05",
        title="Pi0.5: camera images, an instruction and the robot's state to a chunk of actions",
        plugin="pi05",
        aliases=("pi0.5",),
        inputs=(Image(max_count=len(CAMERAS)), Text()),
        outputs=(Action(horizon=sizes.horizon, dim=ACTION_WIDTH),),
        params=Params,
        routes=frozenset({"robot_policy"}),
        nodes=graph.nodes,
        partitions=(Partition(name="main", program=pi05, walks=graph.walks),),
        bind=bind,
        configs="mstar_pi05:configs",
        default_config="pi05",
        weights={
            "policy": WeightRef(repo="lerobot/pi05_base", files=("*.json", "*.safetensors")),
            "tokenizer": WeightRef(repo="google/paligemma-3b-pt-224", files=("tokenizer*", "special_tokens_map.json")),
        },
        requires={"vram_gib": 12, "compute_capability": "8.0"},
        max_seq_len=1024,
        model_kwargs=MODEL_KWARGS,
        samples=SAMPLES,
    )


def bind(given: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """The spec with the checkpoint's sizes, the deployment's horizon and the width of the actions it returns."""
    sizes = read_sizes(folder, model_kwargs)
    graph = build(sizes)
    (partition,) = given.partitions
    width = model_kwargs.get("action_dim") or ACTION_WIDTH
    return replace(
        given,
        outputs=(Action(horizon=sizes.horizon, dim=width),),
        nodes=graph.nodes,
        partitions=(replace(partition, walks=graph.walks),),
        samples=tuple(_with_horizon(sample, sizes) for sample in given.samples),
    )


def _with_horizon(sample: Sample, sizes: Sizes) -> Sample:
    cameras = sample.inputs["images"][0]
    shapes = {"images": (cameras, 3, sizes.image_side, sizes.image_side), "noise": (sizes.horizon, ACTION_WIDTH)}
    return replace(sample, inputs={**sample.inputs, **shapes})


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [spec(Sizes())]
