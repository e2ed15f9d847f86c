"""Sizes, configs and tokenizer of `qwen3_omni:mini` in the official layout. Weights are written by `export`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from mstar_qwen3omni.checkpoint.config import CONFIG, OmniConfig, read_config
from mstar_qwen3omni.request.chat import SPOKEN_SYSTEM
from mstar_qwen3omni.request.tokenizer import MERGES, SETTINGS, SPLIT, VOCAB
from mstar_qwen3omni.sources.tiny_files import (
    SPECIAL_CODES,
    SPECIALS,
    byte_letters,
    generation,
    preprocessor,
    tokenizer_config,
    write_json,
)
from mstar_qwen3omni.world import sentences

ROLES: Final = ("user", "system", "assistant")
CODEBOOK: Final = 64
GROUPS: Final = 4
WIDTH: Final = 96
TALKER: Final = 48
LAYERS: Final = 4


def write_files(folder: Path) -> OmniConfig:
    """Write all files but the weights into a folder, and return the config as the plugin reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = learned_merges()
    vocab = {
        token: index for index, token in enumerate([*byte_letters(), *(merge.replace(" ", "") for merge in merges)])
    }
    ids = {name: len(vocab) + index for index, name in enumerate(SPECIALS)}
    write_json(folder / CONFIG, config(vocab | ids))
    write_json(folder / "generation_config.json", generation())
    write_json(folder / "preprocessor_config.json", preprocessor())
    write_json(folder / VOCAB, vocab)
    (folder / MERGES).write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    write_json(folder / SETTINGS, tokenizer_config(ids))
    return read_config(folder)


def learned_merges() -> list[str]:
    """Learn byte pairs until every word of the world, of the spoken system text and of the roles is one token."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, initial_alphabet=sorted(byte_letters()), show_progress=False
    )
    learner.train_from_iterator([*sentences(), *ROLES, SPOKEN_SYSTEM], trainer)
    learned: list[list[str]] = json.loads(learner.to_str())["model"]["merges"]
    seen: dict[str, None] = {}
    kept = []
    for left, right in learned:  # two ways to one token need one entry of the vocabulary
        if left + right not in seen:
            seen[left + right] = None
            kept.append(f"{left} {right}")
    return kept


def config(ids: dict[str, int]) -> dict[str, Any]:
    """Return config.json. ids: of all tokens."""
    media = {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "bfloat16",
        "enable_audio_output": True,
        "assistant_token_id": ids["assistant"],
        "user_token_id": ids["user"],
        "system_token_id": ids["system"],
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "thinker_config": {
            **media,
            "user_token_id": ids["user"],
            "audio_config": _audio(),
            "vision_config": _vision(),
            "text_config": _decoder(32, (6, 5, 5))
            | {
                "vocab_size": 8 * math.ceil(len(ids) / 8),
                "hidden_size": WIDTH,
                "intermediate_size": 64,
                "num_hidden_layers": LAYERS,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 48,
            },
        },
        "talker_config": _talker(media),
        "code2wav_config": {
            "codebook_size": CODEBOOK,
            "num_quantizers": GROUPS,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "sliding_window": 72,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 96,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "max_position_embeddings": 8000,
            "hidden_act": "silu",
            "layer_scale_initial_scale": 0.01,
        },
    }


def _decoder(head_dim: int, mrope: tuple[int, ...]) -> dict[str, Any]:
    return {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "norm_topk_prob": True,
        "rope_scaling": {"mrope_section": list(mrope), "interleaved": True, "rope_type": "default"},
        "rope_theta": 1e4,
    }


def _talker(media: dict[str, int]) -> dict[str, Any]:
    return {
        **media,
        "num_code_groups": GROUPS,
        "thinker_hidden_size": WIDTH,
        "accept_hidden_layer": 3,
        "spatial_merge_size": 2,
        "codec_pad_id": CODEBOOK + 100,
        "codec_bos_id": CODEBOOK + 101,
        "codec_eos_token_id": CODEBOOK + 102,
        "codec_nothink_id": CODEBOOK + 107,
        "codec_think_bos_id": CODEBOOK + 108,
        "codec_think_eos_id": CODEBOOK + 109,
        "speaker_id": {"chelsie": CODEBOOK + 253, "ethan": CODEBOOK + 254, "aiden": CODEBOOK + 255},
        "text_config": _decoder(16, (4, 2, 2))
        | {
            "vocab_size": CODEBOOK + SPECIAL_CODES,
            "hidden_size": TALKER,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        "code_predictor_config": {
            "vocab_size": CODEBOOK,
            "hidden_size": TALKER,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_code_groups": GROUPS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
        },
    }


def _audio() -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "d_model": 48,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 96,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 800,
        "conv_chunksize": 500,
        "downsample_hidden_size": 16,
        "output_dim": WIDTH,
        "activation_function": "gelu",
    }


def _vision() -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "hidden_act": "gelu_pytorch_tanh",
    }
