"""Model specs of BAGEL: text and images in any order in, text or an image out. One spec per default placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from mstar_bagel.checkpoint.config import ResizeRule, Sizes, read_sizes
from mstar_bagel.graph import build
from mstar_bagel.params import Params
from mstar_bagel.program import bagel
from mstar_core.errors import ConfigError, did_you_mean
from mstar_core.families.step_cache import default_share
from mstar_core.plugin import (
    PARTIAL_IMAGE,
    Image,
    ModelSpec,
    Partition,
    Sample,
    Surface,
    Text,
    WeightRef,
    WorkloadSpec,
    hookimpl,
)
from mstar_core.plugin.chat.format import ChatFormat, ReasoningFormat

PLUGIN_API = 1
REPO = "ByteDance-Seed/BAGEL-7B-MoT"
WANTED = ("*.json", "merges.txt", "ema.safetensors", "ae.safetensors")
"""Patterns of the repository's files that a deployment reads."""

SampleSegment: TypeAlias = tuple[str, Mapping[str, tuple[int, ...]]]
"""Kind of a segment of a sample, and the shapes of its inputs."""

START_KWARGS: Mapping[str, Any] = {"capture_images": False, "step_cache": 0.0}
"""Keys of model_kwargs, with defaults. capture_images: replay passes over images that begin a prompt as CUDA graphs.

step_cache: of requests that do not name it.
"""

TEXT = ("text", {"tokens": (12,)})
SYSTEM = ("system", {"tokens": (60,)})
START = ("text", {"tokens": (1,)})
"""The start id of an answer behind an image. Behind a text it is the last id of the text."""

SEEN = ("image", {"vit_image": (608, 800, 3)})
"""A decoded image, which the encoder resizes. For edits both encoders' images are resized before."""

PICTURE = ("image", {"vit_image": (3, 602, 798), "vae_image": (3, 608, 800)})
GRID = {"grid": (64, 64), "guidance": (5,)}
PAINT = {**GRID, "times_guided": (41, 4), "times_after": (8, 4)}
PLAIN = {**GRID, "times_after": (49, 4)}
EDIT = {**GRID, "times_guided": (49, 4)}
THINK = {"start": (1,), "end": (1,)}
SMALL = {"width": 64, "height": 48, "num_timesteps": 4}
"""Parameters of an image for the tiny checkpoint."""

SMALL_EDIT = {"num_timesteps": 3}
SMALL_THINK = {**SMALL, "max_think_tokens": 24}

SAMPLES = (
    Sample(name="chat", segments=(TEXT,), outputs=frozenset({"text"})),
    Sample(name="describe", segments=(SEEN, TEXT), outputs=frozenset({"text"}), params={"temperature": 0.7}),
    Sample(
        name="describe, think",
        segments=(SYSTEM, SEEN, TEXT),
        outputs=frozenset({"text"}),
        params={"think": True},
    ),
    Sample(name="interleaved", segments=(TEXT, SEEN, TEXT, SEEN, START), outputs=frozenset({"text"})),
    Sample(name="paint", inputs=PAINT, segments=(TEXT,), outputs=frozenset({"image"}), tiny=SMALL),
    Sample(
        name="paint, unguided",
        inputs=PLAIN,
        segments=(TEXT,),
        outputs=frozenset({"image"}),
        params={"cfg_text_scale": 1.0},
        tiny=SMALL,
    ),
    Sample(
        name="paint, guided in the middle",
        inputs={**GRID, "times_before": (5, 4), "times_guided": (36, 4), "times_after": (8, 4)},
        segments=(TEXT,),
        outputs=frozenset({"image"}),
        params={"cfg_interval": [0.4, 0.95]},
        tiny={**SMALL, "width": 32},
    ),
    Sample(
        name="paint, one partial image",
        inputs={**GRID, "times_guided_0": (24, 4), "times_guided": (17, 4), "times_after": (8, 4)},
        segments=(TEXT,),
        outputs=frozenset({"image", PARTIAL_IMAGE}),
        params={"partial_images": 1},
        tiny=SMALL,
    ),
    Sample(
        name="paint, two texts",
        inputs=PAINT,
        segments=(TEXT, TEXT),
        outputs=frozenset({"image"}),
        params={"cfg_img_scale": 1.5},
        tiny=SMALL,
    ),
    Sample(
        name="paint, think",
        inputs={**PAINT, **THINK},
        segments=(SYSTEM, TEXT),
        outputs=frozenset({"text", "image"}),
        params={"think_mode": True},
        tiny=SMALL_THINK,
    ),
    Sample(
        name="paint, think, image guided",
        inputs={**PAINT, **THINK},
        segments=(SYSTEM, TEXT),
        outputs=frozenset({"image"}),
        params={"think_mode": True, "cfg_img_scale": 1.5},
        tiny={**SMALL, "max_think_tokens": 5},
    ),
    Sample(name="edit", inputs=EDIT, segments=(PICTURE, TEXT), outputs=frozenset({"image"}), tiny=SMALL_EDIT),
    Sample(
        name="edit, text first", inputs=EDIT, segments=(TEXT, PICTURE), outputs=frozenset({"image"}), tiny=SMALL_EDIT
    ),
    Sample(
        name="edit, two images",
        inputs=EDIT,
        segments=(PICTURE, TEXT, PICTURE, TEXT),
        outputs=frozenset({"image"}),
        tiny=SMALL_EDIT,
    ),
    Sample(
        name="edit, text guided",
        inputs=EDIT,
        segments=(PICTURE, TEXT),
        outputs=frozenset({"image"}),
        params={"cfg_img_scale": 1.0},
        tiny=SMALL_EDIT,
    ),
    Sample(
        name="edit, think",
        inputs={**EDIT, **THINK},
        segments=(SYSTEM, PICTURE, TEXT),
        outputs=frozenset({"text", "image"}),
        params={"think": True},
        tiny={**SMALL_EDIT, "max_think_tokens": 24},
    ),
)


ON = {"think_mode": True}
CHAT = ChatFormat(
    reasoning=ReasoningFormat(efforts={"none": {"think_mode": False}, "low": ON, "medium": ON, "high": ON})
)
"""Thinking, which the instruction of `think_mode` asks for. The model knows no tools."""


def spec(sizes: Sizes) -> ModelSpec:
    """Return the spec for a checkpoint of these sizes."""
    graph = build(sizes)
    return ModelSpec(
        name="bagel",
        title="BAGEL 7B-MoT: reads text and images, writes text, paints and edits images",
        plugin="bagel",
        aliases=("bagel-7b-mot", "bagel_cfg_parallel"),
        inputs=(Text(), Image()),
        outputs=(Text(), Image(max_count=1)),
        params=Params,
        routes=frozenset({"chat", "image", "image_edit"}),
        chat=CHAT,
        surfaces={"image": Surface(beside=("text",)), "image_edit": Surface(beside=("text",))},
        nodes=graph.nodes,
        partitions=(Partition(name="main", program=bagel, walks=graph.walks),),
        walk_aliases={"image_gen_cfg": "image_gen"},
        processor="mstar_bagel.processor:Processor",
        model="mstar_bagel.model:Bagel",
        bind=bind,
        configs="mstar_bagel:configs",
        default_config="bagel_single_gpu",
        model_kwargs=START_KWARGS,
        weights={
            "bagel": WeightRef(repo=REPO, files=WANTED),
        },
        requires={"vram_gib": 40, "compute_capability": "8.0"},
        max_seq_len=min(32768, sizes.language.max_positions),
        samples=tuple(_of_size(sample, sizes) for sample in SAMPLES),
        tiny="mstar_bagel.sources.tiny:write_tiny",
        make_samples="mstar_bagel.sample_inputs:make_samples",
        mini="mstar_bagel.checkpoint.shipped:find_mini",
        resolve="mstar_bagel.sources.download:resolve_weights",
        notice="bagel:tiny has random weights: its text and images are noise",
        mini_prompt="a red circle above a green square",
        mini_notice="bagel:mini is a miniature of under 1M parameters: it draws and describes coloured shapes",
    )


def bind(model: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Bind the spec to the sizes and the stop id of the checkpoint in `folder`. Raises ConfigError for model_kwargs."""
    kwargs = {**START_KWARGS, **checked(model_kwargs)}
    if folder is None and kwargs == START_KWARGS:
        return model
    sizes = Sizes() if folder is None else read_sizes(folder)
    graph = build(sizes, captures_images=kwargs["capture_images"])
    (partition,) = model.partitions
    return replace(
        model,
        nodes=graph.nodes,
        model_kwargs=kwargs,
        partitions=(replace(partition, walks=graph.walks),),
        max_seq_len=min(model.max_seq_len, sizes.language.max_positions),
        samples=tuple(_of_size(sample, sizes) for sample in model.samples),
    )


def checked(model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a deployment. Raises ConfigError for an unknown one, or a value of another kind."""
    for key, value in model_kwargs.items():
        if key not in START_KWARGS:
            hint = did_you_mean(key, START_KWARGS)
            raise ConfigError(f"unknown model_kwargs key of bagel: {key!r}", hint=hint, key=f"model_kwargs.{key}")
        if key == "step_cache":
            default_share(value)
        elif not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}", hint="write true or false", key=f"model_kwargs.{key}")
    return dict(model_kwargs)


def _of_size(sample: Sample, sizes: Sizes) -> Sample:
    """Return the sample with images of the checkpoint's sizes, which the warm-up runs: the largest new image."""
    grid, seen, clean = (sizes.latent_grid, sizes.latent_grid), _sides(sizes.vit_rule), _sides(sizes.vae_rule)
    inputs = {name: grid if name == "grid" else shape for name, shape in sample.inputs.items()}

    def sized(segment: SampleSegment) -> SampleSegment:
        match segment:
            case (kind, {"vae_image": _}):
                return kind, {"vit_image": (3, *seen), "vae_image": (3, *clean)}
            case (kind, {"vit_image": _}):
                return kind, {"vit_image": (*clean, 3)}
        return segment

    return replace(sample, inputs=inputs, segments=tuple(map(sized, sample.segments)))


def _sides(rule: ResizeRule) -> tuple[int, int]:
    """Return height and width of an image of 3 to 4 that the rule allows."""
    height, width = (round(share * rule.longest / rule.stride) * rule.stride for share in (0.6, 0.8))
    return height, width


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [spec(Sizes())]


WORKLOADS = (
    WorkloadSpec(
        name="image-gen", title="text to an image of 512 or 1024 pixels", target="mstar_bagel.workloads:image_gen"
    ),
    WorkloadSpec(name="image-edit", title="an image and text to an image", target="mstar_bagel.workloads:image_edit"),
    WorkloadSpec(name="chat", title="text to text", target="mstar_core.workloads.generic:chat"),
    WorkloadSpec(name="see", title="questions about one image", target="mstar_core.workloads.generic:see"),
)


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    return WORKLOADS if model.plugin == "bagel" else ()
