"""Model specs of BAGEL: text and images in any order in, text or an image out. One spec per default placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mstar_bagel.checkpoint import read_sizes
from mstar_bagel.graph import Sizes, build
from mstar_bagel.params import Params
from mstar_bagel.program import bagel
from mstar_core.plugin import Image, ModelSpec, Partition, Sample, Text, WeightRef, hookimpl

PLUGIN_API = 1

TEXT = ("text", {"tokens": (12,)})
SYSTEM = ("system", {"tokens": (60,)})
SEEN = ("image", {"vit_image": (3, 602, 798)})
PICTURE = ("image", {"vit_image": (3, 602, 798), "vae_image": (3, 608, 800)})
WRITE = {"start": (1,)}
PAINT = {"noise": (64, 64, 64), "guidance": (6,)}
THINK_PAINT = {**PAINT, "start": (1,), "end": (1,)}

SAMPLES = (
    Sample(name="chat", inputs=WRITE, segments=(TEXT,), outputs=frozenset({"text"})),
    Sample(
        name="describe", inputs=WRITE, segments=(SEEN, TEXT), outputs=frozenset({"text"}), params={"temperature": 0.7}
    ),
    Sample(
        name="describe, think",
        inputs=WRITE,
        segments=(SYSTEM, SEEN, TEXT),
        outputs=frozenset({"text"}),
        params={"think": True},
    ),
    Sample(name="interleaved", inputs=WRITE, segments=(TEXT, SEEN, TEXT, SEEN), outputs=frozenset({"text"})),
    Sample(name="paint", inputs=PAINT, segments=(TEXT,), outputs=frozenset({"image"})),
    Sample(
        name="paint, unguided",
        inputs=PAINT,
        segments=(TEXT,),
        outputs=frozenset({"image"}),
        params={"cfg_text_scale": 1.0},
    ),
    Sample(
        name="paint, two texts",
        inputs=PAINT,
        segments=(TEXT, TEXT),
        outputs=frozenset({"image"}),
        params={"cfg_img_scale": 1.5},
    ),
    Sample(
        name="paint, think",
        inputs=THINK_PAINT,
        segments=(SYSTEM, TEXT),
        outputs=frozenset({"text", "image"}),
        params={"think_mode": True},
    ),
    Sample(
        name="paint, think, image guided",
        inputs=THINK_PAINT,
        segments=(SYSTEM, TEXT),
        outputs=frozenset({"image"}),
        params={"think_mode": True, "cfg_img_scale": 1.5},
    ),
    Sample(name="edit", inputs=PAINT, segments=(PICTURE, TEXT), outputs=frozenset({"image"})),
    Sample(name="edit, text first", inputs=PAINT, segments=(TEXT, PICTURE), outputs=frozenset({"image"})),
    Sample(
        name="edit, two images", inputs=PAINT, segments=(PICTURE, TEXT, PICTURE, TEXT), outputs=frozenset({"image"})
    ),
    Sample(
        name="edit, text guided",
        inputs=PAINT,
        segments=(PICTURE, TEXT),
        outputs=frozenset({"image"}),
        params={"cfg_img_scale": 1.0},
    ),
    Sample(
        name="edit, think",
        inputs=THINK_PAINT,
        segments=(SYSTEM, PICTURE, TEXT),
        outputs=frozenset({"text", "image"}),
        params={"think": True},
    ),
)


def spec(sizes: Sizes) -> ModelSpec:
    """Return the spec for a checkpoint of these sizes."""
    graph = build(sizes)
    return ModelSpec(
        name="bagel",
        title="BAGEL 7B-MoT: reads text and images, writes text, paints and edits images",
        plugin="bagel",
        aliases=("bagel-7b-mot",),
        inputs=(Text(), Image()),
        outputs=(Text(), Image(max_count=1)),
        params=Params,
        routes=frozenset({"chat", "image", "image_edit"}),
        nodes=graph.nodes,
        partitions=(Partition(name="main", program=bagel, walks=graph.walks),),
        walk_aliases={"image_gen_cfg": "image_gen"},
        bind=bind,
        configs="mstar_bagel:configs",
        default_config="bagel_single_gpu",
        weights={
            "bagel": WeightRef(
                repo="ByteDance-Seed/BAGEL-7B-MoT", files=("*.json", "merges.txt", "ema.safetensors", "ae.safetensors")
            )
        },
        requires={"vram_gib": 40, "compute_capability": "8.0"},
        max_seq_len=32768,
        samples=SAMPLES,
    )


def bind(given: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Bind the spec to the sizes and the stop id of the checkpoint in `folder`."""
    if folder is None:
        return given
    graph = build(read_sizes(folder))
    (partition,) = given.partitions
    return replace(given, nodes=graph.nodes, partitions=(replace(partition, walks=graph.walks),))


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    single = spec(Sizes())
    parallel = replace(
        single,
        name="bagel_cfg_parallel",
        title=f"{single.title}; guidance on three ranks",
        aliases=(),
        default_config="bagel_cfg_parallel",
    )
    return [single, parallel]
