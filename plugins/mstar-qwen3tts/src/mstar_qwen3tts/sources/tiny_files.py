"""Files of the tiny checkpoints: config, tokenizer and random weights in the official layout."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from mstar_qwen3tts.checkpoint.config import BASE, CODEC_FOLDER, DIALECT, LANGUAGES, TOKENIZER, read_config
from mstar_qwen3tts.published import shapes

if TYPE_CHECKING:
    from torch import Generator, Tensor

SEED: Final = 2026
SPECIAL_CODES: Final = 1024
WORDS: Final = ("assistant", "user")
"""Words that are one token each, as in the official vocabulary."""

SPECIALS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
VOICES: Final = {"vivian": 1017, "ryan": 1013, "eric": 827, "dylan": 830}
"""Distance of each voice's id from the first special one."""


def write_files(folder: Path, kind: str) -> None:
    """Write a checkpoint of random weights into a folder that exists."""
    write_texts(folder, kind)
    config = read_config(folder)
    generator = torch.Generator().manual_seed(SEED)
    drawn = {name: _drawn(name, shape, generator) for name, shape in sorted(shapes(config).items())}
    save_weights(folder, drawn)


def save_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors into the two files of a checkpoint, by their names."""
    own = {name: value.contiguous() for name, value in weights.items() if not name.startswith(("decoder.", "encoder."))}
    codec = {name: value.contiguous() for name, value in weights.items() if name not in own}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(codec, folder / CODEC_FOLDER / "model.safetensors", metadata={"format": "pt"})


def write_texts(folder: Path, kind: str, changes: Mapping[str, Any] | None = None) -> None:
    """Write everything but the weights. changes: by the keys of `sizes`, what differs from the tiny checkpoint."""
    ids = write_tokenizer(folder)
    usual = sizes() | dict(changes or {})
    (folder / CODEC_FOLDER).mkdir(exist_ok=True)
    _write_json(folder / "config.json", _config(kind, ids, usual))
    _write_json(folder / CODEC_FOLDER / "config.json", _codec_config(usual))
    _write_json(folder / "generation_config.json", usual["sampling"])


def sizes() -> dict[str, Any]:
    """Return the sizes of the tiny checkpoints."""
    decoder = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    return {
        "codebook": 64,
        "groups": 4,
        "voices": VOICES,
        "talker": {"hidden_size": 48, "intermediate_size": 64, **decoder},
        "predictor": {"hidden_size": 32, "intermediate_size": 48, **decoder},
        "text_width": 32,
        "codec": {
            "codebook_dim": 16,
            "latent_dim": 24,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
            "sliding_window": 12,
            "decoder_dim": 32,
        },
        "sampling": {
            "do_sample": True,
            "repetition_penalty": 1.05,
            "temperature": 0.9,
            "top_p": 1.0,
            "top_k": 50,
            "subtalker_dosample": True,
            "subtalker_temperature": 0.9,
            "subtalker_top_p": 1.0,
            "subtalker_top_k": 50,
            "max_new_tokens": 8192,
        },
    }


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a byte-level tokenizer. Returns the ids of the special tokens and of WORDS."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in WORDS:
        for length in range(1, len(word)):
            merges.append(f"{word[:length]} {word[length]}")
            vocab[word[: length + 1]] = len(vocab)
    ids = {token: len(vocab) + index for index, token in enumerate(SPECIALS)}
    _write_json(folder / "vocab.json", vocab)
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    added = {str(number): {"content": token, "special": True} for token, number in ids.items()}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added})
    return ids | {word: vocab[word] for word in WORDS}


def _config(kind: str, ids: Mapping[str, int], usual: Mapping[str, Any]) -> dict[str, Any]:
    first, groups, is_base = usual["codebook"], usual["groups"], kind == BASE
    talker, predictor = dict(usual["talker"]), dict(usual["predictor"])
    if is_base:  # as the 0.6B checkpoints, whose predictor is as wide as their talker
        predictor["hidden_size"] = talker["hidden_size"]
    shared = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "num_code_groups": groups}
    names = (*LANGUAGES, f"beijing{DIALECT}", f"sichuan{DIALECT}")
    voices = {} if is_base else {name: first + number for name, number in usual["voices"].items()}
    dialects = {"eric": f"sichuan{DIALECT}", "dylan": f"beijing{DIALECT}"}
    talker |= shared | {
        "vocab_size": first + SPECIAL_CODES,
        "text_vocab_size": max(ids.values()) + 1,
        "text_hidden_size": usual["text_width"],
        "max_position_embeddings": 32768,
        "codec_pad_id": first + 100,
        "codec_bos_id": first + 101,
        "codec_eos_token_id": first + 102,
        "codec_think_id": first + 106,
        "codec_nothink_id": first + 107,
        "codec_think_bos_id": first + 108,
        "codec_think_eos_id": first + 109,
        "codec_language_id": {name: first + 2 + index for index, name in enumerate(names)},
        "spk_id": voices,
        "spk_is_dialect": {name: dialects.get(name, False) for name in voices},
        "code_predictor_config": predictor | shared | {"vocab_size": first},
    }
    speaker = {
        "enc_dim": talker["hidden_size"],
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 4,
        "enc_se_channels": 8,
        "sample_rate": 24000,
    }
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": TOKENIZER,
        "tts_model_type": kind,
        "tts_model_size": "0b6" if is_base else "1b7",
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "assistant_token_id": ids["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "talker_config": talker,
        **({"speaker_encoder_config": speaker} if is_base else {}),
    }


def _codec_config(usual: Mapping[str, Any]) -> dict[str, Any]:
    decoder = {
        "num_quantizers": usual["groups"],
        "codebook_size": usual["codebook"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        **usual["codec"],
    }
    encoder = {
        "num_quantizers": usual["groups"] + 1,
        "codebook_size": usual["codebook"],
        "codebook_dim": 8,
        "num_filters": 4,
        "upsampling_ratios": [8, 6, 5, 4],
        "kernel_size": 7,
        "residual_kernel_size": 3,
        "last_kernel_size": 3,
        "compress": 2,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "rope_theta": 10000.0,
        "norm_eps": 1e-5,
    }
    return {
        "model_type": TOKENIZER,
        "encoder_valid_num_quantizers": usual["groups"],
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decoder_config": decoder,
        "encoder_config": encoder,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _drawn(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw random weights under which every stage has an effect and activations keep their scale."""
    drawn: Tensor = torch.randn(shape, generator=generator)
    if name.endswith(("cluster_usage", "initialized")):
        return torch.ones(shape)
    if name.endswith((".alpha", ".beta")):
        return 0.2 * drawn
    if name.endswith((".scale", ".gamma")):
        return 0.3 + 0.1 * drawn
    if len(shape) == 1:
        return 1.0 + 0.1 * drawn if name.endswith("weight") else 0.05 * drawn
    if "embed" in name:
        return 0.7 * drawn
    factor = 1.5 if "head" in name else 0.5 if name.startswith("decoder.decoder.") else 1.0
    return drawn * (factor / math.sqrt(math.prod(shape[1:])))
