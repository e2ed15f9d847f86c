"""A Qwen3-Omni checkpoint folder of the official sizes with random weights, which are made on the device.

Configs and ids are those of Qwen/Qwen3-Omni-30B-A3B-Instruct; the tokenizer is that of the miniature, with the special
tokens and the names of the roles at their official ids.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.families.words import with_words
from mstar_core.weights.random_fill import MARKER
from mstar_qwen3omni.checkpoint.config import CONFIG, OmniConfig
from mstar_qwen3omni.sources.tiny import write_tiny

TOKENIZER: Final = "tokenizer_config.json"
COPIED: Final = ("merges.txt", "generation_config.json", "preprocessor_config.json")
IDS: Final = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
    "<|audio_start|>": 151669,
    "<|audio_end|>": 151670,
    "<tts_pad>": 151671,
    "<tts_text_bos>": 151672,
    "<tts_text_eod>": 151673,
    "<tts_text_bos_single>": 151674,
    "<|audio_pad|>": 151675,
}
ROLES: Final = {"system": 8948, "user": 872, "assistant": 77091}


def write_random(folder: Path, seed: int) -> Path:
    """Write the folder and return it. seed: of the weights."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = write_tiny(Path(scratch) / "tiny")
        for name in COPIED:
            (folder / name).write_bytes((tiny / name).read_bytes())
        vocab = json.loads((tiny / "vocab.json").read_text(encoding="utf-8"))
        settings = json.loads((tiny / TOKENIZER).read_text(encoding="utf-8"))
        config = json.loads((tiny / CONFIG).read_text(encoding="utf-8"))
    added = settings["added_tokens_decoder"].values()
    settings["added_tokens_decoder"] = {str(IDS[token["content"]]): token for token in added}
    _write(folder / "vocab.json", with_words(vocab | ROLES | IDS, OmniConfig().thinker.vocab))
    _write(folder / TOKENIZER, settings)
    _write(folder / CONFIG, official(config, OmniConfig()))
    _write(folder / MARKER, {"seed": seed})
    return folder


def official(tiny: dict[str, Any], config: OmniConfig) -> dict[str, Any]:
    """Return the miniature's config with the official sizes and ids."""
    ids, codec, audio, vision, sound = config.ids, config.codec, config.audio, config.vision, config.vocoder
    media = {
        "audio_token_id": ids.audio_pad,
        "image_token_id": ids.image_pad,
        "video_token_id": ids.video_pad,
        "audio_start_token_id": ids.audio_start,
        "audio_end_token_id": ids.audio_end,
        "vision_start_token_id": ids.vision_start,
        "vision_end_token_id": ids.vision_end,
        "user_token_id": ids.user,
    }
    thinker, talker = tiny["thinker_config"], tiny["talker_config"]
    return {
        **tiny,
        "dtype": "bfloat16",
        "assistant_token_id": ids.assistant,
        "user_token_id": ids.user,
        "system_token_id": ids.system,
        "im_start_token_id": ids.im_start,
        "im_end_token_id": ids.im_end,
        "tts_pad_token_id": ids.tts_pad,
        "tts_bos_token_id": ids.tts_bos,
        "tts_eos_token_id": ids.tts_eos,
        "thinker_config": {
            **thinker,
            **media,
            "audio_config": thinker["audio_config"]
            | {
                "d_model": audio.width,
                "encoder_layers": audio.layers,
                "encoder_attention_heads": audio.heads,
                "encoder_ffn_dim": audio.mlp,
                "n_window_infer": audio.window,
                "downsample_hidden_size": audio.channels,
                "output_dim": audio.output,
            },
            "vision_config": thinker["vision_config"]
            | {
                "depth": vision.layers,
                "hidden_size": vision.width,
                "intermediate_size": vision.mlp,
                "num_heads": vision.heads,
                "out_hidden_size": vision.output,
                "num_position_embeddings": vision.positions,
                "deepstack_visual_indexes": list(vision.deepstack),
            },
            "text_config": thinker["text_config"] | _decoder(config.thinker, config.max_positions),
        },
        "talker_config": {
            **talker,
            **media,
            "num_code_groups": config.groups,
            "thinker_hidden_size": config.thinker.width,
            "accept_hidden_layer": config.accept_layer,
            "codec_pad_id": codec.pad,
            "codec_bos_id": codec.bos,
            "codec_eos_token_id": codec.eos,
            "codec_nothink_id": codec.nothink,
            "codec_think_bos_id": codec.think_bos,
            "codec_think_eos_id": codec.think_eos,
            "speaker_id": dict(config.voices),
            "text_config": talker["text_config"]
            | _decoder(config.talker, config.max_positions)
            | {
                "intermediate_size": config.projection,
                "shared_expert_intermediate_size": config.talker.shared_mlp,
            },
            "code_predictor_config": talker["code_predictor_config"]
            | _decoder(config.predictor, 32768)
            | {
                "intermediate_size": config.predictor.mlp,
                "num_code_groups": config.groups,
            },
        },
        "code2wav_config": tiny["code2wav_config"]
        | {
            "codebook_size": sound.codebook,
            "num_quantizers": sound.groups,
            "hidden_size": sound.width,
            "num_hidden_layers": sound.layers,
            "num_attention_heads": sound.heads,
            "num_key_value_heads": sound.kv_heads,
            "intermediate_size": sound.mlp,
            "sliding_window": sound.window,
            "upsample_rates": list(sound.rates),
            "upsampling_ratios": list(sound.ratios),
            "decoder_dim": sound.decoder,
        },
    }


def _decoder(sizes: Any, positions: int) -> dict[str, Any]:
    found = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": positions,
    }
    if sizes.experts:
        found |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.experts_per_token,
            "moe_intermediate_size": sizes.mlp,
            "rope_theta": sizes.rope_base,
            "rope_scaling": {"mrope_section": list(sizes.mrope), "interleaved": True, "rope_type": "default"},
        }
    return found


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
