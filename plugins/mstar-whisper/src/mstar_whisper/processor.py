"""Processor: an uploaded recording to samples and facts, ids to text, records to segments. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mstar_core.errors import BadMedia, RequestError, did_you_mean
from mstar_core.families.languages import LANGUAGES, language_code
from mstar_core.plugin.media import read_sound
from mstar_core.plugin.media.speech import speech_spans
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.processor import Detokenizer, InputPart, Inputs, PromptRequest
from mstar_whisper.checkpoint.config import HOP, RATE, read_config
from mstar_whisper.text.record import segments_of
from mstar_whisper.text.tokens import Tokens
from mstar_whisper.windows import Window, around

LEAST: Final = 400
"""Samples of one frame: the shortest sound."""

MARGIN: Final = 2
"""Frames before and behind a part: a frame reads samples of its neighbours."""


class Processor:
    """Processor of one checkpoint. Made once per pool process."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "whisper")
        self._folder = folder
        self._config = read_config(folder)

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self._folder, self._config.ids)

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return samples and facts. Raises RequestError and BadMedia for what a client must change."""
        sounds = [part for part in request.media if part.modality == "audio"]
        if len(sounds) != 1:
            title = "the request has no sound" if not sounds else f"the request has {len(sounds)} sounds"
            raise RequestError(title, hint="send one recording", field="files", code="missing_field")
        samples = read_sound(sounds[0].data, RATE, request.limits)
        if len(samples) < LEAST:
            detail = f"{len(samples)} samples at {RATE} Hz, at least {LEAST} are needed"
            raise BadMedia("the sound is too short", detail, "send at least 25 ms of sound", field="files")
        params = request.params
        if params.batch_size > 1 and params.condition_on_previous:
            title = "windows that read the text of earlier ones cannot be decoded side by side"
            raise RequestError(title, hint="omit batch_size or condition_on_previous", field="batch_size")
        windows = self._windows(samples) if params.vad or params.batch_size > 1 else None
        prompt = self._prompt(" ".join(filter(None, (request.params.prompt, request.text))))
        facts = {
            **self._config.facts(),
            "frames": max(self._config.frames, len(samples) // HOP),
            "windows": windows,
            "prompt": prompt,
            "language": self._language(request.params.language) if self._config.ids.languages else 0,
        }
        self._check_task(request.params.task)
        seconds = len(samples) / RATE
        return Inputs(
            arrays={"pcm": samples},
            facts=facts,
            prompt_tokens=len(prompt) + 4,
            usage={"audio_seconds": int(np.ceil(seconds))},
            metadata={"segments": {"duration": round(seconds, 3)}},
            parts=[self._part(window) for window in windows or ()] if params.batch_size > 1 else (),
        )

    def postprocess(self, output: npt.NDArray[Any], modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return the segments of a record as JSON."""
        return segments_of(output, self._tokens, self._config.ids), {}

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return self._tokens.detokenizer()

    def _prompt(self, text: str) -> list[int]:
        most = self._config.positions // 2 - 1
        return self._tokens.encode(" " + text.strip())[-most:] if text.strip() else []

    def _windows(self, samples: npt.NDArray[np.float32]) -> list[tuple[int, int]]:
        return around([(start // HOP, end // HOP) for start, end in speech_spans(samples, "vad")], self._config.frames)

    def _part(self, window: Window) -> InputPart:
        """Return a window as a recording of its own, with a margin for the frames at its ends."""
        first, count = window
        margin = min(first, MARGIN)
        offset = first - margin
        facts = {
            "offset": offset,
            "frames": max(self._config.frames, margin + count),
            "windows": [(margin, count)],
        }
        return InputPart(spans={"pcm": (offset * HOP, (first + count + MARGIN) * HOP)}, facts=facts)

    def _language(self, language: str | None) -> int | None:
        if language is None:
            return None
        known, code = self._config.ids.languages, language_code(language)
        if code not in known:
            names = [*known, *(LANGUAGES[each].lower() for each in known if each in LANGUAGES)]
            title = f"the model does not know the language {language[:40]!r}"
            hint = did_you_mean(language, names) or f"one of {', '.join(sorted(known))}"
            raise RequestError(title, hint=hint, field="language", value=language, allowed=", ".join(sorted(known)))
        return known[code]

    def _check_task(self, task: str) -> None:
        if task == "translate" and self._config.ids.translate is None:
            hint = "start a multilingual checkpoint"
            raise RequestError("this checkpoint cannot translate", "it knows English alone", hint, field="task")
