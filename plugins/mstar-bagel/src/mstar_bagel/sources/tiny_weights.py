"""Files of the tiny checkpoint: configs, byte-level tokenizer, model and autoencoder, in the published layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, models, pre_tokenizers

from mstar_bagel.checkpoint.config import (
    CONFIG,
    CONTROL,
    LLM_CONFIG,
    MODEL_FILE,
    TOKENIZER_CONFIG,
    VAE_FILE,
    VIT_CONFIG,
    read_sizes,
)
from mstar_bagel.published import shapes
from mstar_bagel.request.tokenizer import FILE, qwen_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Generator, Tensor

    from mstar_bagel.checkpoint.config import Sizes

SEED: Final = 2026
MERGES: Final = (
    "Ġ t",
    "h e",
    "Ġt he",
    "Ġ a",
    "i n",
    "r e",
    "o n",
    "e r",
    "Ġ b",
    "a t",
    "o a",
    "Ġb oa",
    "Ġboa t",
    "Ġ r",
    "e d",
    "Ġr ed",
    "i s",
    "Ġ i",
    "Ġi n",
    "n d",
    "Ġa nd",
)
UNUSED_IDS: Final = 8
"""Ids between the tokenizer's last and the end of the vocabulary, as in the official checkpoint."""

LANGUAGE: Final = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "model_type": "qwen2",
    "hidden_act": "silu",
}
VISION: Final = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "patch_size": 14,
    "num_channels": 3,
    "image_size": 112,
    "layer_norm_eps": 1e-6,
    "model_type": "siglip_vision_model",
}
VAE: Final = {
    "ch": 32,
    "ch_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "z_channels": 4,
    "scale_factor": 0.3611,
    "shift_factor": 0.1159,
}
RULES: Final = {
    "vae": {"max_size": 96, "min_size": 32, "stride": 16},
    "vit": {"max_size": 112, "min_size": 28, "stride": 14},
}
LATENT_SIDE: Final = 8
VIT_SIDE: Final = 8

# Residual dimensions with a meaning. The others are random.
ONE: Final = 0  # constant, so that the head can have a bias
PHASE: Final = 1  # one-hot: the phase of a token; text runs through all phases once
PHASES: Final = 14
FREE: Final = PHASE + PHASES


def write_files(folder: Path) -> None:
    """Write every file of the checkpoint."""
    tokenizer = _tokenizer()
    ids = tokenizer.get_vocab_size(with_added_tokens=True)
    _write_json(folder / LLM_CONFIG, {**LANGUAGE, "vocab_size": ids + UNUSED_IDS})
    _write_json(folder / VIT_CONFIG, VISION)
    _write_json(
        folder / CONFIG, {"model_type": "bagel", "vae_config": VAE, "latent_patch_size": 2, "preprocess": RULES}
    )
    tokenizer.save(str(folder / FILE))
    added = {
        str(number): {"content": token.content, "special": True}
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    _write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added})
    sizes = read_sizes(folder)
    generator = torch.Generator().manual_seed(SEED)
    drawn = {name: _drawn(name, shape, generator) for name, shape in sorted(_shapes(sizes).items())}
    _shape_text(drawn, tokenizer, sizes)
    for file in (MODEL_FILE, VAE_FILE):
        of_vae = file == VAE_FILE
        tensors = {name: value for name, value in drawn.items() if name.startswith(("encoder.", "decoder.")) == of_vae}
        save_file(tensors, folder / file, metadata={"format": "pt"})


def _shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    by_name = shapes(sizes)
    for table, side in (("latent_pos_embed.pos_embed", LATENT_SIDE), ("vit_pos_embed.pos_embed", VIT_SIDE)):
        by_name[table] = (side * side, sizes.language.width)
    name = "vit_model.vision_model.embeddings.position_embedding.weight"
    by_name[name] = (VIT_SIDE * VIT_SIDE, sizes.vision.width)
    return by_name


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (pair.split() for pair in MERGES)]
    tokens = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    tokenizer = qwen_tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    names = ("<|endoftext|>", *CONTROL.values())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def _drawn(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Return random values under which every part has an effect."""
    drawn: Tensor = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.1 * drawn if name.endswith("weight") else 0.05 * drawn
    if len(shape) == 1:
        return 0.05 * drawn
    if name.endswith(("pos_embed", "position_embedding.weight", "embed_tokens.weight")):
        return drawn
    gain = 0.6 if name.startswith("decoder.conv_out") else 1.0
    return drawn * (gain / math.sqrt(math.prod(shape[1:])))


def _shape_text(weights: dict[str, Tensor], tokenizer: Tokenizer, sizes: Sizes) -> None:
    """Let readable tokens follow each other by phase, and the end token follow the last phase."""
    stem = "language_model"
    table, head = weights[f"{stem}.model.embed_tokens.weight"], weights[f"{stem}.lm_head.weight"]
    phases = _phases(tokenizer, len(table))
    phases[sizes.ids.start] = PHASES - 1  # decoding starts with this token, and continues with phase 0
    table[:, :FREE] = 0.0
    table[:, ONE] = 3.0
    known = phases >= 0
    table[known, PHASE + phases[known]] = 3.0
    head *= 0.2
    head[:, :FREE] = 0.0
    head[:, ONE] = -4.0  # tokens without a phase are never drawn
    chosen = known.clone()
    chosen[sizes.ids.start] = False
    head[chosen, ONE] = 0.0
    head[chosen, PHASE + (phases[chosen] - 1) % PHASES] = 2.0
    head[sizes.ids.end] = 0.0
    head[sizes.ids.end, PHASE + PHASES - 2] = 4.0
    for layer in range(sizes.language.layers):
        for expert in ("", "_moe_gen"):
            weights[f"{stem}.model.layers.{layer}.self_attn.o_proj{expert}.weight"][:FREE] = 0.0
            weights[f"{stem}.model.layers.{layer}.mlp{expert}.down_proj.weight"][:FREE] = 0.0
    weights[f"{stem}.model.norm.weight"].fill_(1.0)


def _phases(tokenizer: Tokenizer, vocab: int) -> Tensor:
    """Return the phase of each token of printable text, -1 for all others: int64 [vocab]."""
    phases = torch.full((vocab,), -1)
    control = tokenizer.get_added_tokens_decoder()
    readable = [
        number
        for number in range(tokenizer.get_vocab_size())
        if number not in control and tokenizer.decode([number]).isascii() and tokenizer.decode([number]).isprintable()
    ]
    phases[torch.tensor(readable)] = torch.arange(len(readable)) % PHASES
    return phases


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
