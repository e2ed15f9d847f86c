"""V-JEPA 2 and V-JEPA 2-AC as data: video in, features, predicted features, scored rollouts and plans out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mstar_core.plugin import Image, ModelSpec, Partition, Scalar, TensorData, Video, WeightRef, hookimpl
from mstar_vjepa2.ac_graph import Sizes, build_ac
from mstar_vjepa2.base_graph import build_base
from mstar_vjepa2.checkpoint import read_ac_sizes
from mstar_vjepa2.params import ActionParams, Params
from mstar_vjepa2.program import vjepa2, vjepa2_ac
from mstar_vjepa2.samples import AC_SAMPLES, BASE_SAMPLES

PLUGIN_API = 1


def base_spec() -> ModelSpec:
    """V-JEPA 2; its graph is the same for every size. Latents leave the graph as tensors."""
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
        configs="mstar_vjepa2:configs",
        default_config="vjepa2",
        weights={
            "vitl": WeightRef(repo="facebook/vjepa2-vitl-fpc64-256"),
            "vith": WeightRef(repo="facebook/vjepa2-vith-fpc64-256"),
            "vitg": WeightRef(repo="facebook/vjepa2-vitg-fpc64-256"),
            "vitg-384": WeightRef(repo="facebook/vjepa2-vitg-fpc64-384"),
            "vitl-ssv2": WeightRef(repo="facebook/vjepa2-vitl-fpc16-256-ssv2"),
            "vitg-ssv2": WeightRef(repo="facebook/vjepa2-vitg-fpc64-384-ssv2"),
            "vitl-diving48": WeightRef(repo="facebook/vjepa2-vitl-fpc32-256-diving48"),
            "vitg-diving48": WeightRef(repo="facebook/vjepa2-vitg-fpc32-384-diving48"),
        },
        requires={"vram_gib": 8, "compute_capability": "8.0"},
        max_seq_len=18432,
        model_kwargs={"weights": "vitl", "pooler_heads": None},
        samples=BASE_SAMPLES,
    )


def ac_spec(sizes: Sizes) -> ModelSpec:
    """V-JEPA 2-AC for a checkpoint of these sizes."""
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
        bind=bind_ac,
        configs="mstar_vjepa2:configs",
        default_config="vjepa2_ac",
        weights={"ac": WeightRef(repo="facebookresearch/vjepa2", files=("vjepa2-ac-vitg.pt",), format="pt")},
        requires={"vram_gib": 24, "compute_capability": "8.0"},
        max_seq_len=32 * sizes.frame_tokens,
        samples=AC_SAMPLES,
    )


def bind_ac(given: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """The spec with the frame and cache sizes of the checkpoint in `folder`."""
    if folder is None:
        return given
    sizes = read_ac_sizes(folder)
    graph = build_ac(sizes)
    (partition,) = given.partitions
    return replace(
        given,
        nodes=graph.nodes,
        partitions=(replace(partition, walks=graph.walks),),
        max_seq_len=32 * sizes.frame_tokens,
    )


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [base_spec(), ac_spec(Sizes())]
