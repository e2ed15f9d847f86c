"""Orpheus checkpoint in the official layout and shapes, with random weights and a head that gives audio ids only.

Run as `python -m bench.serving.checkpoint FOLDER`, in a process of its own: it makes the weights on the GPU, and the
measuring process must not keep a device context.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from mstar_orpheus.plugin import OFFICIAL
from mstar_orpheus.sources.tiny import write_tiny
from mstar_orpheus.sources.tiny_weights import _state
from mstar_orpheus.vocoder.snac import SnacConfig

WIDTH, MLP, HEADS, KV_HEADS, HEAD_DIM = 3072, 8192, 24, 8, 128


def write_checkpoint(folder: Path) -> None:
    """Write both parts in the official layout and shapes, with the tiny checkpoint's tokenizer. Needs a GPU."""
    tiny = write_tiny(folder.parent / "tiny")
    for part in ("lm", "snac"):
        (folder / part).mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tiny / "lm" / name, folder / "lm" / name)
    config = json.loads((tiny / "lm" / "config.json").read_text())
    config |= {
        "vocab_size": OFFICIAL.vocab_size,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_hidden_layers": OFFICIAL.layers,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
    }
    config.pop("orpheus")
    (folder / "lm" / "config.json").write_text(json.dumps(config))
    save_file(language_weights(), folder / "lm" / "model.safetensors", metadata={"format": "pt"})
    codec = json.loads((tiny / "snac" / "config.json").read_text())
    codec |= {"encoder_dim": 48, "decoder_dim": 1024, "codebook_size": OFFICIAL.codebook_size}
    (folder / "snac" / "config.json").write_text(json.dumps(codec))
    torch.save(_state(SnacConfig.read(folder / "snac" / "config.json")), folder / "snac" / "pytorch_model.bin")


def language_weights() -> dict[str, torch.Tensor]:
    """Draw normal weights of deviation 0.02. One hidden dimension is constant, so that the head can exclude ids."""
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(rows: int, columns: int) -> torch.Tensor:
        made = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        return made.normal_(0.0, 0.02, generator=generator)

    embed, head = normal(OFFICIAL.vocab_size, WIDTH), normal(OFFICIAL.vocab_size, WIDTH)
    embed[:, 0] = 1.0
    head[:, 0] = -40.0
    head[OFFICIAL.audio_ids.start : OFFICIAL.audio_ids.stop, 0] = 0.0
    weights = {"model.embed_tokens.weight": embed.cpu(), "lm_head.weight": head.cpu()}
    weights["model.norm.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
        "mlp.gate_proj": (MLP, WIDTH),
        "mlp.up_proj": (MLP, WIDTH),
        "mlp.down_proj": (WIDTH, MLP),
    }
    for layer in range(OFFICIAL.layers):
        for name, shape in shapes.items():
            value = normal(*shape)
            if name in ("self_attn.o_proj", "mlp.down_proj"):
                value[0] = 0.0
            weights[f"model.layers.{layer}.{name}.weight"] = value.cpu()
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    return weights


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
