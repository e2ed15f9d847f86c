"""Names of the official weights and their targets in the model. Used by the conformance check; loads no weights.

Source: the key table of `openai/whisper-large-v3-turbo`, written as rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from mstar_core.plugin.conformance import KeyMap
from mstar_whisper.checkpoint.config import OFFICIAL
from mstar_whisper.model import DECODER, ENCODER
from mstar_whisper.nodes.decoder import SpeechDecoder
from mstar_whisper.nodes.encoder import Encoder

ATTENTION: Final = ("k_proj.weight", *(f"{part}_proj.{kind}" for part in "vq" for kind in ("weight", "bias")))
BOTH: Final = ("weight", "bias")


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and their targets. Names of the decoder lose `model.`, those of the encoder its prefix."""
    with torch.device("meta"):
        places = frozenset((*Encoder(OFFICIAL).state_dict(), *SpeechDecoder(OFFICIAL).state_dict()))
    targets = {name: name.removeprefix(ENCODER).removeprefix("model.") for name in names()}
    return {"whisper": KeyMap(targets=targets, places=places)}


def names() -> Iterator[str]:
    """Yield the names in the index of the weights."""
    for number in (1, 2):
        yield from (f"{ENCODER}conv{number}.{kind}" for kind in BOTH)
    for prefix, layers, attentions in (
        (ENCODER, OFFICIAL.encoder_layers, ("self_attn",)),
        (DECODER, OFFICIAL.decoder_layers, ("self_attn", "encoder_attn")),
    ):
        yield f"{prefix}embed_positions.weight"
        for layer in range(layers):
            yield from _layer(f"{prefix}layers.{layer}.", attentions)
        yield from (f"{prefix}layer_norm.{kind}" for kind in BOTH)
    yield f"{DECODER}embed_tokens.weight"


def _layer(prefix: str, attentions: tuple[str, ...]) -> Iterator[str]:
    for name in attentions:
        yield from (f"{prefix}{name}.{part}" for part in (*ATTENTION, "out_proj.weight", "out_proj.bias"))
        yield from (f"{prefix}{name}_layer_norm.{kind}" for kind in BOTH)
    for part in ("fc1", "fc2", "final_layer_norm"):
        yield from (f"{prefix}{part}.{kind}" for kind in BOTH)
