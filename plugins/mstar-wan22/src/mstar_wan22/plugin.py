"""Model specs of Wan 2.2: text and images to video. One per official checkpoint, because their nodes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError
from mstar_core.families.step_cache import default_share
from mstar_core.plugin import (
    PARTIAL_IMAGE,
    Image,
    ModelSpec,
    Partition,
    Sample,
    Text,
    Video,
    WeightRef,
    WorkloadSpec,
    hookimpl,
)
from mstar_wan22.checkpoint.config import A14B, I2V_A14B, Sizes, read_sizes
from mstar_wan22.graph import build
from mstar_wan22.params import Params
from mstar_wan22.program import wan22

PLUGIN_API = 1
WANTED: Final = ("*.json", "*/*.json", "*/*.safetensors")
"""Patterns of the repository's files that a deployment reads."""

BASE: Final = "wan22"
WORKLOADS: Final = (
    WorkloadSpec(name="video-gen", title="texts to videos", target="mstar_wan22.workloads:video_gen"),
    WorkloadSpec(name="video-animate", title="images to videos", target="mstar_wan22.workloads:video_animate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An official checkpoint. sizes: by default; vram_gib: of one GPU that serves it; workloads: of its inputs."""

    repo: str
    title: str
    sizes: Sizes
    vram_gib: int
    workloads: Sequence[WorkloadSpec]


VARIANTS: Final[Mapping[str, Variant]] = {
    BASE: Variant(
        repo="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        title="Wan 2.2 TI2V-5B: text, and an image, to video",
        sizes=Sizes(),
        vram_gib=40,
        workloads=WORKLOADS,
    ),
    "wan22_a14b": Variant(
        repo="Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        title="Wan 2.2 T2V-A14B: text to video, two experts",
        sizes=A14B,
        vram_gib=90,
        workloads=WORKLOADS[:1],
    ),
    "wan22_i2v_a14b": Variant(
        repo="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        title="Wan 2.2 I2V-A14B: an image and text to video, two experts",
        sizes=I2V_A14B,
        vram_gib=90,
        workloads=WORKLOADS[1:],
    ),
}
OPTIONS: Final[Mapping[str, Any]] = {"negative_prompt": None, "step_cache": 0.0}
"""Deployment options with their defaults, of requests that do not name them. No negative_prompt: the official text."""

TINY: Final = {"width": 64, "height": 32, "num_frames": 9, "num_inference_steps": 3}
"""Parameters for the tiny checkpoints."""

MINI: Final = {"width": 32, "height": 32, "num_frames": 9, "num_inference_steps": 12, "guidance_scale": 2.0}
"""Parameters of a video of the miniature's world."""


def spec(name: str, sizes: Sizes) -> ModelSpec:
    """Return the spec of a variant for a checkpoint of these sizes."""
    (nodes, walks), variant, is_base = build(sizes), VARIANTS[name], name == BASE
    return ModelSpec(
        name=name,
        title=variant.title,
        plugin="wan22",
        inputs=(Text(), Image(max_count=2 if sizes.takes_image else 1)) if sizes.reads_image else (Text(),),
        outputs=(Video(),),
        params=Params,
        nodes=nodes,
        routes=frozenset({"video"}),
        partitions=(Partition(name="main", program=wan22, walks=walks),),
        processor="mstar_wan22.processor:Processor",
        model="mstar_wan22.model:Wan22",
        bind=bind,
        configs="mstar_wan22:configs",
        default_config=name,
        weights={"wan22": WeightRef(repo=variant.repo, files=WANTED)},
        requires={"vram_gib": variant.vram_gib, "compute_capability": "8.0"},
        max_seq_len=sizes.most_tokens,
        model_kwargs=OPTIONS,
        samples=_samples(sizes),
        tiny=f"mstar_wan22.sources.tiny:write_{name}",
        make_samples="mstar_wan22.sample_inputs:make_samples",
        resolve=f"mstar_wan22.sources.download:resolve_{name}",
        notice=f"{name}:tiny has random weights: its videos are noise",
        mini="mstar_wan22.sources.mini:find_mini" if is_base else None,
        mini_notice="wan22:mini is a miniature of 0.7M parameters: it moves a drawn shape in a named direction",
        mini_prompt="a red circle moves right" if is_base else "",
        mini_params=MINI if is_base else {},
    )


def bind(model: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the checkpoint's sizes and the deployment's options.

    Raises ConfigError for an invalid option, and for the checkpoint of another variant.
    """
    chosen = {**OPTIONS, **model_kwargs}
    if not isinstance(chosen["negative_prompt"], str | None):
        wrong = f"negative_prompt is {chosen['negative_prompt']!r}"
        raise ConfigError(wrong, hint="write a text, or omit it", key="model_kwargs.negative_prompt")
    default_share(chosen["step_cache"])
    if folder is None:
        return replace(model, model_kwargs=chosen)
    sizes = read_sizes(folder)
    right = next((name for name, variant in VARIANTS.items() if variant.sizes.kind == sizes.kind), None)
    if right != model.name:
        hint = f"serve it as {right}" if right else "use one of the official layouts"
        raise ConfigError(f"the checkpoint in {folder} is not one of {model.name}", hint=hint, key="model")
    return replace(spec(model.name, sizes), model_kwargs=chosen)


def _samples(sizes: Sizes) -> tuple[Sample, ...]:
    experts = ("high", "low") if sizes.has_experts else ("high",)
    columns = 13  # of the table of steps
    image = {"image": (3, 704, 1280)}
    text: dict[str, tuple[int, ...]] = {
        "tokens": (20,),
        "grid": (31, 704 // sizes.vae.pixels, 1280 // sizes.vae.pixels),
        "memory": (0,),
        **dict.fromkeys(experts, (25, columns)),
        **(image if sizes.takes_image else {}),
    }
    guided = {**text, "negative_tokens": (120,)}
    previews = {f"{expert}_0": (12, columns) for expert in experts}
    files, video = ("image", "text") if sizes.takes_image else ("text",), frozenset({"video"})
    found = [
        Sample(name="text to video", inputs=guided, outputs=video, files=files, tiny=TINY),
        Sample(name="unguided", inputs=text, outputs=video, params={"guidance_scale": 1.0}, files=files, tiny=TINY),
        Sample(
            name="previews",
            inputs={**guided, **previews},
            outputs=video | {PARTIAL_IMAGE},
            params={"partial_images": 3},
            files=files,
            tiny={**TINY, "num_inference_steps": 4, "flow_shift": 3.0},
        ),
    ]
    if sizes.expands:
        inputs = {**guided, **image}
        found.append(Sample(name="image to video", inputs=inputs, outputs=video, files=("image", "text"), tiny=TINY))
    return tuple(found)


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [spec(name, variant.sizes) for name, variant in VARIANTS.items()]


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    return VARIANTS[model.name].workloads if model.name in VARIANTS else ()
