"""Sizes, ids and names from the files of a checkpoint folder. Used by every process; standard library only.

Defaults are those of Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice (specification section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import WeightsError
from mstar_core.plugin.json_fields import JsonFields

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
CODEC_FOLDER: Final = "speech_tokenizer"
TOKENIZER: Final = "qwen3_tts_tokenizer_12hz"
CUSTOM, DESIGN, BASE = "custom_voice", "voice_design", "base"
SMALL: Final = "0b6"
"""Size whose CustomVoice checkpoint ignores instructions."""

LANGUAGES: Final = (
    "chinese",
    "english",
    "german",
    "italian",
    "portuguese",
    "spanish",
    "japanese",
    "korean",
    "french",
    "russian",
)
DIALECT: Final = "_dialect"
"""End of the names of ids that a voice chooses, not a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes of a causal decoder with norms on queries and keys (sections 7 and 8)."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_base: float = 1e6
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSizes:
    """Sizes of the codec decoder (section 11).

    vector: values of a codebook entry. window: frames that a frame sees, its own included.
    """

    groups: int = 16
    codebook: int = 2048
    vector: int = 256
    inner: int = 512
    latent: int = 1024
    width: int = 512
    layers: int = 8
    heads: int = 16
    head_dim: int = 64
    mlp: int = 1024
    window: int = 72
    rope_base: float = 1e4
    norm_eps: float = 1e-5
    decoder: int = 1536
    rates: tuple[int, ...] = (8, 5, 4, 3)
    ratios: tuple[int, ...] = (2, 2)
    sample_rate: int = 24000

    @property
    def frame_samples(self) -> int:
        """Samples of one frame: 1920 at 24 kHz."""
        return math.prod(self.rates) * math.prod(self.ratios)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecEncoderSizes:
    """Sizes of the codec encoder (section 14). levels: of the quantizer in the file; groups of them are used."""

    groups: int = 16
    levels: int = 32
    codebook: int = 2048
    vector: int = 256
    filters: int = 64
    ratios: tuple[int, ...] = (8, 6, 5, 4)
    kernel: int = 7
    residual_kernel: int = 3
    last_kernel: int = 3
    compress: int = 2
    width: int = 512
    layers: int = 8
    heads: int = 8
    head_dim: int = 64
    mlp: int = 2048
    rope_base: float = 1e4
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakerSizes:
    """Sizes of the speaker encoder (section 14). The official file has only `output`."""

    mel: int = 128
    channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    kernels: tuple[int, ...] = (5, 3, 3, 3, 1)
    dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    attention: int = 128
    scale: int = 8
    squeeze: int = 128
    output: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TextIds:
    """Special ids of the text vocabulary. `newline` is that of a line break."""

    im_start: int = 151644
    im_end: int = 151645
    assistant: int = 77091
    tts_pad: int = 151671
    tts_bos: int = 151672
    tts_eos: int = 151673


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecIds:
    """Special ids of the talker's vocabulary."""

    pad: int = 2148
    bos: int = 2149
    eos: int = 2150
    think: int = 2154
    nothink: int = 2155
    think_bos: int = 2156
    think_eos: int = 2157


@dataclass(frozen=True, slots=True, kw_only=True)
class TTSConfig:
    """Sizes, ids and names of one checkpoint.

    kind: custom_voice, voice_design or base. voices: lower-case name -> codec id. dialects: voice -> language name.
    languages: lower-case name -> codec id, dialects included. sampling: values of generation_config.json. is_mini: a
    trained miniature.
    """

    kind: str = CUSTOM
    size: str = "1b7"
    talker: DecoderSizes = DecoderSizes(vocab=3072, width=2048, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=6144)
    predictor: DecoderSizes = DecoderSizes(
        vocab=2048, width=1024, layers=5, heads=16, kv_heads=8, head_dim=128, mlp=3072
    )
    codec: CodecSizes = CodecSizes()
    encoder: CodecEncoderSizes = CodecEncoderSizes()
    speaker: SpeakerSizes | None = None
    groups: int = 16
    text_vocab: int = 151936
    text_width: int = 2048
    ids: TextIds = TextIds()
    codes: CodecIds = CodecIds()
    voices: Mapping[str, int] = field(
        default_factory=lambda: {
            "serena": 3066,
            "vivian": 3065,
            "uncle_fu": 3010,
            "ryan": 3061,
            "aiden": 2861,
            "ono_anna": 2873,
            "sohee": 2864,
            "eric": 2875,
            "dylan": 2878,
        }
    )
    dialects: Mapping[str, str] = field(default_factory=lambda: {"eric": "sichuan_dialect", "dylan": "beijing_dialect"})
    languages: Mapping[str, int] = field(
        default_factory=lambda: (
            dict(zip(LANGUAGES, (2055, 2050, 2053, 2070, 2071, 2054, 2058, 2064, 2061, 2069), strict=True))
            | {"beijing_dialect": 2074, "sichuan_dialect": 2062}
        )
    )
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_positions: int = 32768
    is_mini: bool = False

    @property
    def takes_instructions(self) -> bool:
        """Whether a text that describes the voice or the manner has an effect."""
        return self.kind == DESIGN or (self.kind == CUSTOM and self.size != SMALL)

    @property
    def language_names(self) -> tuple[str, ...]:
        """Languages that a request may name, beside `auto`."""
        return tuple(name for name in self.languages if not name.endswith(DIALECT))


def read_config(folder: Path) -> TTSConfig:
    """Read the sizes and ids of the checkpoint in `folder`. Raises WeightsError with file and key."""
    top, codec = JsonFields.read(folder / CONFIG).values, JsonFields.read(folder / CODEC_FOLDER / CONFIG).values
    generation = folder / GENERATION
    path = folder / CONFIG
    try:
        if top.get("tokenizer_type", TOKENIZER) != TOKENIZER:
            raise WeightsError(
                f"{path} asks for the tokenizer {top['tokenizer_type']}",
                f"only {TOKENIZER} is supported; the 25 Hz variant has no published weights",
                "use a Qwen3-TTS-12Hz checkpoint",
                file=str(path),
                key="tokenizer_type",
            )
        sampling = JsonFields.read_if_any(generation).values
        return _config(top, codec, sampling, is_mini=(folder / "train.json").is_file())
    except KeyError as error:
        raise WeightsError(f"{path} lacks {error.args[0]}", hint="download this file again", file=str(path)) from error
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read", str(error), "download this file again", file=str(path)) from error


def _config(
    top: Mapping[str, Any], codec: Mapping[str, Any], sampling: Mapping[str, Any], *, is_mini: bool
) -> TTSConfig:
    talker = top["talker_config"]
    kind, encoder = str(top["tts_model_type"]), top.get("speaker_encoder_config")
    decoder = codec["decoder_config"]
    dialects = talker.get("spk_is_dialect") or {}
    return TTSConfig(
        kind=kind,
        size=str(top.get("tts_model_size", "")),
        talker=_decoder(talker),
        predictor=_decoder(talker["code_predictor_config"]),
        codec=_codec(decoder, int(codec.get("output_sample_rate", 24000))),
        encoder=_codec_encoder(codec["encoder_config"], int(codec["encoder_valid_num_quantizers"])),
        speaker=_speaker(encoder) if kind == BASE and encoder is not None else None,
        groups=int(talker["num_code_groups"]),
        text_vocab=int(talker["text_vocab_size"]),
        text_width=int(talker["text_hidden_size"]),
        ids=TextIds(
            im_start=int(top["im_start_token_id"]),
            im_end=int(top["im_end_token_id"]),
            assistant=int(top["assistant_token_id"]),
            tts_pad=int(top["tts_pad_token_id"]),
            tts_bos=int(top["tts_bos_token_id"]),
            tts_eos=int(top["tts_eos_token_id"]),
        ),
        codes=CodecIds(
            pad=int(talker["codec_pad_id"]),
            bos=int(talker["codec_bos_id"]),
            eos=int(talker["codec_eos_token_id"]),
            think=int(talker["codec_think_id"]),
            nothink=int(talker["codec_nothink_id"]),
            think_bos=int(talker["codec_think_bos_id"]),
            think_eos=int(talker["codec_think_eos_id"]),
        ),
        voices={str(name).lower(): int(number) for name, number in (talker.get("spk_id") or {}).items()},
        dialects={str(name).lower(): str(dialect) for name, dialect in dialects.items() if dialect},
        languages={str(name).lower(): int(number) for name, number in talker["codec_language_id"].items()},
        sampling=sampling,
        max_positions=int(talker["max_position_embeddings"]),
        is_mini=is_mini,
    )


def _decoder(config: Mapping[str, Any]) -> DecoderSizes:
    return DecoderSizes(
        vocab=int(config["vocab_size"]),
        width=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config["head_dim"]),
        mlp=int(config["intermediate_size"]),
        rope_base=float(config["rope_theta"]),
        norm_eps=float(config["rms_norm_eps"]),
    )


def _codec(config: Mapping[str, Any], rate: int) -> CodecSizes:
    return CodecSizes(
        groups=int(config["num_quantizers"]),
        codebook=int(config["codebook_size"]),
        vector=int(config["codebook_dim"]) // 2,
        inner=int(config["codebook_dim"]),
        latent=int(config["latent_dim"]),
        width=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        head_dim=int(config["head_dim"]),
        mlp=int(config["intermediate_size"]),
        window=int(config["sliding_window"]),
        rope_base=float(config["rope_theta"]),
        norm_eps=float(config["rms_norm_eps"]),
        decoder=int(config["decoder_dim"]),
        rates=tuple(map(int, config["upsample_rates"])),
        ratios=tuple(map(int, config["upsampling_ratios"])),
        sample_rate=rate,
    )


def _codec_encoder(config: Mapping[str, Any], groups: int) -> CodecEncoderSizes:
    return CodecEncoderSizes(
        groups=groups,
        levels=int(config["num_quantizers"]),
        codebook=int(config["codebook_size"]),
        vector=int(config["codebook_dim"]),
        filters=int(config["num_filters"]),
        ratios=tuple(map(int, config["upsampling_ratios"])),
        kernel=int(config["kernel_size"]),
        residual_kernel=int(config["residual_kernel_size"]),
        last_kernel=int(config["last_kernel_size"]),
        compress=int(config["compress"]),
        width=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        head_dim=int(config["head_dim"]),
        mlp=int(config["intermediate_size"]),
        rope_base=float(config["rope_theta"]),
        norm_eps=float(config["norm_eps"]),
    )


def _speaker(config: Mapping[str, Any]) -> SpeakerSizes:
    usual = SpeakerSizes()
    return SpeakerSizes(
        mel=int(config.get("mel_dim", usual.mel)),
        channels=tuple(map(int, config.get("enc_channels", usual.channels))),
        kernels=tuple(map(int, config.get("enc_kernel_sizes", usual.kernels))),
        dilations=tuple(map(int, config.get("enc_dilations", usual.dilations))),
        attention=int(config.get("enc_attention_channels", usual.attention)),
        scale=int(config.get("enc_res2net_scale", usual.scale)),
        squeeze=int(config.get("enc_se_channels", usual.squeeze)),
        output=int(config["enc_dim"]),
    )
