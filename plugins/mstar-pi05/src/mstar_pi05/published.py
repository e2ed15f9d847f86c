"""Names of the official weights and their places in the modules. Loads no weights.

The conformance check reads `key_map`; the tiny checkpoint and benchmarks draw random weights of these
shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from mstar_core.plugin.conformance import KeyMap
from mstar_pi05.checkpoint.config import Sizes
from mstar_pi05.checkpoint.weights import BOTH, CAMERAS, PALIGEMMA, POLICY, TIED, target
from mstar_pi05.nodes.policy import Policy
from mstar_pi05.nodes.siglip import Cameras

NORMED: Final = ("weight", "bias")
MATRICES: Final = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NORMS: Final = ("input_layernorm", "post_attention_layernorm")
VISION_LAYER: Final = (
    "layer_norm1",
    "layer_norm2",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "mlp.fc1",
    "mlp.fc2",
)


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and the model's places, by weight set. The tokenizer's files contain no tensors."""
    sizes = Sizes()
    targets = {name: policy_target(name) for name in names(sizes)}
    return {
        "policy": KeyMap(targets=targets, places=frozenset(shapes(sizes))),
        "tokenizer": KeyMap(targets={}, places=frozenset()),
    }


def policy_target(name: str) -> str | None:
    """Return the place of a published key, prefixed with its node; None for a key that is not used."""
    for node, prefixes in (("vit_encoder", CAMERAS), ("LLM", POLICY)):
        place = target(name, prefixes)
        if place is not None:
            return f"{node}.{place}"
    return None


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return every place of both nodes with its shape. The modules are on the meta device."""
    with torch.device("meta"):
        modules = {"vit_encoder": Cameras(sizes), "LLM": Policy(sizes)}
    return {
        f"{node}.{name}": tuple(value.shape)
        for node, module in modules.items()
        for name, value in module.state_dict().items()
    }


def names(sizes: Sizes) -> Iterator[str]:
    """Yield the keys of `lerobot/pi05_base` and of openpi's conversion, with the token table under the head's name."""
    yield from _vision(sizes.vision.layers)
    yield from (f"{PALIGEMMA}multi_modal_projector.linear.{part}" for part in NORMED)
    yield f"{TIED}weight"
    for layer in range(sizes.language.layers):
        stem = f"{PALIGEMMA}language_model.layers.{layer}"
        yield from (f"{stem}.{part}.weight" for part in (*MATRICES, *NORMS))
    yield f"{PALIGEMMA}language_model.norm.weight"
    for layer in range(sizes.expert.layers):
        stem = f"{BOTH}gemma_expert.model.layers.{layer}"
        yield from (f"{stem}.{part}.weight" for part in MATRICES)
        yield from (f"{stem}.{norm}.dense.{part}" for norm in NORMS for part in NORMED)
    yield from (f"{BOTH}gemma_expert.model.norm.dense.{part}" for part in NORMED)
    yield f"{BOTH}gemma_expert.lm_head.weight"
    for stem in ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"):
        yield from (f"{stem}.{part}" for part in NORMED)


def _vision(layers: int) -> Iterator[str]:
    stem = f"{PALIGEMMA}vision_tower.vision_model"
    yield from (f"{stem}.embeddings.patch_embedding.{part}" for part in NORMED)
    yield f"{stem}.embeddings.position_embedding.weight"
    for layer in range(layers):
        yield from (f"{stem}.encoder.layers.{layer}.{part}.{kind}" for part in VISION_LAYER for kind in NORMED)
    yield from (f"{stem}.post_layernorm.{part}" for part in NORMED)
