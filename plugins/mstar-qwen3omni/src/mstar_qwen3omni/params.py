"""Request parameters of Qwen3-Omni: thinker, talker, code predictor, media. Used by api, programs and processor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mstar_core.errors import RequestError
from mstar_core.plugin import TextSampling, param, sampling_param

VOICES: Final = ("ethan", "chelsie", "aiden")
CODEC_CHUNK: Final = 25
CODEC_LEFT: Final = 25
CODEC_FIRST: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(TextSampling):
    """Parameters of a request. `talker_*` and `code_predictor_*` apply to the sound, other names to the text."""

    temperature: float = sampling_param("temperature", 0.7, "of text; 0 is greedy", aliases=("thinker_temperature",))
    top_p: float = sampling_param("top_p", 0.9, "nucleus mass of text; 1 is off", aliases=("thinker_top_p",))
    top_k: int = sampling_param("top_k", 0, aliases=("thinker_top_k",))
    repetition_penalty: float = sampling_param("repetition_penalty", 1.0, aliases=("thinker_repetition_penalty",))
    max_output_tokens: int = param(
        2048, "most text tokens of the answer", ge=1, openai="max_tokens", aliases=("thinker_max_tokens",)
    )
    ignore_eos: bool = param(False, "for load tests: text goes on to its limit")
    seed: int | None = param(None, "same seed, same text and sound", ge=0, le=2**63 - 1, openai="seed")
    voice: str = param("ethan", "speaker of the answer", choices=VOICES, openai="voice")
    talker_temperature: float = sampling_param(
        "temperature", 0.9, "of the sound; 0 is greedy, which tends to drone", openai="speech:temperature"
    )
    talker_top_k: int = sampling_param("top_k", 50, "most likely codes to draw from; 0 is off")
    talker_top_p: float = sampling_param("top_p", 1.0, "nucleus mass of codes; 1 is off", openai="speech:top_p")
    talker_min_p: float = sampling_param("min_p", 0.0, "least share of the best code's probability; 0 is off")
    talker_repetition_penalty: float = sampling_param(
        "repetition_penalty", 1.05, "over the codes of this answer; 1 is off"
    )
    talker_max_tokens: int = param(
        4096, "most codec frames, 12.5 per second", ge=1, aliases=("talker_max_output_tokens",)
    )
    code_predictor_temperature: float = sampling_param(
        "temperature", 1.0, "of the residual codes; 0 is greedy", openai=""
    )
    code_predictor_top_k: int = sampling_param("top_k", 50, "most likely residual codes to draw from; 0 is off")
    code_predictor_top_p: float = sampling_param("top_p", 0.8, "nucleus mass of residual codes; 1 is off", openai="")
    codec_chunk_frames: int = param(CODEC_CHUNK, "frames per piece of sound, 80 ms each", ge=1, le=1000)
    codec_first_frames: int = param(
        CODEC_FIRST, "frames in the first piece of sound, smaller for an early start", ge=1, le=1000
    )
    codec_left_context_frames: int = param(CODEC_LEFT, "earlier frames that each piece is decoded with", ge=0, le=1000)
    use_audio_in_video: bool = param(False, "hear a video's sound track too", aliases=("load_audio_from_video",))
    fps: float = param(2.0, "frames per second taken from a video", gt=0, le=60)
    max_frames: int = param(768, "most frames taken from a video", ge=2, le=768)
    min_pixels: int = param(3136, "least pixels of an image after resizing", ge=1)
    max_pixels: int = param(12_845_056, "most pixels of an image after resizing", ge=1024, le=12_845_056)
    video_min_pixels: int = param(131_072, "least pixels of a video frame after resizing", ge=1)
    video_max_pixels: int = param(786_432, "most pixels of a video frame after resizing", ge=1024, le=12_845_056)
    prompt_token_ids: tuple[int, ...] | None = param(
        None, "the whole prompt as ids with its pads, in place of text; media are tensors in order", ge=0
    )

    def check(self) -> Iterator[RequestError]:
        """Check rules across fields."""
        for low, high in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            least, most = (
                (self.min_pixels, self.max_pixels)
                if low == "min_pixels"
                else (self.video_min_pixels, self.video_max_pixels)
            )
            if least > most:
                yield RequestError(
                    f"{low} is {least}, above {high} {most}",
                    hint="lower it",
                    field=low,
                    value=str(least),
                    allowed=f"<= {most}",
                )
