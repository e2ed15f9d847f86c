"""Request parameters of Qwen3-TTS. Used by api, programs and processor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.plugin import TextSampling, param, sampling_param
from mstar_qwen3tts.checkpoint.config import LANGUAGES, TTSConfig

CHUNK_FRAMES: Final = 8
MOST_FRAMES: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(TextSampling):
    """Parameters of a request. `subtalker_*` apply to the codes of the groups above the first."""

    voice: str = param(
        "",
        "speaker; empty: the checkpoint's first",
        choices=tuple(TTSConfig().voices),
        any_choice=True,
        openai="voice",
        aliases=("speaker",),
    )
    language: str = param("auto", "language of the text, or auto", choices=("auto", *LANGUAGES), any_choice=True)
    instructions: str = param(
        "", "manner of speaking, or the voice of a VoiceDesign checkpoint", openai="instructions", aliases=("instruct",)
    )
    ref_text: str = param("", "what the recording of a cloned voice says; empty: the speaker's timbre alone is taken")
    x_vector_only_mode: bool = param(False, "take the speaker's timbre alone, although ref_text is given")
    non_streaming_mode: bool | None = param(
        None, "put the whole text before the speech; default: true, false for cloned voices"
    )
    do_sample: bool = param(True, "false: the most likely codes, which tend to drone")
    temperature: float = sampling_param("temperature", 0.9, "of the first code of each frame; 0 is greedy")
    top_k: int = sampling_param("top_k", 50)
    top_p: float = sampling_param("top_p", 1.0)
    repetition_penalty: float = sampling_param("repetition_penalty", 1.05, "over the codes of this answer; 1 is off")
    subtalker_dosample: bool = param(True, "false: the most likely residual codes")
    subtalker_temperature: float = sampling_param("temperature", 0.9, "of the residual codes; 0 is greedy", openai="")
    subtalker_top_k: int = sampling_param("top_k", 50, "most likely residual codes to draw from; 0 is off")
    subtalker_top_p: float = sampling_param("top_p", 1.0, "nucleus mass of residual codes; 1 is off", openai="")
    max_output_tokens: int | None = param(
        None,
        "most codec frames; default: 75 and 8 for each token of text, as some texts have no end of speech",
        ge=1,
        le=MOST_FRAMES,
        openai="max_tokens",
        aliases=("max_new_tokens",),
    )
    ignore_eos: bool = param(False, "for load tests: speech goes on to its limit")
    seed: int | None = param(None, "same seed, same speech", ge=0, le=2**63 - 1, openai="seed")
    initial_codec_chunk_frames: int = param(
        1, "frames in the first piece of sound; each later one has twice as many, up to codec_chunk_frames", ge=1, le=64
    )
    codec_chunk_frames: int = param(CHUNK_FRAMES, "most frames in a piece of sound", ge=1, le=64)


NUMBERS: Final = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "repetition_penalty": float,
    "subtalker_temperature": float,
    "subtalker_top_k": int,
    "subtalker_top_p": float,
    "do_sample": bool,
    "subtalker_dosample": bool,
}
"""Parameters whose defaults a checkpoint's generation_config.json may set."""


def bound_params(config: TTSConfig) -> type[Params]:
    """Return the parameters of a checkpoint: its voices and languages, and its defaults."""
    changes: dict[str, dict[str, Any]] = {
        "voice": {"choices": tuple(config.voices), "any_choice": True},
        "language": {"choices": ("auto", *config.language_names), "any_choice": True},
    }
    fields: list[tuple[str, Any, Any]] = []
    for item in dataclasses.fields(Params):
        default = config.sampling.get(item.name, item.default) if item.name in NUMBERS else item.default
        if default is None or item.name not in {*NUMBERS, *changes}:
            continue
        made = NUMBERS.get(item.name, str)(default)
        key = next(iter(item.metadata))
        metadata = {**item.metadata, key: {**item.metadata[key], **changes.get(item.name, {})}}
        fields.append((item.name, type(made), dataclasses.field(default=made, metadata=metadata)))
    return dataclasses.make_dataclass("Params", fields, bases=(Params,), frozen=True, slots=True, kw_only=True)
