"""Sizes of a Llama decoder from the config.json of a checkpoint. Used by `plugin.py` in every process: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mstar_core.graph import KVSpec

if TYPE_CHECKING:
    from mstar_core.plugin.json_fields import JsonFields


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes:
    """Sizes of a decoder. inner: of the gated MLP. ties: the head shares the embedding's weight. ends: ids of the end.

    Source: the config keys of `LlamaForCausalLM` in transformers.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    max_positions: int
    rope_base: float = 1e4
    norm_eps: float = 1e-5
    ties: bool = False
    ends: tuple[int, ...] = ()

    @classmethod
    def read(cls, fields: JsonFields) -> LlamaSizes:
        """Read the sizes. Raises WeightsError with file and key for an absent or unsupported value."""
        for key, supported in (("rope_scaling", None), ("attention_bias", False), ("hidden_act", "silu")):
            if fields.get(key, supported) != supported:
                raise fields.error(key, f"only {supported!r} is supported", "use another checkpoint")
        heads, width = fields.number("num_attention_heads"), fields.number("hidden_size")
        ends = fields.get("eos_token_id", [])
        return cls(
            vocab=fields.number("vocab_size"),
            width=width,
            layers=fields.number("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.number("num_key_value_heads", heads),
            head_dim=fields.number("head_dim", width // heads),
            inner=fields.number("intermediate_size"),
            max_positions=fields.number("max_position_embeddings"),
            rope_base=fields.real("rope_theta", 1e4),
            norm_eps=fields.real("rms_norm_eps"),
            ties=bool(fields.get("tie_word_embeddings", False)),
            ends=tuple(ends) if isinstance(ends, list) else (int(ends),),
        )

    def cache(self) -> KVSpec:
        """Return the shape of the decoder's cache."""
        return KVSpec(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim)
