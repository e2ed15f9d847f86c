"""Table of architectures: how each differs from Llama. A new one of this kind is an entry here and a test.

All are decoders with pre-norm blocks, rotary positions, grouped queries and a gated MLP, and all publish their tensors
under Llama's names. Sizes are in config.json; only what no size tells is in this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Differences from Llama.

    qkv_bias: the query, key and value projections have biases, unless the config says `attention_bias`.
    has_head_norms: queries and keys are normalized per head before they are rotated.
    has_experts: the MLP is a mixture of experts.
    has_sandwich_norms: a second norm follows attention and MLP, before their outputs are added.
    has_offset_norms: norm weights are stored less one.
    scales_embeddings: embeddings are multiplied by the root of their width.
    activation: of the gated MLP.
    defaults: values that published configs leave out.
    """

    qkv_bias: bool = False
    has_head_norms: bool = False
    has_experts: bool = False
    has_sandwich_norms: bool = False
    has_offset_norms: bool = False
    scales_embeddings: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    defaults: Mapping[str, float] = field(default_factory=dict)


GEMMA3: Final = Architecture(
    has_head_norms=True,
    has_sandwich_norms=True,
    has_offset_norms=True,
    scales_embeddings=True,
    activation="gelu_tanh",
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
)

QWEN_DEFAULTS: Final = {"use_sliding_window": False}
"""Configs of Qwen have the size of a window that is off unless they say otherwise."""

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "qwen2": Architecture(qkv_bias=True, defaults=QWEN_DEFAULTS),
    "qwen3": Architecture(has_head_norms=True, defaults=QWEN_DEFAULTS),
    "qwen3_moe": Architecture(has_head_norms=True, has_experts=True, defaults=QWEN_DEFAULTS),
    "gemma3_text": GEMMA3,
}
"""By `model_type` of config.json."""

ACTIVATIONS: Final = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of activations in config.json -> those of the layers."""
