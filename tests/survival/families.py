"""The miniatures that the kill sweep serves, and the requests that it disturbs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bench.soak.samples import sample_bodies
from mstar_core.config.deployment import GroupPlan, NodePlacement, Plan, RankPlan
from mstar_core.config.resolved import KVCacheConfig
from tests.runtime.deployment import LLM, ORPHEUS, SNAC, Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A miniature. changes: parameters by the name of a sample, beside the sample's own; others are not asked.

    where: its placement; None is one rank. weights: `mini`, or `tiny` where `mini` cannot be divided.
    """

    name: str
    served: Served
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    where: Plan | None = None
    weights: str = "mini"

    def bodies(self, url: str) -> dict[str, dict[str, Any]]:
        """Return the requests by name. The deployment at `url` describes its samples."""
        found = sample_bodies(url)
        return {
            name: {**found[name], "model_kwargs": {**found[name]["model_kwargs"], **changed}}
            for name, changed in self.changes.items()
        }


SHORT: Final = {"max_output_tokens": 112}
ENDLESS: Final = {**SHORT, "ignore_eos": True}
TWO_RANKS: Final = Plan(
    ranks=(
        RankPlan(rank=0, device="cpu", nodes=(LLM, SNAC), memory_fraction=0.4),
        RankPlan(rank=1, device="cpu", nodes=(), follows=(LLM,), memory_fraction=0.4),
    ),
    placements=(
        NodePlacement(node=LLM, replicas=((0, 1),), tp_size=2),
        NodePlacement(node=SNAC, replicas=((0,),)),
    ),
    groups=(GroupPlan(ranks=(0, 1), nodes=(LLM,)),),
)
"""A tensor-parallel group for the language model."""

LONG: Final = {"temperature": 0.8, "ignore_eos": True, "max_output_tokens": 16}
"""Parameters of texts that go on after their end, with ids that are drawn."""

FAMILIES: Final = {
    family.name: family
    for family in (
        Family(name="orpheus", served=ORPHEUS, changes={"speech": SHORT}),
        Family(name="orpheus_tp2", served=ORPHEUS, changes={"speech": ENDLESS}, where=TWO_RANKS, weights="tiny"),
        Family(
            name="qwen3_omni",
            served=Served(
                model="qwen3_omni",
                plugin="qwen3_omni",
                package="qwen3omni",
                nodes=("audio_encoder", "vision_encoder", "Thinker", "Talker", "Code2Wav"),
                settings={"max_seq_len": 2048, "kv_cache": KVCacheConfig(pages=1024)},
            ),
            changes={"spoken": {**LONG, "talker_max_tokens": 40, "codec_chunk_frames": 4}, "clip": LONG, "sound": LONG},
        ),
        Family(
            name="bagel",
            served=Served(
                model="bagel",
                plugin="bagel",
                nodes=("LLM", "combine_cfg", "vit_encoder", "vae_encoder", "vae_decoder"),
                settings={"max_seq_len": 2048, "kv_cache": KVCacheConfig(pages=2048)},
            ),
            changes={"draw": {"partial_images": 3}, "describe": {}, "edit": {}},
        ),
        Family(
            name="pi05",
            served=Served(
                model="pi05",
                plugin="pi05",
                nodes=("vit_encoder", "LLM"),
                settings={"max_seq_len": 1024, "kv_cache": KVCacheConfig(pages=256)},
            ),
            changes={"act": {}},
        ),
        Family(
            name="vjepa2_ac",
            served=Served(
                model="vjepa2_ac",
                plugin="vjepa2",
                nodes=("video_encoder", "ac_predictor", "mpc_scorer", "cem_sampler", "cem_update"),
                settings={"max_seq_len": 32 * 18, "kv_cache": KVCacheConfig(pages=1024, prefix_cache=False)},
            ),
            changes={"plan": {}, "rollout": {}, "encode": {}},
        ),
    )
}
