"""Sizes of the miniature, and its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstar_qwen3tts.checkpoint.config import CUSTOM, read_config
from mstar_qwen3tts.sources.tiny_files import write_texts

from .voices import SPEAKERS

if TYPE_CHECKING:
    from mstar_qwen3tts.checkpoint.config import TTSConfig

CODEBOOK: Final = 64
GROUPS: Final = 4
HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES: Final[dict[str, Any]] = {
    "codebook": CODEBOOK,
    "groups": GROUPS,
    "voices": {name: 1000 + index for index, name in enumerate(SPEAKERS)},
    "talker": {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, **HEADS},
    "predictor": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **HEADS},
    "text_width": 48,
    "codec": {
        "codebook_dim": 64,
        "latent_dim": 64,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 24,
        "sliding_window": 12,
        "decoder_dim": 80,
    },
    "sampling": {
        "do_sample": True,
        "repetition_penalty": 1.0,
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 50,
        "subtalker_dosample": True,
        "subtalker_temperature": 0.3,
        "subtalker_top_p": 0.9,
        "subtalker_top_k": 50,
        "max_new_tokens": 8192,
    },
}


def write_layout(folder: Path) -> TTSConfig:
    """Write config and tokenizer into a folder and return the sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder, CUSTOM, SIZES)
    return read_config(folder)
