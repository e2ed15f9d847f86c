"""Names of the official weights and their targets in the model. Used by the conformance check; loads no weights.

Sources: the key tables of `canopylabs/orpheus-3b-0.1-ft` and `hubertsiuzdak/snac_24khz`, written as rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from mstar_core.layers import AttentionSpec, RotarySpec
from mstar_core.plugin.conformance import KeyMap
from mstar_orpheus.checkpoint.config import VQ_STRIDES
from mstar_orpheus.llama import HEAD_KEY, Llama, LlamaConfig
from mstar_orpheus.plugin import OFFICIAL
from mstar_orpheus.vocoder.snac import Snac, SnacConfig, decoding_weights

WIDTH: Final = 3072
MLP: Final = 8192
LAYER: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
GAIN, DIRECTION = "parametrizations.weight.original0", "parametrizations.weight.original1"
BLOCKS: Final = 4
"""Upsampling and downsampling blocks of the codec, with three residual units each."""


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and their targets, by weight set."""
    return {"lm": _lm(), "snac": _snac()}


def lm_names() -> Iterator[str]:
    """Yield the names in the index of the language model."""
    yield "model.embed_tokens.weight"
    for layer in range(OFFICIAL.layers):
        yield from (f"model.layers.{layer}.{part}.weight" for part in LAYER)
    yield "model.norm.weight"
    yield HEAD_KEY


def snac_names() -> Iterator[str]:
    """Yield the names in the vocoder's file."""
    yield from _encoder()
    for number in range(len(VQ_STRIDES)):
        stem = f"quantizer.quantizers.{number}"
        yield from _normed(f"{stem}.in_proj")
        yield from _normed(f"{stem}.out_proj")
        yield f"{stem}.codebook.weight"
    yield from _normed("decoder.model.0")
    yield from _normed("decoder.model.1")
    for block in range(2, 2 + BLOCKS):
        stem = f"decoder.model.{block}.block"
        yield f"{stem}.0.alpha"
        yield from _normed(f"{stem}.1")
        yield f"{stem}.2.linear.{GAIN}"
        yield f"{stem}.2.linear.{DIRECTION}"
        for unit in (3, 4, 5):
            yield from _unit(f"{stem}.{unit}.block")
    yield f"decoder.model.{2 + BLOCKS}.alpha"
    yield from _normed(f"decoder.model.{3 + BLOCKS}")


def _encoder() -> Iterator[str]:
    yield from _normed("encoder.block.0")
    for block in range(1, 1 + BLOCKS):
        stem = f"encoder.block.{block}.block"
        for unit in (0, 1, 2):
            yield from _unit(f"{stem}.{unit}.block")
        yield f"{stem}.3.alpha"
        yield from _normed(f"{stem}.4")
    yield from _normed(f"encoder.block.{1 + BLOCKS}")


def _unit(stem: str) -> Iterator[str]:
    yield f"{stem}.0.alpha"
    yield from _normed(f"{stem}.1")
    yield f"{stem}.2.alpha"
    yield from _normed(f"{stem}.3")


def _normed(stem: str) -> Iterator[str]:
    """Yield the names of a convolution with weight normalization."""
    yield f"{stem}.bias"
    yield f"{stem}.{GAIN}"
    yield f"{stem}.{DIRECTION}"


def _lm() -> KeyMap:
    attention = AttentionSpec(
        width=WIDTH, heads=WIDTH // OFFICIAL.head_dim, kv_heads=OFFICIAL.kv_heads, head_dim=OFFICIAL.head_dim
    )
    config = LlamaConfig(
        vocab=OFFICIAL.vocab_size,
        mlp=MLP,
        layers=OFFICIAL.layers,
        attention=attention,
        norm_eps=1e-5,
        ties=False,
        rotary=RotarySpec(width=OFFICIAL.head_dim),
    )
    with torch.device("meta"):
        places = frozenset(Llama(config, has_head=True).state_dict())
    return KeyMap(targets={name: name for name in lm_names()}, places=places)


def _snac() -> KeyMap:
    config = SnacConfig(
        latent=768,
        width=1024,
        rates=(8, 8, 4, 2),
        codebook_size=OFFICIAL.codebook_size,
        codebook_dim=8,
        sample_rate=OFFICIAL.sample_rate,
    )
    with torch.device("meta"):
        places = frozenset(Snac(config).state_dict())
    return KeyMap(targets=_folded(list(snac_names())), places=places)


def _folded(names: Sequence[str]) -> dict[str, str | None]:
    """Return the target of each published name after folding, which joins gain and direction into one weight."""
    kept = decoding_weights({name: torch.ones(1, 1) for name in names})
    stems = {name: name.removesuffix(GAIN).removesuffix(DIRECTION) for name in names}
    targets = {name: name if stem == name else f"{stem}weight" for name, stem in stems.items()}
    return {name: target if target in kept else None for name, target in targets.items()}
