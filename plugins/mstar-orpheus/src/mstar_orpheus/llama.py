"""Llama decoder behind the node `LLM`: one forward for prefill, decode and captured steps. Run by the KV engine.

The modules are nested like the checkpoint's keys, so weight names need no mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torch import nn

from mstar_core.errors import MstarError, WeightsError
from mstar_core.layers import AttentionSpec, DecoderBlock, Head, RMSNorm, Rotary, RotarySpec, TokenEmbedding
from mstar_core.parallel.shards import WHOLE, Shard
from mstar_orpheus.checkpoint.config import number
from mstar_orpheus.checkpoint.layout import read_json

if TYPE_CHECKING:
    from torch import Tensor

    from mstar_core.layers.kv_view import KVView

HEAD_KEY: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and rotary parameters of the decoder. ties: the head shares the embedding's weight."""

    vocab: int
    mlp: int
    layers: int
    attention: AttentionSpec
    rotary: RotarySpec
    norm_eps: float
    ties: bool

    @classmethod
    def read(cls, path: Path) -> LlamaConfig:
        """Read a config.json. Raises WeightsError with file and key for an unsupported variant."""
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


class LlamaDecoder(nn.Module):
    """Token ids to normalized hidden states."""

    def __init__(self, config: LlamaConfig, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(config.vocab, config.attention.width, shard)
        blocks = (
            DecoderBlock(config.attention, config.mlp, layer, config.norm_eps, shard) for layer in range(config.layers)
        )
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.attention.width, config.norm_eps)
        self.rotary = Rotary(config.rotary)

    def forward(self, tokens: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        rotation = self.rotary(positions)
        x = self.embed_tokens(tokens)
        # Fusing each block's last addition with the next norm saves one kernel per block on a GPU.
        blocks = cast("list[DecoderBlock]", list(self.layers))
        norms = [*(block.input_layernorm for block in blocks), self.norm]
        normed: Tensor = norms[0](x)
        for block, next_norm in zip(blocks, norms[1:], strict=True):
            x, normed = block.forward_chained(x, normed, kv, rotation, next_norm)
        return normed


class Llama(nn.Module):
    """Token ids to logits.

    has_head: the head has its own weight (the checkpoint contains one and its config does not tie it); otherwise it
    shares the embedding's. shard: heads, inner widths and vocabulary are divided among the ranks of a group.
    """

    def __init__(self, config: LlamaConfig, *, has_head: bool, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.model = LlamaDecoder(config, shard)
        tied_to = None if has_head else self.model.embed_tokens
        self.lm_head = Head(config.attention.width, config.vocab, tied_to, shard)

    def forward(self, *, kv: KVView, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return {"hidden": [T, width]}, normalized. tokens, positions: int64 [T], all sequences of the step packed."""
        return {"hidden": self.model(tokens, positions, kv)}

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab] in the weights' dtype; fewer columns for a restricted head. hidden: [n, width]."""
        logits: Tensor = self.lm_head(hidden)
        return logits


def _refuse_variants(config: Mapping[str, Any], path: Path) -> None:
    required = {"model_type": "llama", "attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    for key, value in required.items():
        if config.get(key, value) != value:
            detail = f"supported: {value!r}"
            raise WeightsError(
                f"{path}: {key} is {config[key]!r}", detail, "use the Orpheus language model", file=str(path), key=key
            )


def _rotary(config: Mapping[str, Any], head_dim: int, path: Path) -> RotarySpec:
    newer = config.get("rope_parameters")
    holder = newer if isinstance(newer, Mapping) and "rope_theta" in newer else config
    _real(holder, "rope_theta", path)  # required, without a default
    try:
        return RotarySpec.from_config(config, head_dim)
    except (MstarError, KeyError, TypeError, ValueError) as error:
        hint = "use a checkpoint with llama3 scaling or none"
        raise WeightsError(f"{path}: unsupported rotary parameters", str(error), hint, file=str(path)) from error


def _real(config: Mapping[str, Any], key: str, path: Path) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise WeightsError(
            f"{path}: {key} is {value!r}, not a positive number", hint="fix the config", file=str(path), key=key
        )
    return float(value)
