"""Texts of a small checkpoint in the official layout: configs and a byte-level tokenizer with Whisper's control tokens.

Used by the generated checkpoint, by the training of the miniature, and by tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mstar_core.families.byte_tokenizer import byte_tokenizer
from mstar_core.families.tokenizer import FILE
from mstar_whisper.checkpoint.config import CONFIG, GENERATION, HOP, RATE, STRIDE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END: Final = "<|endoftext|>"
START: Final = "<|startoftranscript|>"
LANGUAGES: Final = ("<|en|>", "<|de|>", "<|fr|>")
TASKS: Final = {"translate": "<|translate|>", "transcribe": "<|transcribe|>"}
REST: Final = ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a small checkpoint. states: of a window, 50 a second. decoder_heads: 0 for those of the encoder."""

    width: int
    heads: int
    mlp: int
    encoder_layers: int
    decoder_layers: int
    states: int
    positions: int
    bins: int = 80
    decoder_heads: int = 0


def vocabulary(states: int, words: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level tokenizer. words: tokens beside single bytes, each with its space in front."""
    merges: dict[str, str] = {}
    for word in words:
        spelled = word if word.startswith("Ġ") else "Ġ" + word
        for cut in range(2, len(spelled) + 1):
            merges.setdefault(spelled[:cut], f"{spelled[: cut - 1]} {spelled[cut - 1]}")
    times = [f"<|{number * STRIDE * HOP / RATE:.2f}|>" for number in range(states + 1)]
    return byte_tokenizer((END, START, *LANGUAGES, *TASKS.values(), *REST), merges=[*merges.values()], markers=times)


def write_texts(folder: Path, tokenizer: Tokenizer, sizes: Sizes, dtype: str = "float32") -> None:
    """Write configs and tokenizer into a folder, in the layout of the hub."""
    config = _config(tokenizer, sizes, dtype)
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "chunk_length": sizes.states * STRIDE * HOP // RATE,
        "feature_size": sizes.bins,
        "hop_length": HOP,
        "n_fft": 400,
        "sampling_rate": RATE,
    }
    files: Mapping[str, Any] = {
        CONFIG: config,
        GENERATION: _generation(tokenizer, sizes),
        "preprocessor_config.json": features,
    }
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / FILE), pretty=False)


def _config(tokenizer: Tokenizer, sizes: Sizes, dtype: str) -> dict[str, Any]:
    end = tokenizer.token_to_id(END)
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": dtype,
        "vocab_size": tokenizer.get_vocab_size(),
        "d_model": sizes.width,
        "num_mel_bins": sizes.bins,
        "encoder_layers": sizes.encoder_layers,
        "encoder_attention_heads": sizes.heads,
        "encoder_ffn_dim": sizes.mlp,
        "decoder_layers": sizes.decoder_layers,
        "decoder_attention_heads": sizes.decoder_heads or sizes.heads,
        "decoder_ffn_dim": sizes.mlp,
        "max_source_positions": sizes.states,
        "max_target_positions": sizes.positions,
        "decoder_start_token_id": tokenizer.token_to_id(START),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "median_filter_width": 7,
    }


def _generation(tokenizer: Tokenizer, sizes: Sizes) -> dict[str, Any]:
    find, end = tokenizer.token_to_id, tokenizer.token_to_id(END)
    # The last control tokens of the list are, in official checkpoints too, those of earlier text and of silence.
    never = [find(token) for token in (START, *TASKS.values(), *REST[:-1])]
    half = sizes.decoder_layers // 2
    return {
        "alignment_heads": [[layer, head] for layer in range(half, sizes.decoder_layers) for head in range(2)],
        "begin_suppress_tokens": [find("Ġ"), end],
        "bos_token_id": end,
        "decoder_start_token_id": find(START),
        "eos_token_id": end,
        "is_multilingual": True,
        "lang_to_id": {token: find(token) for token in LANGUAGES},
        "max_initial_timestamp_index": 50,
        "max_length": sizes.positions,
        "no_timestamps_token_id": find(REST[-1]),
        "pad_token_id": end,
        "prev_sot_token_id": find("<|startofprev|>"),
        "return_timestamps": False,
        "suppress_tokens": never,
        "task_to_id": {name: find(token) for name, token in TASKS.items()},
    }
