"""Names and shapes of the tensors in an official checkpoint (specification section 2). Loads no weights.

The conformance check reads `key_map`; the tiny checkpoint draws random weights of these shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from mstar_core.plugin.conformance import KeyMap
from mstar_qwen3omni.checkpoint.config import DecoderSizes, OmniConfig
from mstar_qwen3omni.checkpoint.weights import TENSORS

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]

KERNEL: Final = 7
"""Taps of Code2Wav's causal convolutions."""

DILATIONS: Final = 3
"""Residual units of each block of Code2Wav's decoder."""

WIDENING: Final = 4
"""Inner width of Code2Wav's ConvNeXt blocks, in multiples of their width."""


def shapes(config: OmniConfig) -> Mapping[str, Shape]:
    """Return the shape of each tensor of a checkpoint, by name. Those of speech are left out if it has none."""
    parts = [*_prefixed("thinker.", _thinker(config))]
    parts += _prefixed("thinker.audio_tower.", _audio(config))
    parts += _prefixed("thinker.visual.", _vision(config))
    if config.has_speech:
        parts += [*_prefixed("talker.", _talker(config)), *_prefixed("code2wav.", _code2wav(config))]
    return dict(parts)


def key_map() -> Mapping[str, KeyMap]:
    """Return published names and the nodes' parameters, by weight set.

    The talker's copy of the thinker's embeddings is left out, because a published name has one place.
    """
    import torch

    from mstar_core.layers.moe import expert_parts
    from mstar_qwen3omni.model import new_module

    config, places = OmniConfig(), set[str]()
    for node in TENSORS:
        with torch.device("meta"):
            module = new_module(node, config)
        fused = expert_parts(module)
        names = (set(module.state_dict()) - set(fused)).union(*fused.values())
        places |= {f"{node}.{name}" for name in names if not name.startswith("text_embedding.")}
    return {"omni": KeyMap(targets={name: _place(name) for name in shapes(config)}, places=frozenset(places))}


def _place(name: str) -> str:
    return next(
        f"{node}.{into}{name.removeprefix(prefix)}"
        for node, tensors in TENSORS.items()
        for prefix, into in tensors.prefixes.items()
        if name.startswith(prefix)
    )


def _prefixed(prefix: str, named: Named) -> Named:
    return ((prefix + name, shape) for name, shape in named)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = True) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Named:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _gated(name: str, inner: int, width: int) -> Named:
    yield from _linear(f"{name}.gate_proj", inner, width, bias=False)
    yield from _linear(f"{name}.up_proj", inner, width, bias=False)
    yield from _linear(f"{name}.down_proj", width, inner, bias=False)


def _decoder(sizes: DecoderSizes, *, has_norms: bool = True) -> Named:
    """Return the layers and the last norm of a causal decoder."""
    width, across, kv_across = sizes.width, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for layer in range(sizes.layers):
        prefix = f"layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (width,)
        yield f"{prefix}.post_attention_layernorm.weight", (width,)
        for name, outputs in (("q", across), ("k", kv_across), ("v", kv_across)):
            yield from _linear(f"{prefix}.self_attn.{name}_proj", outputs, width, bias=False)
        yield from _linear(f"{prefix}.self_attn.o_proj", width, across, bias=False)
        if has_norms:
            yield f"{prefix}.self_attn.q_norm.weight", (sizes.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (sizes.head_dim,)
        yield from _feed_forward(f"{prefix}.mlp", sizes)
    yield "norm.weight", (width,)


def _feed_forward(name: str, sizes: DecoderSizes) -> Named:
    if not sizes.experts:
        yield from _gated(name, sizes.mlp, sizes.width)
        return
    yield from _linear(f"{name}.gate", sizes.experts, sizes.width, bias=False)
    for expert in range(sizes.experts):
        yield from _gated(f"{name}.experts.{expert}", sizes.mlp, sizes.width)
    if sizes.shared_mlp:
        yield from _gated(f"{name}.shared_expert", sizes.shared_mlp, sizes.width)
        yield from _linear(f"{name}.shared_expert_gate", 1, sizes.width, bias=False)


def _thinker(config: OmniConfig) -> Named:
    sizes = config.thinker
    yield "model.embed_tokens.weight", (sizes.vocab, sizes.width)
    yield from _prefixed("model.", _decoder(sizes))
    yield from _linear("lm_head", sizes.vocab, sizes.width, bias=False)


def _audio(config: OmniConfig) -> Named:
    sizes = config.audio
    width, bins = sizes.width, sizes.mel_bins
    for number in (1, 2, 3):
        yield f"conv2d{number}.weight", (sizes.channels, 1 if number == 1 else sizes.channels, 3, 3)
        yield f"conv2d{number}.bias", (sizes.channels,)
        bins = (bins + 1) // 2
    yield from _linear("conv_out", width, sizes.channels * bins, bias=False)
    for layer in range(sizes.layers):
        prefix = f"layers.{layer}"
        for name in ("q", "k", "v", "out"):
            yield from _linear(f"{prefix}.self_attn.{name}_proj", width, width)
        yield from _norm(f"{prefix}.self_attn_layer_norm", width)
        yield from _linear(f"{prefix}.fc1", sizes.mlp, width)
        yield from _linear(f"{prefix}.fc2", width, sizes.mlp)
        yield from _norm(f"{prefix}.final_layer_norm", width)
    yield from _norm("ln_post", width)
    yield from _linear("proj1", width, width)
    yield from _linear("proj2", sizes.output, width)


def _vision(config: OmniConfig) -> Named:
    sizes = config.vision
    width, joined = sizes.width, sizes.width * sizes.merge**2
    yield "patch_embed.proj.weight", (width, 3, 2, sizes.patch, sizes.patch)
    yield "patch_embed.proj.bias", (width,)
    yield "pos_embed.weight", (sizes.positions, width)
    for layer in range(sizes.layers):
        prefix = f"blocks.{layer}"
        yield from _norm(f"{prefix}.norm1", width)
        yield from _norm(f"{prefix}.norm2", width)
        yield from _linear(f"{prefix}.attn.qkv", 3 * width, width)
        yield from _linear(f"{prefix}.attn.proj", width, width)
        yield from _linear(f"{prefix}.mlp.linear_fc1", sizes.mlp, width)
        yield from _linear(f"{prefix}.mlp.linear_fc2", width, sizes.mlp)
    mergers = {"merger": width} | {f"merger_list.{level}": joined for level in range(len(sizes.deepstack))}
    for name, normed in mergers.items():
        yield from _norm(f"{name}.ln_q", normed)
        yield from _linear(f"{name}.mlp.0", joined, joined)
        yield from _linear(f"{name}.mlp.2", sizes.output, joined)


def _talker(config: OmniConfig) -> Named:
    sizes, predictor, codes = config.talker, config.predictor, config.groups - 1
    yield "model.codec_embedding.weight", (sizes.vocab, sizes.width)
    yield from _prefixed("model.", _decoder(sizes))
    yield from _linear("codec_head", sizes.vocab, sizes.width, bias=False)
    for name in ("text_projection", "hidden_projection"):
        yield from _linear(f"{name}.linear_fc1", config.projection, config.thinker.width)
        yield from _linear(f"{name}.linear_fc2", sizes.width, config.projection)
    for group in range(codes):
        yield f"code_predictor.model.codec_embedding.{group}.weight", (predictor.vocab, predictor.width)
        yield f"code_predictor.lm_head.{group}.weight", (predictor.vocab, predictor.width)
    yield from _prefixed("code_predictor.model.", _decoder(predictor))


def _code2wav(config: OmniConfig) -> Named:
    sizes = config.vocoder
    width = sizes.width
    transformer = DecoderSizes(
        vocab=0,
        width=width,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        mlp=sizes.mlp,
    )
    yield "code_embedding.weight", (sizes.codebook * sizes.groups, width)
    yield from _prefixed("pre_transformer.", _decoder(transformer, has_norms=False))
    for layer in range(sizes.layers):
        for name in ("self_attn", "mlp"):
            yield f"pre_transformer.layers.{layer}.{name}_layer_scale.scale", (width,)
    for stage, ratio in enumerate(sizes.ratios):
        prefix = f"upsample.{stage}"
        yield from _conv(f"{prefix}.0.conv", (width, width, ratio), width)
        yield from _conv(f"{prefix}.1.dwconv.conv", (width, 1, KERNEL), width)
        yield from _norm(f"{prefix}.1.norm", width)
        yield from _linear(f"{prefix}.1.pwconv1", WIDENING * width, width)
        yield from _linear(f"{prefix}.1.pwconv2", width, WIDENING * width)
        yield f"{prefix}.1.gamma", (width,)
    yield from _sound_decoder(sizes.decoder, sizes.rates, width)


def _sound_decoder(channels: int, rates: Shape, width: int) -> Named:
    yield from _conv("decoder.0.conv", (channels, width, KERNEL), channels)
    for number, rate in enumerate(rates, start=1):
        prefix, after = f"decoder.{number}.block", channels // 2
        yield from _snake(f"{prefix}.0", channels)
        yield from _conv(f"{prefix}.1.conv", (channels, after, 2 * rate), after)
        for unit in range(2, 2 + DILATIONS):
            for half, taps in ((1, KERNEL), (2, 1)):
                yield from _snake(f"{prefix}.{unit}.act{half}", after)
                yield from _conv(f"{prefix}.{unit}.conv{half}.conv", (after, after, taps), after)
        channels = after
    yield from _snake(f"decoder.{len(rates) + 1}", channels)
    yield from _conv(f"decoder.{len(rates) + 2}.conv", (1, channels, KERNEL), 1)


def _conv(name: str, weight: Shape, outputs: int) -> Named:
    yield f"{name}.weight", weight
    yield f"{name}.bias", (outputs,)


def _snake(name: str, channels: int) -> Named:
    yield f"{name}.alpha", (channels,)
    yield f"{name}.beta", (channels,)
