"""Tiny random checkpoints of every architecture, written by transformers, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor

SIZES: Final = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR: Final = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@dataclass(frozen=True)
class Case:
    """A config class of transformers with fields beside SIZES."""

    config: str
    fields: Mapping[str, Any]


CASES: Final = {
    "llama": Case("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama tied": Case("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": Case("MistralConfig", {"sliding_window": None}),
    "mistral with a window": Case("MistralConfig", {"sliding_window": 7}),
    "qwen2": Case("Qwen2Config", {}),
    "qwen3": Case("Qwen3Config", {}),
    "qwen3_moe": Case(
        "Qwen3MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "gemma3": Case("Gemma3TextConfig", {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20}),
    "gemma3 with long positions": Case(
        "Gemma3TextConfig", {"sliding_window": 5, "sliding_window_pattern": 2, "rope_parameters": LINEAR}
    ),
}


def write_checkpoint(case: Case, folder: Path, **fields: Any) -> Any:
    """Write a random checkpoint and return the model of transformers. Every weight is random, norms and biases too."""
    torch.manual_seed(7)
    config = getattr(transformers, case.config)(**{**SIZES, **case.fields, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * (0.3 if "norm" in name else 0.2) + float("norm" in name))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], Tensor]:
    """Return the greedy ids, and the log-probabilities of all ids at each of them: float32 [count, vocab]."""
    ids = list(prompt)
    scores = []
    for _ in range(count):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        scores.append(torch.log_softmax(logits.float(), dim=-1))
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :], torch.stack(scores)
