"""Model specs of V-JEPA 2 and V-JEPA 2-AC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mstar_core.errors import ConfigError, did_you_mean
from mstar_core.plugin import Image, ModelSpec, Partition, Scalar, TensorData, Video, WeightRef, WorkloadSpec, hookimpl
from mstar_vjepa2.checkpoint.config import read_action, read_base
from mstar_vjepa2.graph import Sizes, build_ac, build_base
from mstar_vjepa2.params import MOST_FRAMES, ActionParams, Params
from mstar_vjepa2.program import vjepa2, vjepa2_ac
from mstar_vjepa2.samples import AC_SAMPLES, BASE_SAMPLES

PLUGIN_API = 1
WEIGHTS = {
    "vitl": WeightRef(repo="facebook/vjepa2-vitl-fpc64-256"),
    "vith": WeightRef(repo="facebook/vjepa2-vith-fpc64-256"),
    "vitg": WeightRef(repo="facebook/vjepa2-vitg-fpc64-256"),
    "vitg-384": WeightRef(repo="facebook/vjepa2-vitg-fpc64-384"),
    "vitl-ssv2": WeightRef(repo="facebook/vjepa2-vitl-fpc16-256-ssv2"),
    "vitg-ssv2": WeightRef(repo="facebook/vjepa2-vitg-fpc64-384-ssv2"),
    "vitl-diving48": WeightRef(repo="facebook/vjepa2-vitl-fpc32-256-diving48"),
    "vitg-diving48": WeightRef(repo="facebook/vjepa2-vitg-fpc32-384-diving48"),
}
START_KWARGS: Mapping[str, Any] = {"weights": "vitl", "pooler_heads": None}
"""Deployment options of V-JEPA 2 with their defaults.

weights: a name in WEIGHTS. pooler_heads: attention heads of a classifier's pooler; None = those of the encoder.
"""


AC_KWARGS: Mapping[str, Any] = {"max_latent_frames": None}
"""Deployment options of V-JEPA 2-AC. max_latent_frames: limit of one rollout; None = the checkpoint's limit."""


def base_spec() -> ModelSpec:
    """Return the spec of V-JEPA 2. Its graph is the same for every size."""
    graph = build_base()
    return ModelSpec(
        name="vjepa2",
        title="V-JEPA 2: video to features, predicted features and classes",
        plugin="vjepa2",
        inputs=(Video(), Image(), TensorData()),
        outputs=(TensorData(), Scalar(), Video()),
        params=Params,
        nodes=graph.nodes,
        partitions=(Partition(name="main", program=vjepa2, walks=graph.walks),),
        processor="mstar_vjepa2.processor:Processor",
        model="mstar_vjepa2.model:Vjepa2",
        tiny="mstar_vjepa2.tiny:write_base",
        make_samples="mstar_vjepa2.sample_inputs:make_samples",
        notice="vjepa2:tiny has random weights: its features and classes are meaningless",
        bind=bind_base,
        configs="mstar_vjepa2:configs",
        default_config="vjepa2",
        weights=WEIGHTS,
        requires={"vram_gib": 8, "compute_capability": "8.0"},
        max_seq_len=18432,
        model_kwargs=START_KWARGS,
        samples=BASE_SAMPLES,
    )


def ac_spec(sizes: Sizes) -> ModelSpec:
    """Return the spec of V-JEPA 2-AC for a checkpoint of these sizes."""
    graph = build_ac(sizes)
    return ModelSpec(
        name="vjepa2_ac",
        title="V-JEPA 2-AC: a robot arm's next frames from its actions, scored rollouts, planning",
        plugin="vjepa2",
        aliases=("vjepa2-ac",),
        inputs=(Image(), Video(), TensorData()),
        outputs=(TensorData(), Scalar(), Video()),
        params=ActionParams,
        nodes=graph.nodes,
        partitions=(Partition(name="main", program=vjepa2_ac, walks=graph.walks),),
        processor="mstar_vjepa2.ac_processor:ActionProcessor",
        model="mstar_vjepa2.model:Vjepa2Ac",
        tiny="mstar_vjepa2.tiny:write_ac",
        make_samples="mstar_vjepa2.sample_inputs:make_samples",
        notice="vjepa2_ac:tiny has random weights: its predictions are meaningless",
        mini="mstar_vjepa2.mini:find_mini",
        mini_notice="vjepa2_ac:mini is a miniature of 0.2M parameters: it plans the moves of a drawn block",
        mini_world="block",
        bind=bind_ac,
        configs="mstar_vjepa2:configs",
        default_config="vjepa2_ac",
        weights={"ac": WeightRef(repo="facebookresearch/vjepa2", files=("vjepa2-ac-vitg.pt",), format="pt")},
        requires={"vram_gib": 24, "compute_capability": "8.0"},
        max_seq_len=sizes.frames * sizes.frame_tokens,
        model_kwargs=AC_KWARGS,
        samples=AC_SAMPLES,
    )


def bind_base(model: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the deployment's options. Raises ConfigError for an unknown or invalid option."""
    _check_keys("vjepa2", model_kwargs, START_KWARGS)
    weights = model_kwargs.get("weights", START_KWARGS["weights"])
    if weights not in WEIGHTS:
        raise ConfigError(
            f"weights is {weights!r}", hint=did_you_mean(str(weights), WEIGHTS), key="model_kwargs.weights"
        )
    _check_count("pooler_heads", model_kwargs.get("pooler_heads"), "a number of heads, such as 16")
    if folder is not None:
        read_base(folder)  # an unreadable checkpoint fails before any process starts
    return replace(model, model_kwargs={**START_KWARGS, **model_kwargs})


def bind_ac(model: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the checkpoint's sizes and the deployment's options.

    Raises ConfigError for an unknown or invalid option.
    """
    _check_keys("vjepa2_ac", model_kwargs, AC_KWARGS)
    limit = model_kwargs.get("max_latent_frames")
    _check_count("max_latent_frames", limit, f"a number of latent frames, 1 to {MOST_FRAMES}", MOST_FRAMES)
    sizes = Sizes() if folder is None else Sizes.of(read_action(folder))
    frames = limit or sizes.frames
    graph = build_ac(sizes)
    (partition,) = model.partitions
    return replace(
        model,
        inputs=(Image(), Video(max_frames=frames), TensorData()),
        nodes=graph.nodes,
        partitions=(replace(partition, walks=graph.walks),),
        max_seq_len=frames * sizes.frame_tokens,
        model_kwargs={**AC_KWARGS, **model_kwargs},
    )


def _check_keys(model: str, kwargs: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    for key in kwargs:
        if key not in known:
            hint = did_you_mean(key, known)
            raise ConfigError(f"{model} has no model_kwargs key {key!r}", hint=hint, key=f"model_kwargs.{key}")


def _check_count(key: str, value: object, form: str, most: int | None = None) -> None:
    """Raise ConfigError unless `value` is None or a whole number from 1 to `most`."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= (most or value)
    if value is not None and not is_count:
        raise ConfigError(f"{key} is {value!r}", hint=f"write {form}, or omit it", key=f"model_kwargs.{key}")


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [base_spec(), ac_spec(Sizes())]


WORKLOADS = (
    WorkloadSpec(name="world-encode", title="clips to one vector", target="mstar_vjepa2.workloads:world_encode"),
    WorkloadSpec(
        name="world-rollout",
        title="a frame and actions to predicted steps",
        target="mstar_vjepa2.workloads:world_rollout",
    ),
    WorkloadSpec(name="world-plan", title="a frame and a goal to actions", target="mstar_vjepa2.workloads:world_plan"),
)


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    return {"vjepa2": WORKLOADS[:1], "vjepa2_ac": WORKLOADS[1:]}.get(model.name, ())
