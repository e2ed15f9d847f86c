"""Sizes of a checkpoint, read from config.json and generation_config.json.

Used by `plugin.py` in every process, so this module imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import did_you_mean
from mstar_core.plugin.json_fields import JsonFields
from mstar_llm.checkpoint.architectures import ACTIVATIONS, ARCHITECTURES, Architecture

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
TEXT: Final = "text_config"
"""Object of config.json with the text model, if the checkpoint has models for images beside it."""

MODULES: Final = "modules.json"
"""Pooling of embedding models, in the layout of Sentence Transformers. Only embedding models have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder.

    mlp: inner width of the gated MLP, or of one expert. experts: 0 without a mixture. normalizes_experts: the weights
    of a token's experts add up to 1. bias: of queries, keys and values. score_size: attention scores are divided by its
    root. windows: by layer, the tokens that a token sees, itself included; 0 for all; empty if every layer sees all.
    rope: rotary parameters of layers that see all; local_rope: of layers with a window. ties: the head shares the
    weight of the embedding. stop_ids: each of them ends an answer. is_embedding: the model turns a text into a vector.
    """

    architecture: Architecture
    vocab: int
    width: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    score_size: float
    bias: bool = False
    ties: bool = False
    experts: int = 0
    experts_per_token: int = 0
    normalizes_experts: bool = True
    windows: tuple[int, ...] = ()
    rope: Mapping[str, Any] = field(default_factory=dict)
    local_rope: Mapping[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    is_embedding: bool = False


def read_config(folder: Path) -> DecoderConfig:
    """Read the sizes of a checkpoint. Raises WeightsError with file and key."""
    whole = JsonFields.read(folder / CONFIG)
    fields = whole.part(TEXT) if whole.get(TEXT) else whole
    architecture = _architecture(fields)
    fields = fields.completed(architecture.defaults)
    heads, width = fields.number("num_attention_heads"), fields.number("hidden_size")
    head_dim = fields.number("head_dim", width // heads)
    # The name has changed between versions of transformers.
    experts = fields.number("num_experts", fields.get("num_local_experts")) if architecture.has_experts else 0
    rope, local_rope = _ropes(fields)
    return DecoderConfig(
        architecture=architecture,
        vocab=fields.number("vocab_size"),
        width=width,
        mlp=fields.number("moe_intermediate_size" if experts else "intermediate_size"),
        layers=fields.number("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.number("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=fields.real("rms_norm_eps"),
        max_positions=fields.number("max_position_embeddings"),
        score_size=fields.real("query_pre_attn_scalar", head_dim),
        bias=bool(fields.get("attention_bias", architecture.qkv_bias)),
        ties=bool(fields.get("tie_word_embeddings", architecture.scales_embeddings)),
        experts=experts,
        experts_per_token=fields.number("num_experts_per_tok") if experts else 0,
        normalizes_experts=bool(fields.get("norm_topk_prob", False)),
        windows=_windows(fields),
        rope=rope,
        local_rope=local_rope,
        stop_ids=_stop_ids(folder, whole),
        is_embedding=(folder / MODULES).is_file(),
    )


def _architecture(fields: JsonFields) -> Architecture:
    kind = fields.get("model_type", "")
    if kind not in ARCHITECTURES:
        known = f"supported: {', '.join(ARCHITECTURES)}"
        raise fields.error("model_type", known, did_you_mean(str(kind), ARCHITECTURES))
    architecture = ARCHITECTURES[kind]
    activation = fields.get("hidden_activation", fields.get("hidden_act", architecture.activation))
    # Each of these changes the result. A checkpoint that needs one is refused, not computed wrongly.
    for key, value, supported in (
        ("hidden_act", ACTIVATIONS.get(activation, activation), architecture.activation),
        ("mlp_bias", bool(fields.get("mlp_bias", False)), False),
        ("mlp_only_layers", bool(fields.get("mlp_only_layers", False)), False),
        ("decoder_sparse_step", fields.get("decoder_sparse_step", 1), 1),
        ("use_bidirectional_attention", bool(fields.get("use_bidirectional_attention", False)), False),
        ("attn_logit_softcapping", bool(fields.get("attn_logit_softcapping", False)), False),
        ("final_logit_softcapping", bool(fields.get("final_logit_softcapping", False)), False),
        ("quantization_config", bool(fields.get("quantization_config", False)), False),
    ):
        if value != supported:
            raise fields.error(key, f"of {kind}, only {supported!r} is supported", "use another checkpoint")
    return architecture


def _windows(fields: JsonFields) -> tuple[int, ...]:
    """Return the window of each layer. Configs say it by layer, by a period, or once for all layers."""
    if not (fields.get("sliding_window") and fields.get("use_sliding_window", True)):
        return ()
    layers, kinds = fields.number("num_hidden_layers"), fields.get("layer_types")
    if kinds is None:
        # The first layers see all tokens, and with a period every period-th one. Some configs write an underscore.
        first = fields.get("max_window_layers", 0)
        period = fields.get("_sliding_window_pattern", fields.get("sliding_window_pattern", 0))
        kinds = [
            "full_attention" if layer < first or (period and (layer + 1) % period == 0) else "sliding"
            for layer in range(layers)
        ]
    if len(kinds) != layers:
        raise fields.error("layer_types", f"{layers} layers need as many types")
    windows = tuple(0 if kind == "full_attention" else fields.number("sliding_window") for kind in kinds)
    return windows if any(windows) else ()


def _ropes(fields: JsonFields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary parameters of layers that see all tokens, and of those with a window."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if "full_attention" in rope:
        return dict(rope["full_attention"]), dict(rope["sliding_attention"])
    whole = {"rope_theta": fields.real("rope_theta", 10000.0), **rope}
    local = fields.get("rope_local_base_freq")
    return whole, {"rope_theta": local} if local else whole


def _stop_ids(folder: Path, fields: JsonFields) -> tuple[int, ...]:
    """Return the ids that end an answer: of generation_config.json, which may add some to those of config.json."""
    stop = fields.get("eos_token_id", [])
    stop = JsonFields.read_if_any(folder / GENERATION).get("eos_token_id", stop)
    ids = stop if isinstance(stop, list) else [stop]
    if not all(isinstance(each, int) for each in ids):
        raise fields.error("eos_token_id", "an id or a list of ids is required")
    return tuple(ids)
