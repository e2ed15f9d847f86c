"""Torch modules that model plugins share."""

from __future__ import annotations

from mstar_core.layers.code_predictor import CodePredictor, CodePredictorSpec
from mstar_core.layers.layer_norm_blocks import BlockSpec, CausalBlock, CrossBlock, EncoderBlock, HeadProjections
from mstar_core.layers.linear import QuantizableLayer
from mstar_core.layers.moe import MoESpec, SparseMoE
from mstar_core.layers.rotary import Llama3Scaling, Rotary, RotarySpec, frequencies, rotate
from mstar_core.layers.transformer import (
    Attention,
    AttentionSpec,
    DecoderBlock,
    GatedMLP,
    Head,
    RMSNorm,
    TokenEmbedding,
)
from mstar_core.weights.checkpoint import Checkpoint, NameMap, load_weights

__all__ = [
    "Attention",
    "AttentionSpec",
    "BlockSpec",
    "CausalBlock",
    "Checkpoint",
    "CodePredictor",
    "CodePredictorSpec",
    "CrossBlock",
    "DecoderBlock",
    "EncoderBlock",
    "GatedMLP",
    "Head",
    "HeadProjections",
    "Llama3Scaling",
    "MoESpec",
    "NameMap",
    "QuantizableLayer",
    "RMSNorm",
    "Rotary",
    "RotarySpec",
    "SparseMoE",
    "TokenEmbedding",
    "frequencies",
    "load_weights",
    "rotate",
]
