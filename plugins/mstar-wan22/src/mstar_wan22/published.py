"""Names of the official weights, and their places in the modules. Loads no weights. Used by the conformance checks.

Source: `official_tensor_shapes.json` of the golden vectors, written as rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from mstar_core.plugin.conformance import KeyMap
from mstar_wan22.checkpoint.config import HIGH, LOW, TEXT, VAE, Sizes, VaeSizes
from mstar_wan22.plugin import VARIANTS
from mstar_wan22.sources.layout import shapes

BOTH: Final = ("weight", "bias")


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and their places for all variants together, each name with its folder."""
    found: dict[str, str | None] = {}
    places: set[str] = set()
    for variant in VARIANTS.values():
        found |= {name: name for name in names(variant.sizes)}
        parts = shapes(variant.sizes)
        places |= {f"{part}/{name}" for part, named in parts.items() for name in named}
    return {"wan22": KeyMap(targets=found, places=frozenset(places))}


def names(sizes: Sizes) -> Iterator[str]:
    """Yield every key of the files of a checkpoint, behind its folder."""
    yield from (f"{TEXT}/{name}" for name in _text(sizes.text.layers))
    for part in (HIGH, LOW) if sizes.has_experts else (HIGH,):
        yield from (f"{part}/{name}" for name in _transformer(sizes.transformer.layers))
    yield from (f"{VAE}/{name}" for name in _vae(sizes.vae))


def _text(layers: int) -> Iterator[str]:
    yield from ("shared.weight", "encoder.final_layer_norm.weight")
    for layer in range(layers):
        first, second = (f"encoder.block.{layer}.layer.{number}" for number in (0, 1))
        parts = (*"qkvo", "relative_attention_bias")
        yield from (f"{first}.SelfAttention.{part}.weight" for part in parts)
        yield from (f"{second}.DenseReluDense.{part}.weight" for part in ("wi_0", "wi_1", "wo"))
        yield from (f"{at}.layer_norm.weight" for at in (first, second))


def _transformer(layers: int) -> Iterator[str]:
    yield "scale_shift_table"
    yield from _pairs("patch_embedding", "proj_out", "condition_embedder.time_proj")
    for part in ("time_embedder", "text_embedder"):
        yield from _pairs(*(f"condition_embedder.{part}.linear_{number}" for number in (1, 2)))
    for layer in range(layers):
        at = f"blocks.{layer}"
        yield f"{at}.scale_shift_table"
        yield from _pairs(f"{at}.norm2", f"{at}.ffn.net.0.proj", f"{at}.ffn.net.2")
        for attention in (f"{at}.attn1", f"{at}.attn2"):
            yield from _pairs(*(f"{attention}.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0")))
            yield from (f"{attention}.{part}.weight" for part in ("norm_q", "norm_k"))


def _vae(sizes: VaeSizes) -> Iterator[str]:
    yield from _pairs("quant_conv", "post_quant_conv")
    for side in ("encoder", "decoder"):
        yield from _pairs(f"{side}.conv_in", f"{side}.conv_out")
        yield f"{side}.norm_out.gamma"
        yield from _block(f"{side}.mid_block.resnets.0", has_shortcut=False)
        yield from _block(f"{side}.mid_block.resnets.1", has_shortcut=False)
        at = f"{side}.mid_block.attentions.0"
        yield f"{at}.norm.gamma"
        yield from _pairs(f"{at}.to_qkv", f"{at}.proj")
    yield from _encoder(sizes)
    yield from _decoder(sizes)


def _encoder(sizes: VaeSizes) -> Iterator[str]:
    factors, last = (1, *sizes.multipliers), len(sizes.multipliers) - 1
    flat = 0
    for level in range(last + 1):
        for block in range(sizes.blocks):
            at = f"encoder.down_blocks.{level}.resnets.{block}" if sizes.is_residual else f"encoder.down_blocks.{flat}"
            yield from _block(at, has_shortcut=block == 0 and factors[level] != factors[level + 1])
            flat += 1
        if level < last:
            at = f"encoder.down_blocks.{level}.downsampler" if sizes.is_residual else f"encoder.down_blocks.{flat}"
            yield from _resampler(at, has_time=sizes.temporal[level])
            flat += 1


def _decoder(sizes: VaeSizes) -> Iterator[str]:
    factors, last = (sizes.multipliers[-1], *sizes.multipliers[::-1]), len(sizes.multipliers) - 1
    for level in range(last + 1):
        halved = not sizes.is_residual and level > 0
        inputs = factors[level] / 2 if halved else factors[level]
        at = f"decoder.up_blocks.{level}"
        for block in range(sizes.blocks + 1):
            yield from _block(f"{at}.resnets.{block}", has_shortcut=block == 0 and inputs != factors[level + 1])
        if level < last:
            up = f"{at}.upsampler" if sizes.is_residual else f"{at}.upsamplers.0"
            yield from _resampler(up, has_time=sizes.temporal[::-1][level])


def _resampler(at: str, *, has_time: bool) -> Iterator[str]:
    yield from _pairs(f"{at}.resample.1", *([f"{at}.time_conv"] if has_time else []))


def _block(at: str, *, has_shortcut: bool) -> Iterator[str]:
    yield from (f"{at}.{norm}.gamma" for norm in ("norm1", "norm2"))
    yield from _pairs(f"{at}.conv1", f"{at}.conv2", *([f"{at}.conv_shortcut"] if has_shortcut else []))


def _pairs(*stems: str) -> Iterator[str]:
    yield from (f"{stem}.{part}" for stem in stems for part in BOTH)
