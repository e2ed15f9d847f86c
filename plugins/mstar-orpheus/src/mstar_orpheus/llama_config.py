"""Sizes and rotary data of a Llama checkpoint's config.json. Read by the model when it builds the node `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mstar_core.errors import MstarError, WeightsError
from mstar_core.layers import AttentionSpec, RotarySpec
from mstar_orpheus.checkpoint import read_json
from mstar_orpheus.facts import number


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """What the decoder is built from. ties: the head shares the embedding matrix."""

    vocab: int
    mlp: int
    layers: int
    attention: AttentionSpec
    rotary: RotarySpec
    norm_eps: float
    ties: bool

    @classmethod
    def read(cls, path: Path) -> LlamaConfig:
        """Read a config.json. Raises WeightsError naming file and key for what this decoder does not compute."""
        config = read_json(path)
        _refuse_variants(config, path)
        heads, width = number(config, "num_attention_heads", path), number(config, "hidden_size", path)
        head_dim = number(config, "head_dim", path, default=width // heads)
        kv_heads = number(config, "num_key_value_heads", path, default=heads)
        return cls(
            vocab=number(config, "vocab_size", path),
            mlp=number(config, "intermediate_size", path),
            layers=number(config, "num_hidden_layers", path),
            attention=AttentionSpec(width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
            rotary=_rotary(config, head_dim, path),
            norm_eps=_real(config, "rms_norm_eps", path),
            ties=bool(config.get("tie_word_embeddings", False)),
        )


def _refuse_variants(config: Mapping[str, Any], path: Path) -> None:
    wanted = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    for key, value in wanted.items():
        if config.get(key, value) != value:
            detail = f"this decoder computes Llama, where it is {value!r}"
            raise WeightsError(
                f"{path}: {key} is {config[key]!r}", detail, "use the Orpheus language model", file=str(path), key=key
            )


def _rotary(config: Mapping[str, Any], head_dim: int, path: Path) -> RotarySpec:
    newer = config.get("rope_parameters")
    holder = newer if isinstance(newer, Mapping) and "rope_theta" in newer else config
    _real(holder, "rope_theta", path)  # no silent default base
    try:
        return RotarySpec.from_config(config, head_dim)
    except (MstarError, KeyError, TypeError, ValueError) as error:
        hint = "use a checkpoint with llama3 scaling or none"
        raise WeightsError(f"{path}: the rotary data cannot be used", str(error), hint, file=str(path)) from error


def _real(config: Mapping[str, Any], key: str, path: Path) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise WeightsError(
            f"{path}: {key} is {value!r}, not a positive number", hint="fetch this file again", file=str(path), key=key
        )
    return float(value)
