"""Sizes and ids from the config.json of a checkpoint folder. Used by every process; standard library only.

Defaults are those of Qwen/Qwen3-Omni-30B-A3B-Instruct (specification sections 2 and 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mstar_core.errors import WeightsError
from mstar_core.plugin.json_fields import JsonFields

CONFIG: Final = "config.json"

PATCH_FRAMES: Final = 2
"""Frames of one vision patch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of a causal decoder with norms on queries and keys (sections 3 and 4).

    mrope: entries of (time, height, width) among the head_dim / 2 frequencies; empty for plain positions.
    experts 0: a dense MLP of width `mlp`. shared_mlp: width of the expert that every token uses, 0 without one.
    """

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    experts: int = 0
    experts_per_token: int = 0
    shared_mlp: int = 0
    mrope: tuple[int, ...] = ()
    rope_base: float = 1e6
    norm_eps: float = 1e-6
    normalizes_experts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSizes:
    """Sizes of the audio encoder (section 5). window: mel frames of one attention window; chunk: of one convolution."""

    mel_bins: int = 128
    width: int = 1280
    layers: int = 32
    heads: int = 20
    mlp: int = 5120
    chunk: int = 100
    window: int = 800
    channels: int = 480
    output: int = 2048
    max_positions: int = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """Sizes of the vision encoder (section 6). deepstack: 0-based blocks after which a feature map is taken.

    positions: entries of the learned position table, a square number.
    """

    width: int = 1152
    layers: int = 27
    heads: int = 16
    mlp: int = 4304
    patch: int = 16
    merge: int = 2
    positions: int = 2304
    output: int = 2048
    deepstack: tuple[int, ...] = (8, 16, 24)

    @property
    def patch_values(self) -> int:
        """Values of one patch: channels, frames, rows and columns."""
        return 3 * PATCH_FRAMES * self.patch * self.patch


@dataclass(frozen=True, slots=True, kw_only=True)
class VocoderSizes:
    """Sizes of Code2Wav (section 13)."""

    codebook: int = 2048
    groups: int = 16
    width: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 64
    mlp: int = 3072
    window: int = 72
    rope_base: float = 1e4
    norm_eps: float = 1e-5
    decoder: int = 1536
    rates: tuple[int, ...] = (8, 5, 4, 3)
    ratios: tuple[int, ...] = (2, 2)

    @property
    def frame_samples(self) -> int:
        """Samples of one frame: 1920 at 24 kHz."""
        return math.prod(self.rates) * math.prod(self.ratios)

    @property
    def lost_samples(self) -> int:
        """Samples that one call returns fewer than its frames hold: 555."""
        return sum(rate * math.prod(self.rates[index + 1 :]) for index, rate in enumerate(self.rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextIds:
    """Special ids of the thinker's vocabulary (section 3)."""

    im_start: int = 151644
    im_end: int = 151645
    system: int = 8948
    user: int = 872
    assistant: int = 77091
    vision_start: int = 151652
    vision_end: int = 151653
    image_pad: int = 151655
    video_pad: int = 151656
    audio_start: int = 151669
    audio_end: int = 151670
    audio_pad: int = 151675
    tts_pad: int = 151671
    tts_bos: int = 151672
    tts_eos: int = 151673

    @property
    def control(self) -> frozenset[int]:
        """Control tokens; the others are the words of roles."""
        roles = ("system", "user", "assistant")
        return frozenset(getattr(self, name) for name in self.__slots__ if name not in roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecIds:
    """Special ids of the talker's vocabulary (section 3)."""

    pad: int = 2148
    bos: int = 2149
    eos: int = 2150
    nothink: int = 2155
    think_bos: int = 2156
    think_eos: int = 2157


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniConfig:
    """Sizes and ids of one checkpoint.

    accept_layer: the talker reads the hidden states that enter this layer of the thinker. voices: name -> codec id.
    ticks: positions per second of media. has_speech: the checkpoint contains talker and vocoder.
    """

    thinker: DecoderSizes = DecoderSizes(
        vocab=152064,
        width=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        mlp=768,
        experts=128,
        experts_per_token=8,
        mrope=(24, 20, 20),
    )
    talker: DecoderSizes = DecoderSizes(
        vocab=3072,
        width=1024,
        layers=20,
        heads=16,
        kv_heads=2,
        head_dim=128,
        mlp=384,
        experts=128,
        experts_per_token=6,
        shared_mlp=768,
        mrope=(24, 20, 20),
    )
    predictor: DecoderSizes = DecoderSizes(
        vocab=2048, width=1024, layers=5, heads=16, kv_heads=8, head_dim=128, mlp=3072
    )
    audio: AudioSizes = AudioSizes()
    vision: VisionSizes = VisionSizes()
    vocoder: VocoderSizes = VocoderSizes()
    groups: int = 16
    projection: int = 2048
    accept_layer: int = 24
    ids: TextIds = TextIds()
    codec: CodecIds = CodecIds()
    voices: Mapping[str, int] = field(default_factory=lambda: {"chelsie": 2301, "ethan": 2302, "aiden": 2303})
    ticks: int = 13
    max_positions: int = 65536
    has_speech: bool = True


def read_config(folder: Path) -> OmniConfig:
    """Read the sizes and ids of the checkpoint in `folder`. Raises WeightsError with file and key."""
    path = folder / CONFIG
    try:
        return _config(JsonFields.read(path))
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "download this file again", file=str(path)) from error


def _config(config: JsonFields) -> OmniConfig:
    thinker = config.part("thinker_config")
    text = thinker.part("text_config")
    has_speech = bool(config.get("enable_audio_output", True)) and "talker_config" in config
    base = OmniConfig(
        thinker=_decoder(text, "num_experts"),
        audio=_audio(thinker.part("audio_config")),
        vision=_vision(thinker.part("vision_config")),
        ids=_text_ids(config, thinker),
        ticks=int(thinker.get("position_id_per_seconds", 13)),
        max_positions=int(text["max_position_embeddings"]),
        has_speech=has_speech,
    )
    if not has_speech:
        return base
    talker = config.part("talker_config")
    speech = talker.part("text_config")
    return OmniConfig(
        thinker=base.thinker,
        audio=base.audio,
        vision=base.vision,
        ids=base.ids,
        ticks=base.ticks,
        max_positions=base.max_positions,
        talker=_decoder(speech, "num_local_experts" if "num_local_experts" in speech else "num_experts"),
        predictor=_decoder(talker.part("code_predictor_config"), None),
        vocoder=_vocoder(config.part("code2wav_config")),
        groups=int(talker["num_code_groups"]),
        projection=int(speech["intermediate_size"]),
        accept_layer=int(talker["accept_hidden_layer"]),
        codec=CodecIds(
            pad=int(talker["codec_pad_id"]),
            bos=int(talker["codec_bos_id"]),
            eos=int(talker["codec_eos_token_id"]),
            nothink=int(talker["codec_nothink_id"]),
            think_bos=int(talker["codec_think_bos_id"]),
            think_eos=int(talker["codec_think_eos_id"]),
        ),
        voices={str(name).lower(): int(number) for name, number in talker["speaker_id"].items()},
    )


def _rope(config: JsonFields) -> JsonFields:
    """Return the rotary parameters, which older files hold in `rope_scaling` and beside it."""
    key = "rope_parameters" if config.get("rope_parameters", None) else "rope_scaling"
    return config.part(key) if config.get(key, None) else JsonFields(config.path, {})


def _decoder(config: JsonFields, experts: str | None) -> DecoderSizes:
    rope = _rope(config)
    shared = int(config.get("shared_expert_intermediate_size", 0) or 0) if experts is not None else 0
    return DecoderSizes(
        vocab=int(config["vocab_size"]),
        width=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config["head_dim"]),
        mlp=int(config["intermediate_size" if experts is None else "moe_intermediate_size"]),
        experts=int(config[experts]) if experts is not None else 0,
        experts_per_token=int(config["num_experts_per_tok"]) if experts is not None else 0,
        shared_mlp=shared,
        mrope=tuple(int(part) for part in rope.get("mrope_section", ())),
        rope_base=float(rope.get("rope_theta", config.get("rope_theta", 1e6))),
        norm_eps=float(config["rms_norm_eps"]),
        normalizes_experts=bool(config.get("norm_topk_prob", True)),
    )


def _audio(config: JsonFields) -> AudioSizes:
    return AudioSizes(
        mel_bins=int(config["num_mel_bins"]),
        width=int(config["d_model"]),
        layers=int(config["encoder_layers"]),
        heads=int(config["encoder_attention_heads"]),
        mlp=int(config["encoder_ffn_dim"]),
        chunk=2 * int(config["n_window"]),
        window=int(config["n_window_infer"]),
        channels=int(config["downsample_hidden_size"]),
        output=int(config["output_dim"]),
        max_positions=int(config["max_source_positions"]),
    )


def _vision(config: JsonFields) -> VisionSizes:
    return VisionSizes(
        width=int(config["hidden_size"]),
        layers=int(config["depth"]),
        heads=int(config["num_heads"]),
        mlp=int(config["intermediate_size"]),
        patch=int(config["patch_size"]),
        merge=int(config["spatial_merge_size"]),
        positions=int(config["num_position_embeddings"]),
        output=int(config["out_hidden_size"]),
        deepstack=tuple(int(block) for block in config["deepstack_visual_indexes"]),
    )


def _vocoder(config: JsonFields) -> VocoderSizes:
    width, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return VocoderSizes(
        codebook=int(config["codebook_size"]),
        groups=int(config["num_quantizers"]),
        width=width,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config.get("head_dim", None) or width // heads),
        mlp=int(config["intermediate_size"]),
        window=int(config["sliding_window"]),
        rope_base=float(_rope(config).get("rope_theta", config.get("rope_theta", 1e4))),
        norm_eps=float(config["rms_norm_eps"]),
        decoder=int(config["decoder_dim"]),
        rates=tuple(int(rate) for rate in config["upsample_rates"]),
        ratios=tuple(int(ratio) for ratio in config["upsampling_ratios"]),
    )


def _text_ids(config: JsonFields, thinker: JsonFields) -> TextIds:
    """Return the special ids. `vision_end` and `audio_end` follow their start markers where the config lacks them."""
    vision_start, audio_start = int(thinker["vision_start_token_id"]), int(thinker["audio_start_token_id"])
    return TextIds(
        im_start=int(config["im_start_token_id"]),
        im_end=int(config["im_end_token_id"]),
        system=int(config["system_token_id"]),
        user=int(config["user_token_id"]),
        assistant=int(config["assistant_token_id"]),
        vision_start=vision_start,
        vision_end=int(thinker.get("vision_end_token_id", vision_start + 1)),
        image_pad=int(thinker["image_token_id"]),
        video_pad=int(thinker["video_token_id"]),
        audio_start=audio_start,
        audio_end=int(thinker.get("audio_end_token_id", audio_start + 1)),
        audio_pad=int(thinker["audio_token_id"]),
        tts_pad=int(config["tts_pad_token_id"]),
        tts_bos=int(config["tts_bos_token_id"]),
        tts_eos=int(config["tts_eos_token_id"]),
    )
