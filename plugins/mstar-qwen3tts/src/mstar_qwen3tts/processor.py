"""Processor of Qwen3-TTS: text and a recording to the rows of a prompt, samples to bytes. Imports no torch."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mstar_core.errors import BadMedia, RequestError, did_you_mean
from mstar_core.plugin.media import read_sound
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.params import lowered_warnings
from mstar_core.plugin.processor import Inputs, PromptRequest, SegmentInputs, content_key
from mstar_qwen3tts.checkpoint.config import BASE, CUSTOM, DESIGN, read_config
from mstar_qwen3tts.params import MOST_FRAMES
from mstar_qwen3tts.program import TIMBRE, VOICE
from mstar_qwen3tts.request.prompt import AUTO, Speech, layout
from mstar_qwen3tts.request.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from mstar_qwen3tts.params import Params

INLINE_CHARS: Final = 1024
"""Longest text that the api tokenizes itself, in about two milliseconds."""

RATE: Final = 24_000
LEAST_SAMPLES, SHORT_SAMPLES, MOST_SAMPLES = 1280, RATE // 2, 30 * RATE
"""Samples of a recording: fewest for the spectrogram, fewest that are advised, most."""

LEAST_FRAMES, FRAMES_PER_TOKEN = 75, 8
"""Default limit of a speech: that much plus so many for each token of text."""


class Processor:
    """Processor of one checkpoint. Created once per pool process, and in the api. Raises WeightsError."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "qwen3_tts")
        self._config = config = read_config(folder)
        self._tokenizer = tokenizer = TextTokenizer(folder)
        self._encoded_frame = int(np.prod(config.encoder.ratios)) * 2
        self._header = tokenizer.encode_template("<|im_start|>assistant\n")
        self._user, self._end = (
            tokenizer.encode_template("<|im_start|>user\n"),
            tokenizer.encode_template("<|im_end|>\n"),
        )

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return the rows of the prompt, the text that follows, and the recording. Raises RequestError, BadMedia."""
        params, warnings = request.params, list[str]()
        text = list(request.ids) if request.is_open else self._tokenizer.encode((request.text or "").strip())
        if not text:
            raise RequestError("the text is empty", hint="send a text", field="text", code="missing_field")
        segment, speech = self._voice(request, warnings)
        # The rows of a recording with known text hold its ids and as many of the text as there are rows left.
        least = 1 + speech.frames - len(speech.reference)
        if request.is_open and speech.frames and len(text) < least and text[-1] != self._config.ids.tts_eos:
            return Inputs(needs_ids=least)
        whole = params.non_streaming_mode
        if whole and request.is_open:
            warnings.append("non_streaming_mode has no effect on a text that arrives while it is spoken")
        speech = dataclasses.replace(
            speech,
            header=self._header,
            text=text,
            instruction=self._instruction(params, warnings),
            language=self._language(params.language),
            is_whole=not request.is_open and (self._config.kind != BASE if whole is None else whole),
            is_open=request.is_open,
        )
        rows, trailing = layout(speech, self._config)
        limit = min(request.max_seq_len or self._config.max_positions, self._config.max_positions)
        params = self._limited(params, limit, len(rows), None if request.is_open else len(text), warnings)
        arrays = {"prompt": rows, "fresh": np.zeros(1, np.int64)}
        if trailing:
            arrays["trailing"] = np.asarray(trailing, np.int64)
        return Inputs(
            arrays=arrays,
            segments=segment,
            prompt_tokens=len(rows),
            params=params,
            max_output_tokens=params.max_output_tokens,
            warnings=warnings,
        )

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return sound as little-endian PCM16. output: int16 [samples]."""
        samples = np.ascontiguousarray(output, dtype="<i2").reshape(-1)
        return samples.tobytes(), {"samples": len(samples)}

    def warm_up(self) -> None:
        """Tokenize once."""
        self._tokenizer.encode("Hello")

    def is_inline(self, request: PromptRequest) -> bool:
        """Whether the request is a short text without a recording."""
        return not request.media and request.size_bytes <= INLINE_CHARS

    def text_reader(self) -> TextReader:
        """Return a tokenizer of text that arrives in pieces."""
        return TextReader(self._tokenizer, self._config.ids.tts_eos)

    # -- parts of a request ------------------------------------------------------------------------------------------

    def _voice(self, request: PromptRequest, warnings: list[str]) -> tuple[list[SegmentInputs], Speech]:
        """Return the recording, if there is one, and the speech with its voice."""
        params, kind, name = request.params, self._config.kind, request.params.voice.strip().lower()
        recordings = [part.data for part in request.media if part.modality == "audio"]
        if kind == BASE:
            return self._cloned(request, recordings, warnings)
        if recordings:
            hint = "use a Base checkpoint to clone a voice"
            raise RequestError(f"a {kind} checkpoint takes no recording", hint=hint, field="ref_audio")
        if kind == DESIGN and name:
            raise RequestError(
                "this checkpoint has no voices", hint="describe the voice in instructions", field="voice", value=name
            )
        if kind == CUSTOM and not name:
            name = next(iter(self._config.voices), "")
        if kind == CUSTOM and name not in self._config.voices:
            raise _unknown("voice", params.voice, list(self._config.voices))
        return [], Speech(header=(), text=(), voice=name)

    def _cloned(
        self, request: PromptRequest, recordings: list[bytes], warnings: list[str]
    ) -> tuple[list[SegmentInputs], Speech]:
        params = request.params
        if len(recordings) != 1:
            hint = "send ref_audio, or the name of an uploaded voice (POST /v1/audio/voices)"
            title = (
                "several recordings were sent" if recordings else "this checkpoint speaks in the voice of a recording"
            )
            value = params.voice[:40] or None
            raise RequestError(title, hint=hint, field="voice" if params.voice else "ref_audio", value=value)
        samples = read_sound(recordings[0], RATE, request.limits)
        if not LEAST_SAMPLES <= len(samples) <= MOST_SAMPLES:
            raise BadMedia(
                f"the recording has {len(samples) / RATE:.2f} s",
                f"from {LEAST_SAMPLES / RATE:.2f} to {MOST_SAMPLES // RATE} s are possible",
                "send 3 to 15 s of one speaker",
                field="ref_audio",
            )
        if len(samples) < SHORT_SAMPLES:
            warnings.append("the recording is shorter than 0.5 s; 3 to 15 s give a better voice")
        reference = self._tokenizer.encode(params.ref_text.strip())
        has_text = bool(reference) and not params.x_vector_only_mode
        segment = SegmentInputs(
            kind=VOICE if has_text else TIMBRE,
            arrays={"audio": samples.astype(np.float32)[None]},
            content=content_key("audio", recordings[0]),
        )
        frames = -(-len(samples) // self._encoded_frame) if has_text else 0
        return [segment], Speech(
            header=(), text=(), is_cloned=True, reference=reference if has_text else (), frames=frames
        )

    def _instruction(self, params: Params, warnings: list[str]) -> list[int]:
        text = params.instructions.strip()
        if not text:
            return []
        if self._config.kind == BASE:
            hint = "leave it out, or use a CustomVoice or VoiceDesign checkpoint"
            raise RequestError("a Base checkpoint takes no instruction", hint=hint, field="instructions")
        if not self._config.takes_instructions:
            warnings.append("instructions has no effect on a checkpoint of 0.6B")
            return []
        return [*self._user, *self._tokenizer.encode(text), *self._end]

    def _language(self, name: str) -> str:
        known = (AUTO, *self._config.language_names)
        lower = name.strip().lower() or AUTO
        if lower not in known:
            raise _unknown("language", name, list(known))
        return lower

    def _limited(self, params: Params, limit: int, rows: int, text: int | None, warnings: list[str]) -> Params:
        """Return the parameters with the limit of frames, and with temperatures of 0 for codes that are not drawn."""
        room = limit - rows - 1
        if room < 1:
            raise RequestError(
                f"the prompt has {rows} rows, and the context {limit}",
                hint="send a shorter text, or raise max_seq_len",
                field="text",
                code="context_length_exceeded",
            )
        if params.max_output_tokens is None:
            most = MOST_FRAMES if text is None else min(MOST_FRAMES, LEAST_FRAMES + FRAMES_PER_TOKEN * text)
            params = dataclasses.replace(params, max_output_tokens=min(most, room))
        elif params.max_output_tokens > room:
            warnings += lowered_warnings(params, "max_output_tokens", room)
            params = dataclasses.replace(params, max_output_tokens=room)
        return dataclasses.replace(
            params,
            temperature=params.temperature if params.do_sample else 0.0,
            subtalker_temperature=params.subtalker_temperature if params.subtalker_dosample else 0.0,
        )


class TextReader:
    """Tokenizer of a text that arrives in pieces: the same ids as of the whole, each as early as it is certain."""

    def __init__(self, tokenizer: TextTokenizer, end: int) -> None:
        """end: id of the end of text."""
        self._tokenizer, self._end, self._rest, self._has_begun = tokenizer, end, "", False

    def push(self, text: str) -> list[int]:
        """Return the ids that no later text can change. They end before a space or a mark behind a letter."""
        self._rest += text
        if not self._has_begun:
            self._rest = self._rest.lstrip()
        places = (at for at in range(len(self._rest) - 1, 0, -1) if _parts(self._rest[at - 1], self._rest[at]))
        cut = next(places, 0)
        certain, self._rest = self._rest[:cut], self._rest[cut:]
        self._has_begun |= bool(certain)
        return self._tokenizer.encode(certain) if certain else []

    def end(self) -> list[int]:
        """Return the last ids, with that of the end of text."""
        rest, self._rest, self._has_begun = self._rest.rstrip(), "", False
        return [*(self._tokenizer.encode(rest) if rest else []), self._end]


def _parts(before: str, after: str) -> bool:
    """Whether the tokenizer's pattern always splits between two characters."""
    return before.isalpha() and after != "'" and unicodedata.category(after)[0] in "PZS"


def _unknown(field: str, value: str, known: list[str]) -> RequestError:
    nearest = did_you_mean(value.strip().lower(), known)
    hint = f"use one of {', '.join(known)}" + (f"; {nearest}" if nearest.startswith("did you mean") else "")
    title = f"unknown {field} {value[:40]!r}"
    return RequestError(title, hint=hint, field=field, value=value[:40], allowed=", ".join(known))
