"""Files of the tiny checkpoint: configs, byte-level tokenizer and weights, in the published layout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import save_file

from mstar_qwen3omni.checkpoint.config import CONFIG, OmniConfig, read_config
from mstar_qwen3omni.published import shapes

if TYPE_CHECKING:
    from torch import Generator, Tensor

SEED: Final = 30
MERGES: Final = (
    "Ġ t",
    "h e",
    "Ġt he",
    "i n",
    "e r",
    "o n",
    "r e",
    "Ġ a",
    "a n",
    "Ġ s",
    "o u",
    "Ġ w",
    "i s",
    "a t",
    "e n",
    "Ġ o",
    "in g",
    "Ġ b",
    "Ġ c",
    "n d",
    "o r",
    "e s",
    "Ġ f",
    "Ġ m",
    "i t",
    "a r",
    "Ġ d",
    "Ġ h",
    "Ġ p",
    "l l",
    "Ġt o",
    "s t",
    "l e",
    "Ġ in",
    "Ġa nd",
    "e d",
    "u s",
    "us er",
    "s y",
    "sy st",
    "syst e",
    "syste m",
    "a s",
    "as s",
    "ass is",
    "assis t",
    "an t",
    "assist ant",
)
"""Merges of the tokenizer, by rank. The three roles of a chat are one token each, as in the official tokenizer."""

SPECIALS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
CODEBOOK: Final = 64
GROUPS: Final = 4
SPECIAL_CODES: Final = 1024
WIDTH: Final = 64
HEAD_DIM: Final = 16
MROPE: Final = (4, 2, 2)

# Dimension 0 of the thinker and of the talker is the constant LEVEL, so that the heads can have a bias.
LEVEL: Final = 2.0
UNPRINTABLE: Final = -4.0
END_OF_TEXT: Final = 1.6
END_OF_SPEECH: Final = 1.2
LOUDNESS: Final = 1.0
"""Factor of the last convolution."""


def write_files(folder: Path) -> None:
    """Write configs, tokenizer and weights into an empty folder."""
    vocab = text_tokens()
    ids = {name: len(vocab) + index for index, name in enumerate(SPECIALS)}
    write_json(folder / CONFIG, _config(vocab | ids))
    write_json(folder / "generation_config.json", generation())
    write_json(folder / "preprocessor_config.json", preprocessor())
    write_json(folder / "vocab.json", vocab)
    merges = "\n".join(["#version: 0.2", *MERGES])
    (folder / "merges.txt").write_text(merges + "\n", encoding="utf-8")
    write_json(folder / "tokenizer_config.json", tokenizer_config(ids))
    config = read_config(folder)
    printable = [
        index for token, index in vocab.items() if all(letter == "Ġ" or " " <= letter <= "~" for letter in token)
    ]
    _write_weights(folder, _weights(config, printable))


def text_tokens() -> dict[str, int]:
    """Return the letters of all bytes, then one token per merge."""
    tokens = [*byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    return {token: index for index, token in enumerate(tokens)}


def byte_letters() -> list[str]:
    """Return the letter of each byte in a byte-level vocabulary. Source: GPT-2.

    Printable Latin-1 characters stand for themselves; the other bytes take the letters from 256 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


# -- configs -----------------------------------------------------------------------------------------------------------


def _config(ids: dict[str, int]) -> dict[str, object]:
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
    decoder = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "norm_topk_prob": True,
        "rope_scaling": {"mrope_section": list(MROPE), "interleaved": True, "rope_type": "default"},
        "rope_theta": 1e6,
    }
    vocab = 8 * math.ceil(len(ids) / 8)
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "float32",
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
            "audio_config": _audio_config(),
            "vision_config": _vision_config(),
            "text_config": decoder
            | {
                "vocab_size": vocab,
                "hidden_size": WIDTH,
                "intermediate_size": 64,
                "num_hidden_layers": 4,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
            },
        },
        "talker_config": _talker_config(decoder, media),
        "code2wav_config": {
            "codebook_size": CODEBOOK,
            "num_quantizers": GROUPS,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "sliding_window": 8,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "decoder_dim": 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e4,
            "max_position_embeddings": 8000,
            "hidden_act": "silu",
            "layer_scale_initial_scale": 0.01,
        },
    }


def _talker_config(decoder: dict[str, object], media: dict[str, int]) -> dict[str, object]:
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
        "text_config": decoder
        | {
            "vocab_size": CODEBOOK + SPECIAL_CODES,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
        },
        "code_predictor_config": {
            "vocab_size": CODEBOOK,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM,
            "num_code_groups": GROUPS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
        },
    }


def _audio_config() -> dict[str, object]:
    return {
        "num_mel_bins": 128,
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 200,
        "conv_chunksize": 500,
        "downsample_hidden_size": 8,
        "output_dim": WIDTH,
        "activation_function": "gelu",
    }


def _vision_config() -> dict[str, object]:
    return {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": WIDTH,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1, 2],
        "hidden_act": "gelu_pytorch_tanh",
    }


def generation() -> dict[str, object]:
    return {
        "talker_max_new_tokens": 4096,
        "talker_repetition_penalty": 1.05,
        "talker_temperature": 0.9,
        "talker_top_k": 50,
        "talker_top_p": 1.0,
    }


def preprocessor() -> dict[str, object]:
    return {
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": 16000,
        "n_samples": 4800000,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12845056,
    }


def tokenizer_config(ids: dict[str, int]) -> dict[str, object]:
    added = {
        str(number): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token, number in ids.items()
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "added_tokens_decoder": added,
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# -- weights -----------------------------------------------------------------------------------------------------------


def _weights(config: OmniConfig, printable: Iterable[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    drawn = {name: _drawn(name, shape, generator) for name, shape in sorted(shapes(config).items())}
    for name, value in drawn.items():
        if name.startswith(("thinker.model.layers", "talker.model.layers")) and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            value[0] = 0.0
    drawn["thinker.model.embed_tokens.weight"][:, 0] = LEVEL
    for name in ("text_projection", "hidden_projection"):
        drawn[f"talker.{name}.linear_fc2.weight"][0] = 0.0
        drawn[f"talker.{name}.linear_fc2.bias"][0] = LEVEL
    drawn["talker.model.codec_embedding.weight"][:, 0] = 0.0
    for group in range(config.groups - 1):
        drawn[f"talker.code_predictor.model.codec_embedding.{group}.weight"][:, 0] = 0.0
    drawn["thinker.model.norm.weight"][0] = drawn["talker.model.norm.weight"][0] = 1.0
    text, speech = drawn["thinker.lm_head.weight"], drawn["talker.codec_head.weight"]
    text[:, 0] = UNPRINTABLE
    text[list(printable), 0] = 0.0
    text[config.ids.im_end, 0] = END_OF_TEXT
    speech[:, 0] = 0.0
    speech[config.codec.eos, 0] = END_OF_SPEECH
    return drawn


def _drawn(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw random weights under which every stage has an effect and activations keep their scale."""
    drawn: Tensor = torch.randn(shape, generator=generator)
    if name.endswith((".alpha", ".beta")):
        return 0.2 * drawn
    if name.endswith((".scale", ".gamma")):
        return 0.3 + 0.1 * drawn
    if len(shape) == 1:
        return 1.0 + 0.1 * drawn if name.endswith("weight") else 0.05 * drawn
    if "embed" in name or "pos_embed" in name:
        return 0.7 * drawn
    factor = {"lm_head.weight": 1.5, "codec_head.weight": 1.5, "mlp.gate.weight": 2.0}
    scale = next((value for ending, value in factor.items() if name.endswith(ending)), 1.0)
    if name.startswith("code2wav.decoder."):
        scale = LOUDNESS if shape[0] == 1 else 0.5
    return drawn * (scale / math.sqrt(_fan_in(name, shape)))


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Return the values that each output sums. The first dimension of a transposed convolution is the inputs."""
    is_transposed = name.startswith("code2wav") and (".block.1." in name or name.endswith(".0.conv.weight"))
    if is_transposed and ".decoder.0." not in name:
        return 2 * shape[0] if ".block.1." in name else shape[0]
    return math.prod(shape[1:])


def _write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    names = sorted(weights)
    shards = [names[: len(names) // 2], names[len(names) // 2 :]]
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: weights[name].contiguous() for name in shard}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(value.numel() * value.element_size() for value in weights.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
