"""Names of the official weights and their targets in the model. Used by the conformance check; loads no weights.

Source: the key table of `Qwen/Qwen3-8B`, written as rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from mstar_core.plugin.conformance import KeyMap
from mstar_llm.decoder import LanguageModel
from mstar_llm.model import HEAD_KEY
from mstar_llm.plugin import OFFICIAL

LAYER: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
)


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and their targets. They are equal, because the modules are nested like the names."""
    with torch.device("meta"):
        places = frozenset(LanguageModel(OFFICIAL, has_head=True).state_dict())
    return {"llm": KeyMap(targets={name: name for name in names()}, places=places)}


def names() -> Iterator[str]:
    """Yield the names in the index of the weights."""
    yield "model.embed_tokens.weight"
    for layer in range(OFFICIAL.layers):
        yield from (f"model.layers.{layer}.{part}.weight" for part in LAYER)
    yield "model.norm.weight"
    yield HEAD_KEY
