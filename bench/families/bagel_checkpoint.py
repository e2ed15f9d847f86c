"""A BAGEL checkpoint with random bfloat16 weights in the official shapes.

`python -m bench.families.bagel_checkpoint FOLDER` writes it in a separate process, so that the benchmark process holds
no device context. The tokenizer is that of `bagel:tiny`, so answers have no readable text.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from mstar_bagel.checkpoint.config import (
    CONFIG,
    LLM_CONFIG,
    MODEL_FILE,
    TOKENIZER_CONFIG,
    VAE_FILE,
    VIT_CONFIG,
    Sizes,
)
from mstar_bagel.checkpoint.tiny import write_tiny
from mstar_bagel.published import shapes
from mstar_bagel.request.tokenizer import FILE

NAMES: Final[Mapping[torch.dtype, str]] = {torch.bfloat16: "BF16", torch.float32: "F32"}


def write_checkpoint(folder: Path, device: str = "cuda", sizes: Sizes | None = None) -> Path:
    """Write configs, tokenizer and weights, one tensor at a time. Needs 30 GB on the disk."""
    sizes = sizes or Sizes()
    folder.mkdir(parents=True)
    _write_configs(folder, sizes)
    with tempfile.TemporaryDirectory() as scratch:
        small = write_tiny(Path(scratch) / "tiny")
        for name in (FILE, TOKENIZER_CONFIG):
            shutil.copyfile(small / name, folder / name)
    found = shapes(sizes)
    of_vae = {name: shape for name, shape in found.items() if name.startswith(("encoder.", "decoder."))}
    generator = torch.Generator(device).manual_seed(1)
    rest = {name: shape for name, shape in found.items() if name not in of_vae}
    _write_tensors(folder / MODEL_FILE, rest, torch.bfloat16, generator)
    _write_tensors(folder / VAE_FILE, of_vae, torch.float32, generator)
    return folder


def _write_tensors(
    path: Path, found: Mapping[str, tuple[int, ...]], dtype: torch.dtype, generator: torch.Generator
) -> None:
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in found.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, shape in found.items():
            file.write(_drawn(name, shape, dtype, generator).cpu().flatten().view(torch.uint8).numpy().data)


def _drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Draw a tensor: scale-preserving matrices, unit norm weights, zero biases."""
    made = torch.zeros(shape, dtype=dtype, device=generator.device)
    if len(shape) > 1:
        return made.normal_(0.0, made[0].numel() ** -0.5, generator=generator)
    return made.fill_(1.0) if "norm" in name and name.endswith("weight") else made


def _write_configs(folder: Path, sizes: Sizes) -> None:
    language, vision, vae = sizes.language, sizes.vision, sizes.vae
    files: dict[str, dict[str, Any]] = {
        LLM_CONFIG: {
            "hidden_size": language.width, "num_hidden_layers": language.layers,
            "num_attention_heads": language.heads, "num_key_value_heads": language.kv_heads,
            "intermediate_size": language.mlp, "vocab_size": language.vocab, "rope_theta": language.rope_theta,
            "rms_norm_eps": language.eps, "max_position_embeddings": language.max_positions,
        },
        VIT_CONFIG: {
            "hidden_size": vision.width, "num_hidden_layers": vision.layers + 1, "num_attention_heads": vision.heads,
            "intermediate_size": vision.mlp, "patch_size": vision.patch, "num_channels": vision.channels,
            "layer_norm_eps": vision.eps,
        },
        CONFIG: {
            "latent_patch_size": sizes.latent_patch,
            "vae_config": {
                "ch": vae.width, "ch_mult": list(vae.multipliers), "num_res_blocks": vae.blocks,
                "z_channels": vae.channels, "scale_factor": vae.scale, "shift_factor": vae.shift,
            },
        },
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
