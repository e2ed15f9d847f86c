"""A checkpoint folder of Qwen3-8B's sizes with random weights made on the device, and LoRA adapters of it.

Config and ids are those of Qwen/Qwen3-8B. The tokenizer is that of `llm:tiny`, with a piece of a word for every other
id.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.families.words import with_pieces
from mstar_core.families.tokenizer import FILE
from mstar_core.weights.random_fill import MARKER
from mstar_llm.checkpoint.config import CONFIG, GENERATION
from mstar_llm.plugin import OFFICIAL
from mstar_llm.sources.tiny import write_tiny

IDS: Final = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
    "<think>": 151667,
    "</think>": 151668,
}
PROJECTIONS: Final = {
    "self_attn.q_proj": (OFFICIAL.width, OFFICIAL.heads * OFFICIAL.head_dim),
    "self_attn.k_proj": (OFFICIAL.width, OFFICIAL.kv_heads * OFFICIAL.head_dim),
    "self_attn.v_proj": (OFFICIAL.width, OFFICIAL.kv_heads * OFFICIAL.head_dim),
    "self_attn.o_proj": (OFFICIAL.heads * OFFICIAL.head_dim, OFFICIAL.width),
    "mlp.gate_proj": (OFFICIAL.width, OFFICIAL.mlp),
    "mlp.up_proj": (OFFICIAL.width, OFFICIAL.mlp),
    "mlp.down_proj": (OFFICIAL.mlp, OFFICIAL.width),
}
"""Inputs and outputs of the adapted projections of a layer."""


def write_random(folder: Path, seed: int) -> Path:
    """Write the folder and return it. seed: of the weights."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = write_tiny(Path(scratch) / "tiny")
        for path in tiny.iterdir():
            if path.suffix in (".json", ".jinja"):
                shutil.copy(path, folder / path.name)
    tokenizer = json.loads((folder / FILE).read_text(encoding="utf-8"))
    for token in tokenizer["added_tokens"]:
        token["id"] = IDS[token["content"]]
    # An added token keeps an id inside the vocabulary only if the vocabulary has it too.
    tokenizer["model"]["vocab"] = with_pieces(tokenizer["model"]["vocab"] | IDS, OFFICIAL.vocab)
    _write(folder / FILE, tokenizer)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    _write(folder / CONFIG, config | _sizes())
    _write(folder / GENERATION, {"eos_token_id": list(OFFICIAL.stop_ids)})
    _write(folder / MARKER, {"seed": seed})
    return folder


def _sizes() -> dict[str, Any]:
    """Return the keys of `config.json` that differ from the miniature's."""
    return {
        "dtype": "bfloat16",
        "vocab_size": OFFICIAL.vocab,
        "hidden_size": OFFICIAL.width,
        "intermediate_size": OFFICIAL.mlp,
        "num_hidden_layers": OFFICIAL.layers,
        "num_attention_heads": OFFICIAL.heads,
        "num_key_value_heads": OFFICIAL.kv_heads,
        "head_dim": OFFICIAL.head_dim,
        "rope_theta": OFFICIAL.rope["rope_theta"],
        "max_position_embeddings": OFFICIAL.max_positions,
        "tie_word_embeddings": False,
        "eos_token_id": OFFICIAL.stop_ids[0],
    }


def write_adapter(folder: Path, seed: int, rank: int = 16) -> Path:
    """Write a LoRA adapter of all projections in PEFT's layout, with random bfloat16 weights; return the folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(OFFICIAL.layers):
        for name, (inputs, outputs) in PROJECTIONS.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            down = torch.empty(rank, inputs, dtype=torch.bfloat16).normal_(0, inputs**-0.5, generator=generator)
            up = torch.empty(outputs, rank, dtype=torch.bfloat16).normal_(0, 0.01, generator=generator)
            weights |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted(name.rpartition(".")[2] for name in PROJECTIONS)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"}
    _write(folder / "adapter_config.json", settings)
    return folder


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
