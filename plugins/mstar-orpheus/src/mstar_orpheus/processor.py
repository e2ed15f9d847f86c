"""Prompt ids of a text, and bytes of samples. Runs in the api's process pool, without torch and weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mstar_core.errors import RequestError
from mstar_core.plugin.model import checkpoint_folder
from mstar_core.plugin.params import lowered_warnings
from mstar_core.plugin.processor import Inputs, PromptRequest
from mstar_orpheus.checkpoint.config import VOICES, read_config
from mstar_orpheus.checkpoint.layout import CheckpointLayout
from mstar_orpheus.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from mstar_orpheus.plugin import OpenParams

PROMPT = "text_tokens"
"""Name of the request's only input array."""


class Processor:
    """Processor of Orpheus: prompts and 16-bit sound. Created once per pool process."""

    def __init__(self, folder: Path | None, model_kwargs: Mapping[str, Any]) -> None:
        folder = checkpoint_folder(folder, "orpheus")
        self._config = read_config(folder)
        self._lm = CheckpointLayout.find(folder).lm
        self._tokenizer: TextTokenizer | None = None

    def process_prompt(self, request: PromptRequest) -> Inputs:
        """Return prompt ids and the output limit that the context leaves. Raises RequestError with the field."""
        params: OpenParams = request.params
        ids = self._prompt(request)
        limit = min(request.max_seq_len or self._config.max_positions, self._config.max_positions)
        if len(ids) >= limit:
            raise _too_long(len(ids), limit, "prompt_token_ids" if params.prompt_token_ids else "text")
        room = limit - len(ids)
        warnings = _warnings(request, room)
        return Inputs(
            arrays={PROMPT: np.asarray(ids, dtype=np.int64)},
            prompt_tokens=len(ids),
            max_output_tokens=min(params.max_output_tokens, room),
            params=dataclasses.replace(params, max_output_tokens=min(params.max_output_tokens, room)),
            warnings=warnings,
        )

    def postprocess(self, output: np.ndarray, modality: str) -> tuple[bytes, dict[str, Any]]:
        """Return one chunk of sound as little-endian PCM16, and its metadata. output: int16 samples."""
        samples = np.ascontiguousarray(output, dtype="<i2").reshape(-1)
        return samples.tobytes(), {"sample_rate": self._config.sample_rate, "num_channels": 1, "samples": len(samples)}

    def _prompt(self, request: PromptRequest) -> list[int]:
        params: OpenParams = request.params
        if params.prompt_token_ids is not None:
            return self._of_ids(params.prompt_token_ids)
        text = (request.text or "").strip()
        if not text:
            code = "missing_field" if request.text is None else "invalid_value"
            raise RequestError("text is empty", hint="send a text", field="text", code=code)
        voice = _spelled(params.voice)
        special = self._config.ids
        spoken = self.tokenizer.encode(f"{voice}: {text}" if voice else text)
        return [special.start, *spoken, *special.end]

    @property
    def tokenizer(self) -> TextTokenizer:
        """The checkpoint's tokenizer, read at first use, because `prompt_token_ids` needs none."""
        if self._tokenizer is None:
            self._tokenizer = TextTokenizer(self._lm)
        return self._tokenizer

    def _of_ids(self, ids: Sequence[int]) -> list[int]:
        vocab = self._config.vocab_size
        if not ids:
            raise RequestError("prompt_token_ids is empty", hint="send at least one id", field="prompt_token_ids")
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            allowed = f"0 to {vocab - 1}"
            raise RequestError(
                f"prompt_token_ids contains {wrong}, allowed is {allowed}",
                field="prompt_token_ids",
                value=str(wrong),
                allowed=allowed,
            )
        return list(ids)


def _spelled(voice: str) -> str:
    """Return a voice in the model's spelling. The parameter class checks whether the name is allowed."""
    known = voice.strip().lower()
    return known if known in VOICES else voice.strip()


def _too_long(length: int, limit: int, field: str) -> RequestError:
    return RequestError(
        f"the prompt has {length} ids and the context {limit}",
        "at least one id must be left for the sound",
        "split the text into sentences and send them one by one",
        field=field,
        code="context_length_exceeded",
    )


def _warnings(request: PromptRequest, room: int) -> list[str]:
    warnings = lowered_warnings(request.params, "max_output_tokens", room)
    if request.params.prompt_token_ids is not None and (request.text or "").strip():
        warnings.append("prompt_token_ids was given, so text and voice have no effect")
    return warnings
