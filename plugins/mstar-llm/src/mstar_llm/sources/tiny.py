"""The generated checkpoint `llm:tiny`: a small Qwen3 with random weights, equal on every machine.

Its text is noise. Everything else behaves as with a real model: the text consists of printable characters, it ends by
itself after some dozens of tokens, and the chat template has tools and thinking.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mstar_core.families.byte_tokenizer import byte_tokenizer
from mstar_core.families.tokenizer import FILE
from mstar_core.plugin.chat.template_form import TEMPLATE, TOKENIZER_CONFIG
from mstar_core.weights.sources import generated_checkpoint
from mstar_llm.checkpoint.config import CONFIG, GENERATION, read_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

VERSION: Final = 2
"""Version of the generated files. A folder of another version is replaced."""

SEED: Final = 31
CHATML: Final = Path(__file__).parent / "chatml.jinja"
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
"""Tokens of calls and thinking. As in Qwen3 they are single ids, but not control tokens."""

PAIRS: Final = ("Ġ t", "h e", "Ġt he", "i n", "e r", "o n", "r e", "Ġ a", "a n", "Ġ s", "o u", "n d", "i s", '" :')
"""Merges of the tokenizer, so that some ids are longer than one byte."""

LEVEL: Final = 2.0
"""Value of the first dimension of every hidden state. Attention and MLP leave it alone, so the head has a bias."""

UNPRINTABLE: Final = -16.0
END_OF_TEXT: Final = 0.7


def write_tiny(folder: Path) -> Path:
    """Write `llm:tiny` into `folder` and return it. Raises StartError when the folder cannot be written."""
    return generated_checkpoint(folder, "llm:tiny", VERSION, _write)


def _write(folder: Path) -> None:
    from safetensors.torch import save_file

    tokenizer = byte_tokenizer(CONTROL, merges=PAIRS, markers=MARKERS)
    write_texts(folder, tokenizer, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=128)
    save_file(_weights(folder, tokenizer), folder / "model.safetensors", metadata={"format": "pt"})


def write_texts(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    mlp: int,
    ties: bool = False,
    dtype: str = "float32",
) -> None:
    """Write configs, tokenizer and chat template of a Qwen3 of this size, in the layout of the hub."""
    ids = {text: tokenizer.token_to_id(text) for text in CONTROL}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": dtype,
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": ties,
        "eos_token_id": ids["<|im_end|>"],
    }
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]}
    texts = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    for name, fields in ((CONFIG, config), (GENERATION, generation), (TOKENIZER_CONFIG, texts)):
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / FILE))
    (folder / TEMPLATE).write_text(CHATML.read_text(encoding="utf-8"), encoding="utf-8")


def _weights(folder: Path, tokenizer: Tokenizer) -> dict[str, Tensor]:
    import torch

    from mstar_llm.decoder import LanguageModel

    generator = torch.Generator().manual_seed(SEED)
    weights: dict[str, Tensor] = {}
    for name, empty in LanguageModel(read_config(folder), has_head=True).state_dict().items():
        is_norm = "norm" in name
        drawn = torch.randn(empty.shape, generator=generator) * empty.shape[-1] ** -0.5
        weights[name] = torch.ones_like(empty) if is_norm else drawn
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name][0] = 0
    weights["model.embed_tokens.weight"] *= weights["model.embed_tokens.weight"].shape[-1] ** 0.5
    weights["model.embed_tokens.weight"][:, 0] = LEVEL
    bias = torch.full((tokenizer.get_vocab_size(),), UNPRINTABLE)
    for text, number in tokenizer.get_vocab(with_added_tokens=False).items():
        if all(letter == "Ġ" or " " <= letter <= "~" for letter in text):
            bias[number] = 0
    bias[tokenizer.token_to_id("<|im_end|>")] = END_OF_TEXT
    weights["lm_head.weight"] *= 2
    weights["lm_head.weight"][:, 0] = bias
    return weights
