"""Torch modules that model plugins share."""

from __future__ import annotations

from mstar_core.layers.attention import Attention, AttentionSpec, DecoderBlock
from mstar_core.layers.embedding import Head, TokenEmbedding
from mstar_core.layers.mlp import GatedMLP
from mstar_core.layers.norm import RMSNorm
from mstar_core.layers.rotary import Llama3Scaling, Rotary, RotarySpec, frequencies, rotate
from mstar_core.weights.checkpoint import Checkpoint, NameMap, load_weights

__all__ = [
    "Attention",
    "AttentionSpec",
    "Checkpoint",
    "DecoderBlock",
    "GatedMLP",
    "Head",
    "Llama3Scaling",
    "NameMap",
    "RMSNorm",
    "Rotary",
    "RotarySpec",
    "TokenEmbedding",
    "frequencies",
    "load_weights",
    "rotate",
]
