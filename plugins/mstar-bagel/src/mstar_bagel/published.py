"""Names of the official weights and their places in the modules. Loads no weights.

The conformance check reads `key_map`; the tiny checkpoint and benchmarks draw random weights of these shapes.
Source: `official_tensor_shapes.json` of the golden vectors, written as rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from mstar_bagel.checkpoint.config import Sizes
from mstar_bagel.nodes.autoencoder import CleanLatents, Pixels
from mstar_bagel.nodes.language import BagelLLM
from mstar_bagel.nodes.vision import ImageFeatures
from mstar_core.plugin.conformance import KeyMap

BOTH: Final = ("weight", "bias")
EXPERTS: Final = ("", "_moe_gen")


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and their places, by weight set. Names in the modules are those of the files."""
    sizes = Sizes()
    return {"bagel": KeyMap(targets={name: name for name in names(sizes)}, places=frozenset(shapes(sizes)))}


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return every tensor of all nodes with its shape. The modules are on the meta device."""
    with torch.device("meta"):
        modules = (BagelLLM(sizes), ImageFeatures(sizes), CleanLatents(sizes), Pixels(sizes))
    return {name: tuple(value.shape) for module in modules for name, value in module.state_dict().items()}


def names(sizes: Sizes) -> Iterator[str]:
    """Yield the keys of `ema.safetensors` and `ae.safetensors`."""
    yield from _language(sizes.language.layers)
    yield from _vision(sizes.vision.layers)
    for stem in ("vae2llm", "llm2vae", "time_embedder.mlp.0", "time_embedder.mlp.2", "connector.fc1", "connector.fc2"):
        yield from _pair(stem)
    yield from ("latent_pos_embed.pos_embed", "vit_pos_embed.pos_embed")
    yield from _encoder(sizes)
    yield from _decoder(sizes)


def _language(layers: int) -> Iterator[str]:
    stem = "language_model.model"
    yield from ("language_model.lm_head.weight", f"{stem}.embed_tokens.weight")
    yield from (f"{stem}.norm{expert}.weight" for expert in EXPERTS)
    for layer in range(layers):
        at = f"{stem}.layers.{layer}"
        for expert in EXPERTS:
            yield from (f"{at}.{norm}{expert}.weight" for norm in ("input_layernorm", "post_attention_layernorm"))
            for part in ("q_proj", "k_proj", "v_proj"):
                yield from _pair(f"{at}.self_attn.{part}{expert}")
            yield from (f"{at}.self_attn.{part}{expert}.weight" for part in ("o_proj", "q_norm", "k_norm"))
            yield from (f"{at}.mlp{expert}.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj"))


def _vision(layers: int) -> Iterator[str]:
    stem = "vit_model.vision_model"
    yield from _pair(f"{stem}.embeddings.patch_embedding")
    yield f"{stem}.embeddings.position_embedding.weight"
    for layer in range(layers):
        at = f"{stem}.encoder.layers.{layer}"
        parts = ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")
        attention = (f"self_attn.{kind}_proj" for kind in ("q", "k", "v", "out"))
        for part in (*parts, *attention):
            yield from _pair(f"{at}.{part}")
    yield from _pair(f"{stem}.post_layernorm")


def _encoder(sizes: Sizes) -> Iterator[str]:
    vae, last = sizes.vae, len(sizes.vae.multipliers) - 1
    widths = [1, *vae.multipliers]
    yield from _ends("encoder")
    for level in range(last + 1):
        for block in range(vae.blocks):
            has_shortcut = block == 0 and widths[level] != widths[level + 1]
            yield from _block(f"encoder.down.{level}.block.{block}", has_shortcut=has_shortcut)
        if level < last:
            yield from _pair(f"encoder.down.{level}.downsample.conv")


def _decoder(sizes: Sizes) -> Iterator[str]:
    vae, last = sizes.vae, len(sizes.vae.multipliers) - 1
    widths = [*vae.multipliers, vae.multipliers[-1]]
    yield from _ends("decoder")
    for level in range(last + 1):
        for block in range(vae.blocks + 1):
            has_shortcut = block == 0 and widths[level] != widths[level + 1]
            yield from _block(f"decoder.up.{level}.block.{block}", has_shortcut=has_shortcut)
        if level:
            yield from _pair(f"decoder.up.{level}.upsample.conv")


def _ends(stem: str) -> Iterator[str]:
    """Yield the names before, between and after the levels."""
    for part in ("conv_in", "conv_out", "norm_out"):
        yield from _pair(f"{stem}.{part}")
    for block in (1, 2):
        yield from _block(f"{stem}.mid.block_{block}", has_shortcut=False)
    for part in ("norm", "q", "k", "v", "proj_out"):
        yield from _pair(f"{stem}.mid.attn_1.{part}")


def _block(stem: str, *, has_shortcut: bool) -> Iterator[str]:
    for part in ("norm1", "conv1", "norm2", "conv2", *(["nin_shortcut"] if has_shortcut else [])):
        yield from _pair(f"{stem}.{part}")


def _pair(stem: str) -> Iterator[str]:
    yield from (f"{stem}.{part}" for part in BOTH)
