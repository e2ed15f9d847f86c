"""A BAGEL checkpoint folder of the official sizes with random weights, which are made on the device.

The tokenizer is that of `bagel:tiny`, so answers have no readable text.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bench.families.words import with_words
from mstar_bagel.checkpoint.config import (
    CONFIG,
    LLM_CONFIG,
    TOKENIZER_CONFIG,
    VIT_CONFIG,
    Sizes,
)
from mstar_bagel.request.tokenizer import FILE
from mstar_bagel.sources.tiny import write_tiny
from mstar_core.weights.random_fill import MARKER


def write_random(folder: Path, seed: int, sizes: Sizes | None = None) -> Path:
    """Write the folder and return it. seed: of the weights."""
    sizes = sizes or Sizes()
    folder.mkdir(parents=True)
    _write_configs(folder, sizes)
    with tempfile.TemporaryDirectory() as scratch:
        small = write_tiny(Path(scratch) / "tiny")
        shutil.copyfile(small / TOKENIZER_CONFIG, folder / TOKENIZER_CONFIG)
        tokenizer = json.loads((small / FILE).read_text(encoding="utf-8"))
    control = [token["id"] for token in tokenizer["added_tokens"]]
    tokenizer["model"]["vocab"] = with_words(tokenizer["model"]["vocab"], sizes.language.vocab, control)
    (folder / FILE).write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / MARKER).write_text(json.dumps({"seed": seed}))
    return folder


def _write_configs(folder: Path, sizes: Sizes) -> None:
    language, vision, vae = sizes.language, sizes.vision, sizes.vae
    files: dict[str, dict[str, Any]] = {
        LLM_CONFIG: {
            "hidden_size": language.width,
            "num_hidden_layers": language.layers,
            "num_attention_heads": language.heads,
            "num_key_value_heads": language.kv_heads,
            "intermediate_size": language.mlp,
            "vocab_size": language.vocab,
            "rope_theta": language.rope_theta,
            "rms_norm_eps": language.eps,
            "max_position_embeddings": language.max_positions,
        },
        VIT_CONFIG: {
            "hidden_size": vision.width,
            "num_hidden_layers": vision.layers + 1,
            "num_attention_heads": vision.heads,
            "intermediate_size": vision.mlp,
            "patch_size": vision.patch,
            "num_channels": vision.channels,
            "layer_norm_eps": vision.eps,
        },
        CONFIG: {
            "latent_patch_size": sizes.latent_patch,
            "vae_config": {
                "ch": vae.width,
                "ch_mult": list(vae.multipliers),
                "num_res_blocks": vae.blocks,
                "z_channels": vae.channels,
                "scale_factor": vae.scale,
                "shift_factor": vae.shift,
            },
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
