"""Sizes and vocabulary of the miniature, and its files beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mstar_whisper.checkpoint.config import WhisperConfig, read_config
from mstar_whisper.sources.layout import Sizes, vocabulary, write_texts

from .world import words

SIZES: Final = Sizes(
    width=128, heads=4, decoder_heads=2, mlp=256, encoder_layers=2, decoder_layers=1, states=250, positions=64
)
"""Two heads of 64 in the decoder, for which a GPU has kernels of paged attention."""


def write_layout(folder: Path) -> WhisperConfig:
    """Write config and tokenizer, and return the config."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder, vocabulary(SIZES.states, words()), SIZES, "bfloat16")
    return read_config(folder)
