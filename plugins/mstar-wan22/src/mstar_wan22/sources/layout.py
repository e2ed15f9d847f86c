"""Files of a checkpoint in the published layout, for the generated and the trained miniatures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mstar_core.parallel.shards import WHOLE
from mstar_wan22.checkpoint.config import (
    FILES,
    HIGH,
    IMAGE_TO_VIDEO,
    INDEX,
    LOW,
    SCHEDULER,
    SOLVER,
    TEXT,
    TEXT_FILES,
    TOKENIZER,
    VAE,
    Sizes,
)
from mstar_wan22.nodes.text import TextEncoder
from mstar_wan22.nodes.transformer import Transformer
from mstar_wan22.nodes.vae import Decoder, Encoder

if TYPE_CHECKING:
    from torch import Tensor, nn

Tensors = dict[str, "Tensor"]
ASCII: Final = "".join(chr(code) for code in range(33, 127))


def write_configs(folder: Path, sizes: Sizes, words: tuple[str, ...]) -> None:
    """Write every JSON file and a tokenizer that knows these words and all ASCII characters."""
    both, text = sizes.has_experts, sizes.text
    kinds = {
        SCHEDULER: ["diffusers", "UniPCMultistepScheduler"],
        TEXT: ["transformers", "UMT5EncoderModel"],
        TOKENIZER: ["transformers", "T5TokenizerFast"],
        HIGH: ["diffusers", "WanTransformer3DModel"],
        LOW: ["diffusers", "WanTransformer3DModel"] if both else [None, None],
        VAE: ["diffusers", "AutoencoderKLWan"],
    }
    kind = IMAGE_TO_VIDEO if sizes.takes_image else "WanPipeline"
    pipeline = {"_class_name": kind, "boundary_ratio": sizes.boundary, "expand_timesteps": sizes.expands}
    _write(folder / INDEX, {**pipeline, **kinds})
    _write(folder / SCHEDULER / "scheduler_config.json", {**SOLVER, "flow_shift": sizes.flow_shift})
    encoder = {
        "model_type": "umt5",
        "d_model": text.width,
        "d_kv": text.head_dim,
        "d_ff": text.inner,
        "num_layers": text.layers,
        "num_heads": text.heads,
        "vocab_size": text.vocab,
        "relative_attention_num_buckets": text.buckets,
        "relative_attention_max_distance": text.max_distance,
        "layer_norm_epsilon": text.eps,
        "feed_forward_proj": "gated-gelu",
    }
    _write(folder / TEXT / "config.json", encoder)
    for part in (HIGH, LOW) if both else (HIGH,):
        _write(folder / part / "config.json", _transformer(sizes))
    _write(folder / VAE / "config.json", _vae(sizes))
    tokenizer = made_tokenizer(words)
    (folder / TOKENIZER).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / TOKENIZER / "tokenizer.json"))


def _transformer(sizes: Sizes) -> dict[str, Any]:
    net = sizes.transformer
    return {
        "num_attention_heads": net.heads,
        "attention_head_dim": net.head_dim,
        "num_layers": net.layers,
        "ffn_dim": net.inner,
        "in_channels": net.inputs,
        "out_channels": net.outputs,
        "text_dim": net.text,
        "freq_dim": net.frequencies,
        "eps": net.eps,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "patch_size": [1, net.patch, net.patch],
        "rope_max_seq_len": net.max_positions,
    }


def _vae(sizes: Sizes) -> dict[str, Any]:
    vae = sizes.vae
    return {
        "base_dim": vae.base,
        "decoder_base_dim": vae.decoder_base,
        "z_dim": vae.channels,
        "dim_mult": list(vae.multipliers),
        "num_res_blocks": vae.blocks,
        "temperal_downsample": list(vae.temporal),
        "is_residual": vae.is_residual,
        "patch_size": vae.fold if vae.fold > 1 else None,
        "in_channels": 3 * vae.fold**2,
        "out_channels": 3 * vae.fold**2,
        "scale_factor_spatial": vae.pixels,
        "scale_factor_temporal": vae.frames,
        "latents_mean": list(vae.mean),
        "latents_std": list(vae.std),
    }


def made_tokenizer(words: tuple[str, ...]) -> Tokenizer:
    """Return a unigram tokenizer with the ids that UMT5's has for padding, end, start and unknown."""
    pieces = dict.fromkeys(["▁", *(f"▁{word}" for word in words), *ASCII])
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("<unk>", -20.0)]
    scored += [(piece, -float(10 - min(len(piece), 9))) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def modules(sizes: Sizes) -> dict[str, tuple[str, nn.Module]]:
    """Return the networks of a checkpoint by node, each with its folder. Parameters are on the default device."""
    found: dict[str, tuple[str, nn.Module]] = {
        "text_encoder": (TEXT, TextEncoder(sizes.text)),
        "transformer": (HIGH, Transformer(sizes.transformer, WHOLE)),
    }
    if sizes.has_experts:
        found["transformer_2"] = (LOW, Transformer(sizes.transformer, WHOLE))
    return {**found, "vae_encoder": (VAE, Encoder(sizes.vae)), "vae_decoder": (VAE, Decoder(sizes.vae))}


def shapes(sizes: Sizes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shape of every tensor by folder and name."""
    with torch.device("meta"):
        made = modules(sizes)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for part, module in made.values():
        found.setdefault(part, {}).update({name: tuple(value.shape) for name, value in module.state_dict().items()})
    return found


def write_weights(folder: Path, tensors: Mapping[str, Tensors]) -> None:
    """Write the tensors of each folder into one file."""
    for part, named in tensors.items():
        name = (TEXT_FILES if part == TEXT else FILES)[1]
        (folder / part).mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in named.items()}, folder / part / name, {"format": "pt"})


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")
